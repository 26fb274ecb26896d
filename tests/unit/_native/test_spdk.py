"""dlfs_spdk.h against its bindings, and what is said where the library is missing or another."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs._native import spdk
from dlfs.block import open_device
from dlfs.errors import NativeError
from tests.unit._native.test_abi import ROOT, assert_matches, layout, run_c, structures_of
from tests.unit._native.test_library import build

HEADER = (ROOT / "native/spdk/dlfs_spdk.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
DECLARATION = re.compile(r"DLFS_API\s+([^;(]*?[\s*])(dlfs_spdk_\w+)\(([^;]*)\);")
FUNCTIONS = {
    name: (restype.strip(), [part.strip() for part in parameters.split(",")])
    for restype, name, parameters in DECLARATION.findall(CODE)
}
CONSTANTS = ("VERSION", "WRITE", "BOUNCE", "UNSET")
URI = "spdk:trtype=TCP traddr=127.0.0.1 subnqn=nqn.2024-01.org.example:a nsid=1"


def test_every_function_is_bound_as_declared() -> None:
    assert set(FUNCTIONS) == set(spdk.PROTOTYPES)
    for name, (restype, parameters) in FUNCTIONS.items():
        bound_restype, bound_parameters = spdk.PROTOTYPES[name]
        assert_matches(restype, bound_restype, f"{name} returns")
        declared = [] if parameters == ["void"] else parameters
        assert len(declared) == len(bound_parameters), name
        for parameter, bound in zip(declared, bound_parameters, strict=True):
            assert_matches(parameter, bound, name)


def test_structures_and_constants_are_those_of_c(tmp_path: Path) -> None:
    assert set(re.findall(r"typedef struct (dlfs_\w+) \{", CODE)) == set(structures_of(spdk))
    expected, body = layout(structures_of(spdk))
    expected += [f"{name} {getattr(spdk, name)}" for name in CONSTANTS]
    body += [f'printf("{name} %lld\\n", (long long)DLFS_SPDK_{name});' for name in CONSTANTS]
    assert run_c("\n".join(body), tmp_path, "dlfs_spdk.h") == [*expected, ""]


@pytest.fixture
def loading() -> Iterator[None]:
    """The library is loaded anew in the test, and again after it."""
    spdk.spdk_library.cache_clear()
    yield
    spdk.spdk_library.cache_clear()


@pytest.mark.usefixtures("loading")
def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DLFS_SPDK_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(NativeError, match=r"built without SPDK.*Getting Started.*make build"):
        open_device(URI)
    with pytest.raises(NativeError, match="built without SPDK"):
        spdk.spdk_library()


@pytest.mark.usefixtures("loading")
def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"not a library")
    monkeypatch.setenv("DLFS_SPDK_LIBRARY", str(junk))
    with pytest.raises(NativeError, match=r"junk\.so.*Getting Started"):
        open_device(URI)


@pytest.mark.usefixtures("loading")
def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    functions = [f"int {name}(void) {{ return 7; }}\n" for name in spdk.PROTOTYPES]
    monkeypatch.setenv("DLFS_SPDK_LIBRARY", str(build(tmp_path, "".join(functions[1:]))))
    with pytest.raises(NativeError, match="expected the function"):
        open_device(URI)
    (tmp_path / "whole").mkdir()
    monkeypatch.setenv("DLFS_SPDK_LIBRARY", str(build(tmp_path / "whole", "".join(functions))))
    with pytest.raises(NativeError, match="expected version 2, got 7"):
        open_device(URI)
