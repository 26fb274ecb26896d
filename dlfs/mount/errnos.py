"""The errno with which a request on the mount fails, for each error class of this package.

A program sees only the number, and the log has the message of a fault. An error without a better
number is EIO. All handlers of both servers use ``report_failure`` for their exceptions.
"""

from __future__ import annotations

import errno
import logging

from dlfs.errors import (
    AuthenticationError,
    ChecksumError,
    ClosedError,
    DegradedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
    ExistsError,
    FormatError,
    LeaseLostError,
    LimitError,
    LockedError,
    NativeError,
    NotFoundError,
    ServiceLostError,
    SpaceError,
    StaleError,
    TransformError,
    TruncatedError,
    UsageError,
    VersionError,
)

ERRNOS: dict[type[DlfsError], int] = {
    DlfsError: errno.EIO,
    UsageError: errno.EINVAL,
    ClosedError: errno.EIO,
    NotFoundError: errno.ENOENT,
    ExistsError: errno.EEXIST,
    LockedError: errno.EBUSY,
    SpaceError: errno.ENOSPC,
    StaleError: errno.ESTALE,
    LimitError: errno.EOVERFLOW,
    TransformError: errno.EIO,
    ServiceLostError: errno.EIO,
    DeviceError: errno.EIO,
    DeviceLostError: errno.ENXIO,
    DeviceTimeoutError: errno.ETIMEDOUT,
    AuthenticationError: errno.EACCES,
    DegradedError: errno.EROFS,
    LeaseLostError: errno.EIO,
    FormatError: errno.EIO,
    ChecksumError: errno.EIO,
    VersionError: errno.EOPNOTSUPP,
    TruncatedError: errno.EIO,
    NativeError: errno.EIO,
}

UNLOGGED = frozenset({errno.ENOENT, errno.ESTALE})
"""Errnos of ordinary requests on sealed datasets, which the servers do not log."""

_log = logging.getLogger(__name__)


def errno_of(error: DlfsError | OSError | MemoryError) -> int:
    """Return the errno of an error: that of its class in the table, or of its nearest base."""
    for base in type(error).__mro__:
        if base in ERRNOS:
            return ERRNOS[base]
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO


def report_failure(error: Exception) -> int:
    """Return the errno with which a request fails after an exception, and log a fault.

    An exception that no handler should raise is logged with its traceback and becomes EIO. It fails
    one request; raised further, it would end the mount for all programs.

    Args:
        error: the exception of the request's handler.
    """
    if not isinstance(error, DlfsError | OSError | MemoryError):
        _log.error("a request failed by a defect of the server", exc_info=error)
        return errno.EIO
    number = errno_of(error)
    if number not in UNLOGGED:
        _log.error("%s: %s", errno.errorcode.get(number, number), error)
    return number
