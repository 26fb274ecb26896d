"""The errno with which a request on the mount fails, for each error class of this package.

A program sees only the number; the log has the message. An error without a better number is EIO.
"""

from __future__ import annotations

import errno

from dlfs.errors import (
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
    DegradedError: errno.EROFS,
    LeaseLostError: errno.EIO,
    FormatError: errno.EIO,
    ChecksumError: errno.EIO,
    VersionError: errno.EOPNOTSUPP,
    TruncatedError: errno.EIO,
    NativeError: errno.EIO,
}

UNLOGGED = frozenset({errno.ENOENT, errno.ESTALE})
"""Errnos of ordinary requests, which the servers do not log."""


def errno_of(error: DlfsError | OSError | MemoryError) -> int:
    """Return the errno of an error: that of its class in the table, or of its nearest base."""
    for base in type(error).__mro__:
        if base in ERRNOS:
            return ERRNOS[base]
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
