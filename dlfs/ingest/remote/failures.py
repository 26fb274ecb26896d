"""Sorts the errors of object stores: those worth another attempt, and typed errors for the rest.

The libraries behind fsspec raise exceptions of their own. Most of these, or their causes, have the
status of the HTTP response; without one, the class of the exception decides.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dlfs.base.wording import redact
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DeviceTimeoutError,
    DlfsError,
    SpaceError,
    TruncatedError,
)

ATTEMPTS_MAX = 6
"""Most requests for one piece of an object."""
DELAY_S = 0.25
"""Mean delay before the second request, in seconds; it doubles with each further one."""
DELAY_MAX_S = 15.0

_TEMPORARY_STATUS = (408, 425, 429)
_DENIED_STATUS = (401, 403)
_CHANGED_STATUS = (412, 416)
"""Precondition Failed; Range Not Satisfiable, as of an object that has become shorter."""
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
_CLIENTS = ("aiohttp", "botocore", "aiobotocore", "urllib3", "requests", "httpx", "httpcore")
"""Packages whose connection errors derive from no class of the standard library."""
_CUT_SHORT = {
    "ClientPayloadError", "ContentLengthError", "TransferEncodingError",  # aiohttp
    "IncompleteRead", "IncompleteReadError", "ResponseStreamingError",  # others
}  # fmt: skip
"""Exceptions for a body that ended too early, of all these packages."""
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "ProfileNotFound")


Result = TypeVar("Result")


class IncompleteError(EOFError):
    """The body of a response ended before its last byte, or did not end there."""


def with_retries(request: Callable[[], Result], what: str) -> Result:
    """Run a request, again after temporary errors.

    Args:
        request: sends the request and returns its result.
        what: action and object, which begin the message of an error.

    Raises:
        DlfsError: a permanent error, or ``ATTEMPTS_MAX`` attempts failed.
    """
    attempt = 0
    while True:
        try:
            return request()
        except Exception as error:  # noqa: BLE001
            attempt += 1
            delay_s = delay_before_next(error, attempt, what)
        time.sleep(delay_s)


def delay_before_next(error: Exception, attempt: int, what: str, *, is_last: bool = False) -> float:
    """Return the delay before the next attempt of a request that failed, in seconds.

    The delay grows exponentially, and is drawn at random.

    Args:
        error: exception of the request.
        attempt: number of attempts so far.
        what: action and object, which begin the message of an error.
        is_last: True if no further attempt is wanted.

    Raises:
        DlfsError: the error is permanent, or there were ``ATTEMPTS_MAX`` attempts.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015, "full jitter".
    """
    if is_last or attempt == ATTEMPTS_MAX or not is_temporary(error):
        raise typed(error, what) from cause_of(error)
    return random.uniform(0, min(DELAY_MAX_S, DELAY_S * 2**attempt))


def is_temporary(error: Exception) -> bool:
    """Return True if the same request may succeed later."""
    if isinstance(error, DlfsError):
        return error.retryable
    if _is_cut_short(error):
        return True
    status = status_of(error)
    if status is not None:
        return status in _TEMPORARY_STATUS or status >= 500
    if isinstance(error, _PERMANENT) or type(error).__name__ in _CREDENTIALS:
        return False
    if isinstance(error, OSError | EOFError | TimeoutError):
        return True
    return type(error).__module__.partition(".")[0] in _CLIENTS


def status_of(error: BaseException) -> int | None:
    """Return the status of the HTTP response that an exception, or its cause, reports."""
    for one in _causes(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        candidates = (
            getattr(one, "status", None),
            getattr(one, "status_code", None),
            vars(one).get("code"),  # gcsfs; a property of others warns
            getattr(response, "status_code", response),
        )
        for status in candidates:
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def typed(error: Exception, what: str) -> DlfsError:
    """Return the typed error for an exception of a store.

    Args:
        error: exception of fsspec or of a library behind it.
        what: action and object, which begin the message.
    """
    if isinstance(error, DlfsError):
        return error
    text = redact(" ".join(str(error).split())) or type(error).__name__
    status = status_of(error)
    if _is_cut_short(error):
        return TruncatedError(f"{what}: {text}")
    if type(error).__name__ == "FlexibleChecksumError":  # botocore checks some responses itself
        return ChecksumError(f"{what}: {text}")
    if isinstance(error, FileNotFoundError) or status == 404:
        return DeviceError(f"{what}: the object was removed during the import", errno.ESTALE)
    if status in _CHANGED_STATUS:
        return DeviceError(f"{what}: the object changed during the import: {text}", errno.ESTALE)
    if (
        isinstance(error, PermissionError)
        or status in _DENIED_STATUS
        or type(error).__name__ in _CREDENTIALS
    ):
        return DeviceError(f"{what}: the store denies access: {text}", errno.EACCES)
    if isinstance(error, TimeoutError):
        return DeviceTimeoutError(f"{what}: {text}")
    code = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None
    return DeviceError(f"{what}: {text}", code or errno.EIO)


def cause_of(error: Exception) -> Exception | None:
    """Return an exception as the cause of a typed error; None if its texts have a secret in them.

    Libraries show whole URLs, and a traceback shows the texts of all causes.
    """
    texts = [str(one) for one in _causes(error)]
    return error if all(redact(text) == text for text in texts) else None


@contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Turn the errors of files in the spool directory into typed errors.

    Raises:
        SpaceError: the file system is full.
        DeviceError: a file cannot be read or written.
    """
    try:
        yield
    except DlfsError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SpaceError(f"write a local copy in {path}: no space is left") from error
        raise DeviceError(
            f"write a local copy in {path}: {error.strerror or error}", error.errno or errno.EIO
        ) from error


def _is_cut_short(error: Exception) -> bool:
    """Return True if a body ended too early; aiohttp gives such errors the status 400."""
    return isinstance(error, IncompleteError) or any(
        type(one).__name__ in _CUT_SHORT for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
