"""libdlfs_fuse and its bindings: the header, the exported symbols, the structures."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dlfs._native import fuse
from tests.unit._native.test_abi import (
    DECLARATION,
    ROOT,
    assert_matches,
    layout,
    run_c,
    structures_of,
)

HEADER = (ROOT / "native/fuse/dlfs_fuse.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
FUNCTIONS = {
    name: (restype.strip(), [part.strip() for part in parameters.split(",")])
    for restype, name, parameters in DECLARATION.findall(CODE)
}


def test_every_function_is_bound_and_no_other() -> None:
    assert set(FUNCTIONS) == set(fuse.PROTOTYPES)
    assert len(FUNCTIONS) == CODE.count("DLFS_API ")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_prototype(name: str) -> None:
    restype, parameters = FUNCTIONS[name]
    bound_restype, bound_parameters = fuse.PROTOTYPES[name]
    assert_matches(restype, bound_restype, f"{name} returns")
    parameters = [] if parameters == ["void"] else parameters
    assert len(parameters) == len(bound_parameters)
    for parameter, bound in zip(parameters, bound_parameters, strict=True):
        assert_matches(parameter, bound, name)


def test_structures_and_constants_are_those_of_c(tmp_path: Path) -> None:
    declared = set(re.findall(r"typedef struct (dlfs_\w+) \{", CODE))
    assert declared == set(structures_of(fuse))
    expected, body = layout(structures_of(fuse))
    for name in ("VERSION", "DATASET_MAX", "NAME_BYTES_MAX", "RESUME", "NO_URING", "KEPT",
                 "UPCALL_OPEN_DATASET", "UPCALL_REPORT_FAILURE"):  # fmt: skip
        expected.append(f"{name} {getattr(fuse, name)}")
        body.append(f'printf("{name} %lld\\n", (long long)DLFS_FUSE_{name});')
    assert run_c("\n".join(body), tmp_path, "dlfs_fuse.h") == [*expected, ""]


def test_exports_are_the_header() -> None:
    nm = shutil.which("nm")
    if nm is None or not fuse.is_built():
        pytest.skip("no nm (package binutils), or built without the native server")
    command = [nm, "-D", "--defined-only", fuse.fuse_library()._name]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[2].split("@")[0] for line in listing.splitlines() if " T " in line}
    assert symbols == set(FUNCTIONS)
