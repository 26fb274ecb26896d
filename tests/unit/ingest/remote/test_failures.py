"""The exceptions of the libraries behind fsspec: which are temporary, and what they become."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from dlfs.errors import DeviceError, DeviceTimeoutError, DlfsError, NotFoundError, TruncatedError
from dlfs.ingest.remote import failures
from dlfs.ingest.remote.failures import (
    IncompleteError,
    is_temporary,
    status_of,
    typed,
    with_retries,
)


def failure(cause: Exception | None = None, **fields: Any) -> Exception:
    error = type("StoreError", (Exception,), {})("text")
    vars(error).update(fields)
    error.__cause__ = cause
    return error


BOTO = {"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (failure(status=429), 429),
        (failure(status_code=404), 404),
        (failure(code=500), 500),
        (failure(code="ServerBusy"), None),
        (failure(response=BOTO), 503),
        (failure(response=SimpleNamespace(status_code=401)), 401),
        (failure(cause=failure(response=BOTO)), 503),
        (OSError(errno.EIO, "x"), None),
    ],
)
def test_the_status_of_a_response_is_found(error: Exception, status: int | None) -> None:
    assert status_of(error) == status


@pytest.mark.parametrize(
    ("error", "temporary", "kind", "code"),
    [
        (failure(status=429), True, DeviceError, errno.EIO),
        (failure(status=503), True, DeviceError, errno.EIO),
        (failure(status=400), False, DeviceError, errno.EIO),
        (failure(status=401), False, DeviceError, errno.EACCES),
        (failure(status=404), False, DeviceError, errno.ESTALE),
        (failure(status=412), False, DeviceError, errno.ESTALE),
        (failure(status=416), False, DeviceError, errno.ESTALE),
        (PermissionError("x"), False, DeviceError, errno.EACCES),
        (FileNotFoundError("x"), False, DeviceError, errno.ESTALE),
        (ConnectionResetError(errno.ECONNRESET, "x"), True, DeviceError, errno.ECONNRESET),
        (TimeoutError("x"), True, DeviceTimeoutError, errno.EIO),
        (IncompleteError("x"), True, TruncatedError, None),
        (type("NoCredentialsError", (Exception,), {})("x"), False, DeviceError, errno.EACCES),
        (type("Lost", (Exception,), {"__module__": "aiohttp.x"})(), True, DeviceError, errno.EIO),
        (ValueError("x"), False, DeviceError, errno.EIO),
    ],
)
def test_an_exception_becomes_a_typed_error(
    error: Exception, temporary: bool, kind: type[DlfsError], code: int | None
) -> None:
    assert is_temporary(error) == temporary
    found = typed(error, "import s3://b/k")
    assert type(found) is kind
    assert str(found).startswith("import s3://b/k: ")
    assert getattr(found, "errno", None) == code


def test_temporary_errors_are_repeated_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0)
    errors: list[Exception] = [ConnectionResetError(), failure(status=500)]

    def request() -> str:
        if errors:
            raise errors.pop(0)
        return "answer"

    assert with_retries(request, "x") == "answer"
    errors[:] = [TimeoutError("slow")] * failures.ATTEMPTS_MAX + [ValueError()]
    with pytest.raises(DeviceTimeoutError, match="x: slow"):
        with_retries(request, "x")
    assert len(errors) == 1
    errors[:] = [NotFoundError("gone"), ValueError()]
    with pytest.raises(NotFoundError, match="gone"):
        with_retries(request, "x")
    assert len(errors) == 1
