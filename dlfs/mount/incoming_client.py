"""Asking a mount to seal, list and discard what is being written, from any process.

All of it goes through the mount, by extended attributes (``incoming_protocol``), so the file
system's own permissions decide who may do what.

Threads: any.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dlfs import errors
from dlfs.errors import (
    DeviceError,
    DlfsError,
    LockedError,
    NotFoundError,
    UsageError,
    write_error,
)
from dlfs.format.names import INCOMING, dataset_name_bytes
from dlfs.format.paths import PathLike, display
from dlfs.mount.mountpoint import FILE_SYSTEM_TYPE, find_mount, resolve
from dlfs.staging.protocol import (
    XATTR_DISCARD,
    XATTR_INCOMING,
    XATTR_SEAL,
    SealOptions,
    SealStatus,
    Spooled,
)

POLL_SECONDS = 0.1

_ENDS = ("open", "sealed", "undecided")


@dataclass(frozen=True)
class Waiting:
    """A dataset that is not sealed.

    Attributes:
        name: its name.
        contents: what it holds.
        status: whether it is being sealed, or why it was not.
    """

    name: bytes
    contents: Spooled
    status: SealStatus


def seal(
    mountpoint: PathLike,
    name: str | bytes,
    options: SealOptions | None = None,
    *,
    progress: Callable[[SealStatus], None] = lambda _: None,
) -> SealStatus:
    """Seal a dataset, and wait until it is.

    Args:
        mountpoint: of a mount with ``incoming``.
        name: of the dataset.
        options: how.
        progress: told now and then how far it has come.

    Raises:
        NotFoundError: there is no such dataset.
        UsageError: that is no mount with ``incoming``; an option is wrong; a link is in it.
        LockedError: another writer holds the volume, or a file is open for writing.
        SpaceError: the volume has too little free space.
        DeviceError: it cannot be read or written; you may not; the mount ended. Unless the message
            says otherwise nothing was sealed, and the dataset can still be written.
    """
    what = f"seal {display(dataset_name_bytes(name))!r}"
    with _opened(mountpoint, name, what) as directory:
        with _told(directory, what):
            os.setxattr(directory, XATTR_SEAL, (options or SealOptions()).encode())
        while (status := _status(directory, what)).state not in _ENDS:
            progress(status)
            select.select([], [], [], POLL_SECONDS)
    if status.state != "sealed":
        kind = getattr(errors, status.kind or "", DeviceError)
        assert issubclass(kind, DlfsError)
        raise kind(status.error or f"{what}: it was not sealed")
    return status


def discard(mountpoint: PathLike, name: str | bytes) -> None:
    """Forget a dataset that is not sealed, with all its files.

    Raises:
        DlfsError: as ``seal``.
    """
    what = f"discard {display(dataset_name_bytes(name))!r}"
    with _opened(mountpoint, name, what) as directory, _told(directory, what):
        os.setxattr(directory, XATTR_DISCARD, b"1")


def list_incoming(mountpoint: PathLike) -> list[Waiting]:
    """What is not sealed. Takes a walk over all its files.

    Raises:
        UsageError: that is no mount with ``incoming``.
        DeviceError: it cannot be read.
    """
    found = []
    what = "list what is incoming"
    for name in sorted(os.listdir(_incoming(mountpoint, what))):
        try:
            with _opened(mountpoint, name, what) as directory, _told(directory, what):
                contents = Spooled.decode(os.getxattr(directory, XATTR_INCOMING))
                found.append(Waiting(name, contents, _status(directory, what)))
        except NotFoundError:
            continue  # sealed meanwhile
    return found


def _incoming(mountpoint: PathLike, what: str) -> bytes:
    path = resolve(os.fsdecode(mountpoint))
    record = find_mount(path)
    if record is None or record.file_system_type != FILE_SYSTEM_TYPE:
        raise UsageError(f"{what}: expected where DLFS is mounted, got {path}")
    incoming = os.path.join(os.fsencode(path), INCOMING.encode())
    if "ro" in record.options.split(",") or not os.path.isdir(incoming):
        raise UsageError(f"{what}: {path} is read-only; mount it with --incoming")
    return incoming


@contextmanager
def _opened(mountpoint: PathLike, name: str | bytes, what: str) -> Iterator[int]:
    """The directory of a dataset: what it says can be read even after it is gone."""
    incoming = _incoming(mountpoint, what)
    path = os.path.join(incoming, dataset_name_bytes(name))
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{what}: there is nothing at {os.fsdecode(path)}") from error
    except OSError as error:
        raise _device_error(what, error) from error
    try:
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _told(directory: int, what: str) -> Iterator[None]:
    """Turn an errno of the mount into an error with its reason."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBUSY:
            reason = _status(directory, what).error
            raise LockedError(reason or f"{what}: it is being sealed") from error
        if error.errno in (errno.ENODATA, errno.ESTALE):
            raise NotFoundError(f"{what}: it is gone") from error
        raise _device_error(what, error) from error


def _status(directory: int, what: str) -> SealStatus:
    try:
        return SealStatus.decode(os.getxattr(directory, XATTR_SEAL))
    except OSError as error:
        raise _device_error(what, error) from error


def _device_error(what: str, error: OSError) -> DlfsError:
    return write_error(f"{what}: {error.strerror}", error.errno or 0)
