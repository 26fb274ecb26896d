"""Loading libdlfs, and turning its codes into errors."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from dlfs import errors
from dlfs._native import abi
from dlfs._native.abi import PROTOTYPES
from dlfs._native.library import check, describe, error_for, library


@pytest.fixture
def loading() -> None:
    """The process has loaded the library: objects of other tests use it when they are freed."""
    library()


def load() -> object:
    """Load the library anew, for this call only."""
    return library.__wrapped__()


def build(folder: Path, source: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "other.c").write_text(source)
    made = folder / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", "other.c", "-o", made], cwd=folder, check=True)
    return made


def test_loaded_once() -> None:
    assert library() is library()


@pytest.mark.usefixtures("loading")
def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLFS_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(errors.NativeError, match=r"is a checkout, .*`make build` builds it"):
        load()
    monkeypatch.setattr("dlfs._native.library.__file__", str(tmp_path / "dlfs/_native/library.py"))
    with pytest.raises(errors.NativeError, match=r"; reinstall dlfs$"):
        load()


@pytest.mark.usefixtures("loading")
def test_library_without_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = build(tmp_path, "int dlfs_version(void) { return 0; }\n")
    monkeypatch.setenv("DLFS_LIBRARY", str(made))
    with pytest.raises(errors.NativeError, match="expected the function"):
        load()


@pytest.mark.usefixtures("loading")
def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    functions = [f"int {name}(void) {{ return 0x7f0000; }}\n" for name in PROTOTYPES]
    monkeypatch.setenv("DLFS_LIBRARY", str(build(tmp_path, "".join(functions))))
    with pytest.raises(errors.NativeError, match="expected version"):
        load()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (abi.E_CHECKSUM, errors.ChecksumError),
        (abi.E_FORMAT, errors.FormatError),
        (abi.E_TRUNCATED, errors.TruncatedError),
        (abi.E_LOST, errors.DeviceLostError),
        (abi.E_TIMEOUT, errors.DeviceTimeoutError),
        (abi.E_CLOSED, errors.ClosedError),
        (abi.E_LIMIT, errors.LimitError),
        (abi.E_NOT_FOUND, errors.NotFoundError),
        (abi.E_SERVICE, errors.ServiceLostError),
        (abi.E_AUTH, errors.AuthenticationError),
        (abi.E_END, errors.NativeError),
        (-20000, errors.NativeError),
        (-errno.EINVAL, errors.UsageError),
        (-errno.EIO, errors.DeviceError),
        (-errno.ENOMEM, errors.DeviceError),
    ],
)
def test_codes_become_errors(code: int, kind: type[errors.DlfsError]) -> None:
    error = error_for(code, "read sample 3")
    assert type(error) is kind
    assert str(error).startswith(f"read sample 3: {describe(code)}")
    with pytest.raises(kind):
        check(code, "read sample 3")


def test_errno_is_kept() -> None:
    error = error_for(-errno.ENOMEM, "x")
    assert isinstance(error, errors.DeviceError)
    assert error.errno == errno.ENOMEM
    lost = error_for(abi.E_LOST, "x")
    assert isinstance(lost, errors.DeviceError)
    assert lost.errno == errno.ENODEV


@pytest.mark.parametrize("code", [0, 7])
def test_success_is_returned(code: int) -> None:
    assert check(code, "x") == code
