"""The errno that each error of this package becomes on the mount: one table, exhaustive.

A program sees only the number; the log has the message. What no other number fits better is EIO.
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


QUIET = frozenset({errno.ENOENT, errno.ESTALE})
"""What is no fault of anything, and not worth a word in the log."""


def errno_of(error: DlfsError | OSError | MemoryError) -> int:
    """The errno of an error: its class's in the table, or its nearest base's."""
    for base in type(error).__mro__:
        if base in ERRNOS:
            return ERRNOS[base]
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
