"""Every error that DLFS raises on purpose, in one tree.

::

    DlfsError
    ├── UsageError (ValueError)            the call is wrong: arguments, URIs, an object's state
    │   └── ClosedError                    the object was closed by its user
    ├── NotFoundError (LookupError)        no such dataset, sample or member
    ├── ExistsError (FileExistsError)      what was to be made is there already
    ├── LockedError (BlockingIOError)      another writer, which the message names, holds the volume
    ├── SpaceError (OSError)               the volume, or a file system, has too little free space
    ├── StaleError                         the dataset was removed under its reader
    ├── LimitError                         a stated limit would be exceeded
    ├── TransformError                     a user's transform raised; the message names the sample
    ├── DeviceError (OSError)              the world did it: a device failed
    │   ├── DeviceLostError                ... it is gone (retryable)
    │   ├── DeviceTimeoutError             ... it does not answer (retryable)
    │   ├── DegradedError                  ... a member is missing: the volume is read-only
    │   └── LeaseLostError                 ... this writer's hold on it is over, or was taken away
    ├── FormatError                        what is on media is not what FORMAT.md says
    │   ├── ChecksumError                  ... its CRC32C does not match
    │   ├── VersionError                   ... it is of a version this code cannot read
    │   └── TruncatedError                 ... it ends too early
    ├── ServiceLostError                   the node service is gone (retryable: it may be back)
    └── NativeError                        libdlfs is missing, of another version, or misbehaved

A message says the action, the object, the offset with its unit, what was expected and what was got.
"""

from __future__ import annotations

import errno


class DlfsError(Exception):
    """Base of every error of this package."""

    retryable: bool = False
    """Whether the same call may succeed later without anything being changed."""


class UsageError(DlfsError, ValueError):
    """The call itself is wrong."""


class ClosedError(UsageError):
    """The object was closed, or belongs to another process."""


class NotFoundError(DlfsError, LookupError):
    """There is no such dataset, sample or member."""


class ExistsError(DlfsError, FileExistsError):
    """What was to be made is there already."""


class LockedError(DlfsError, BlockingIOError):
    """Another writer holds the volume."""

    retryable = True


class SpaceError(DlfsError, OSError):
    """The volume, or the file system that is written to, has too little free space."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])


class StaleError(DlfsError):
    """The dataset was removed, and its space possibly reused, under its reader."""


class LimitError(DlfsError):
    """A stated limit would be exceeded."""


class TransformError(DlfsError):
    """A user's transform raised an error on a sample, which the message names."""


class DeviceError(DlfsError, OSError):
    """A device failed.

    Args:
        message: action, device, offset and length in bytes, what was got.
        code: the errno of the failure.
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


class DegradedError(DeviceError):
    """A volume can be read, and not written, because a member is missing or stale."""


class LeaseLostError(DeviceError):
    """A writer's hold on a shared device is over: not renewed in time, or taken by another."""


class FormatError(DlfsError):
    """What is on media is not what FORMAT.md says."""


class ChecksumError(FormatError):
    """Bytes on media do not have their recorded CRC32C."""


class VersionError(FormatError):
    """What is on media is of a version that this code cannot read."""


class TruncatedError(FormatError):
    """What is on media ends too early."""


class ServiceLostError(DlfsError):
    """The node service is gone, or has closed the connection to it."""

    retryable = True


class NativeError(DlfsError):
    """libdlfs is missing, of another version, or failed in a way it never should."""


def write_error(message: str, code: int) -> SpaceError | DeviceError:
    """The error of a write that the system refused: a SpaceError where there is no room for it.

    Args:
        message: action, what was written, why it failed.
        code: the errno; 0 for none.
    """
    if code in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(message)
    return DeviceError(message, code or errno.EIO)
