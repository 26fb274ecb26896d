"""Every error that DLFS raises, as one tree of classes.

::

    DlfsError
    ├── UsageError (ValueError)            the call is wrong: arguments, URIs, an object's state
    │   └── ClosedError                    the object was closed by its user
    ├── NotFoundError (LookupError)        no such dataset, sample or member
    ├── ExistsError (FileExistsError)      the object to create already exists
    ├── LockedError (BlockingIOError)      another writer, which the message names, has the lock
    ├── SpaceError (OSError)               the volume, or a file system, has too little free space
    ├── StaleError                         the dataset was removed while it was open
    ├── LimitError                         a stated limit would be exceeded
    ├── TransformError                     a user's transform raised; the message names the sample
    ├── DeviceError (OSError)              a device failed
    │   ├── DeviceLostError                ... it is gone (retryable)
    │   ├── DeviceTimeoutError             ... it does not answer (retryable)
    │   ├── AuthenticationError            ... this host or its target was not authenticated
    │   ├── DegradedError                  ... a member is missing: the volume is read-only
    │   └── LeaseLostError                 ... this writer's lease or grant is over, or was taken
    ├── FormatError                        the bytes on media violate the format (FORMAT.md)
    │   ├── ChecksumError                  ... their CRC32C does not match
    │   ├── VersionError                   ... their version is unknown to this release
    │   └── TruncatedError                 ... they end too early
    ├── ServiceLostError                   the node service is gone (retryable: it may be back)
    └── NativeError                        libdlfs is missing, of another version, or misbehaved

A message names the action, the object, the offset with its unit, the expected and the actual value.
"""

from __future__ import annotations

import errno


class DlfsError(Exception):
    """Base class of every error of this package."""

    retryable: bool = False
    """True if the same call may succeed later without any change by the caller."""


class UsageError(DlfsError, ValueError):
    """The call itself is wrong."""


class ClosedError(UsageError):
    """The object was closed, or belongs to another process."""


class NotFoundError(DlfsError, LookupError):
    """There is no such dataset, sample or member."""


class ExistsError(DlfsError, FileExistsError):
    """The object to create already exists."""


class LockedError(DlfsError, BlockingIOError):
    """Another writer has locked the volume."""

    retryable = True


class SpaceError(DlfsError, OSError):
    """The volume, or the file system of the target, has too little free space."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])


class StaleError(DlfsError):
    """The dataset was removed while it was open, and its space may be in use again."""


class LimitError(DlfsError):
    """A stated limit would be exceeded."""


class TransformError(DlfsError):
    """A user's transform raised an error on a sample, which the message names."""


class DeviceError(DlfsError, OSError):
    """A device failed.

    Args:
        message: action, device, offset and length in bytes, and the cause.
        code: errno of the failure.
    """

    def __init__(self, message: str, code: int = errno.EIO) -> None:
        super().__init__(code, message)

    def __str__(self) -> str:
        return str(self.args[1])


class DeviceLostError(DeviceError):
    """A device is gone."""

    retryable = True


class DeviceTimeoutError(DeviceError):
    """A device did not answer within the time allowed."""

    retryable = True


class AuthenticationError(DeviceError):
    """A target refused this host's key, or this host refused the target.

    The message says which side refused and why; it contains no part of a key.
    """

    def __init__(self, message: str, code: int = errno.EACCES) -> None:
        super().__init__(message, code)


class DegradedError(DeviceError):
    """The volume can be read but not written, because a member is missing or stale."""


class LeaseLostError(DeviceError):
    """The writer's lease or grant on a shared device is over, or another writer has taken it."""


class FormatError(DlfsError):
    """The bytes on media violate the format (FORMAT.md)."""


class ChecksumError(FormatError):
    """Bytes on media do not have their recorded CRC32C."""


class VersionError(FormatError):
    """The bytes on media are of a version that this release cannot read."""


class TruncatedError(FormatError):
    """The bytes on media end too early."""


class ServiceLostError(DlfsError):
    """The node service is gone, or has closed the connection."""

    retryable = True


class NativeError(DlfsError):
    """libdlfs is missing, of another version, or failed unexpectedly."""


def write_error(message: str, code: int) -> SpaceError | DeviceError:
    """Return the error for a write that the system refused: a SpaceError if space is lacking.

    Args:
        message: action, object and cause.
        code: errno of the write; 0 for none.
    """
    if code in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(message)
    return DeviceError(message, code or errno.EIO)


def restore_error(
    kind: str, message: str, code: int = 0, *, otherwise: type[DlfsError] = NativeError
) -> DlfsError:
    """Return the error that another process has described.

    Args:
        kind: name of the error's class.
        message: its text.
        code: errno; 0 for none.
        otherwise: class of an error whose class is unknown.
    """
    found = globals().get(kind)
    error = found if isinstance(found, type) and issubclass(found, DlfsError) else otherwise
    return error(message, code or errno.EIO) if issubclass(error, DeviceError) else error(message)


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error that will be stored, and of its causes.

    A traceback keeps the variables of its functions and of all their callers alive, and so devices.
    Causes may form a circle: an error that is stored may be raised again, and cause another one.
    """
    each: BaseException | None = error
    visited: set[int] = set()
    while each is not None and id(each) not in visited:
        visited.add(id(each))
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
