from __future__ import annotations

import errno

import pytest

import dlfs.errors
from dlfs.errors import ChecksumError, DeviceError, DlfsError, NotFoundError, StaleError
from dlfs.mount.errnos import ERRNOS, errno_of, report_failure


def every_error() -> list[type[DlfsError]]:
    found, pending = [], [DlfsError]
    while pending:
        kind = pending.pop()
        pending += [k for k in kind.__subclasses__() if k.__module__ == dlfs.errors.__name__]
        found.append(kind)
    return found


def test_table_is_exhaustive() -> None:
    assert set(every_error()) == set(ERRNOS)


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_its_errno(kind: type[DlfsError]) -> None:
    assert errno_of(kind("what happened")) == ERRNOS[kind]
    assert ERRNOS[kind] in errno.errorcode


def test_errnos_that_programs_rely_on() -> None:
    assert errno_of(ChecksumError("x")) == errno.EIO
    assert errno_of(StaleError("x")) == errno.ESTALE
    assert errno_of(DeviceError("x", errno.EACCES)) == errno.EIO


def test_other_errors() -> None:
    class OwnError(StaleError):
        pass

    assert errno_of(OwnError("x")) == errno.ESTALE
    assert errno_of(OSError(errno.EMFILE, "x")) == errno.EMFILE
    assert errno_of(OSError("without a number")) == errno.EIO
    assert errno_of(MemoryError()) == errno.ENOMEM


@pytest.mark.parametrize(
    ("error", "number", "logged"),
    [
        (NotFoundError("x"), errno.ENOENT, ""),
        (ChecksumError("x"), errno.EIO, "EIO: x"),
        (OSError(errno.EMFILE, "x"), errno.EMFILE, "EMFILE"),
        (RuntimeError("x"), errno.EIO, "a request failed by a defect"),
        (KeyError("x"), errno.EIO, "KeyError: 'x'"),
    ],
)
def test_faults_and_defects_are_logged(
    error: Exception,
    number: int,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert report_failure(error) == number
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)
