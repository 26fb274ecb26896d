"""Client of a mount with ``incoming``: seals, lists and discards staged datasets from any process.

Each request is an extended attribute of a directory on the mount (``dlfs.staging.protocol``), so
file permissions decide which users may seal or discard.

Threads: any.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from dlfs.mount.mountpoint import (
    FILE_SYSTEM_TYPE,
    INCOMING_TYPE,
    find_mount,
    record_of,
    resolve,
)
from dlfs.staging.protocol import (
    XATTR_DISCARD,
    XATTR_INCOMING,
    XATTR_SEAL,
    SealOptions,
    SealStatus,
    StagedContents,
)

POLL_SECONDS = 0.1

SHOWN_SECONDS = 3.0
"""Longest wait for a mount to show a dataset that was sealed, in seconds."""

_FINAL_STATES = ("open", "sealed", "undecided")


@dataclass(frozen=True)
class StagedDataset:
    """A dataset in the staging area.

    Attributes:
        name: name of the dataset.
        contents: its number of files and bytes, and when it was begun.
        status: state of its sealing, with the last error.
    """

    name: bytes
    contents: StagedContents
    status: SealStatus


def seal(
    mountpoint: PathLike,
    name: str | bytes,
    options: SealOptions | None = None,
    *,
    progress: Callable[[SealStatus], None] = lambda _: None,
) -> SealStatus:
    """Seal a dataset, and wait for the end and until the mount shows the dataset.

    Args:
        mountpoint: mount point of a mount with ``incoming``.
        name: name of the dataset.
        options: options of the seal.
        progress: called with the status about ten times a second.

    Raises:
        NotFoundError: there is no such dataset.
        UsageError: the mount has no ``incoming``; an option is wrong; the dataset has a link.
        LockedError: another writer has the volume's lock, or a file is open for writing.
        SpaceError: the volume has too little free space.
        DeviceError: an I/O error; missing permission; the mount ended. Unless the message says
            otherwise nothing was sealed, and the dataset can still be written.
    """
    what = f"seal {display(dataset_name_bytes(name))!r}"
    with _opened(mountpoint, name, what) as directory:
        with _translated(directory, what):
            os.setxattr(directory, XATTR_SEAL, (options or SealOptions()).encode())
        while (status := _status(directory, what)).state not in _FINAL_STATES:
            progress(status)
            select.select([], [], [], POLL_SECONDS)
    if status.state != "sealed":
        kind = getattr(errors, status.kind or "", DeviceError)
        assert issubclass(kind, DlfsError)
        raise kind(status.error or f"{what}: it was not sealed")
    _await_dataset(mountpoint, dataset_name_bytes(name), status.version)
    return status


def _await_dataset(mountpoint: PathLike, name: bytes, version: int | None) -> None:
    """Wait until the name stands for a version; not long, as it may be replaced by another one."""
    path = os.path.join(os.fsencode(mountpoint), name)
    deadline = time.monotonic() + SHOWN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if os.path.samefile(path, b"%s@%d" % (path, version or 0)):
                return
        select.select([], [], [], POLL_SECONDS)


def discard(mountpoint: PathLike, name: str | bytes) -> None:
    """Delete a dataset that is not sealed, with all its files.

    Raises:
        DlfsError: as ``seal``.
    """
    what = f"discard {display(dataset_name_bytes(name))!r}"
    with _opened(mountpoint, name, what) as directory, _translated(directory, what):
        os.setxattr(directory, XATTR_DISCARD, b"1")


def list_incoming(mountpoint: PathLike) -> list[StagedDataset]:
    """List the datasets that are not sealed. The server walks over all their files.

    Raises:
        UsageError: the mount has no ``incoming``.
        DeviceError: an I/O error.
    """
    found = []
    what = "list the staged datasets"
    for name in sorted(os.listdir(_incoming(mountpoint, what))):
        try:
            with _opened(mountpoint, name, what) as directory, _translated(directory, what):
                contents = StagedContents.decode(os.getxattr(directory, XATTR_INCOMING))
                found.append(StagedDataset(name, contents, _status(directory, what)))
        except NotFoundError:
            continue  # sealed meanwhile
    return found


def _incoming(mountpoint: PathLike, what: str) -> bytes:
    path = resolve(os.fsdecode(mountpoint))
    record = find_mount(path)
    if record is None or record.file_system_type != FILE_SYSTEM_TYPE:
        raise UsageError(f"{what}: expected a mount point of DLFS, got {path}")
    incoming = os.path.realpath(os.path.join(path, INCOMING))
    above = record_of(incoming)
    if above is None or above.file_system_type != INCOMING_TYPE:
        raise UsageError(f"{what}: {path} is read-only; mount it with --incoming")
    return os.fsencode(incoming)


@contextmanager
def _opened(mountpoint: PathLike, name: str | bytes, what: str) -> Iterator[int]:
    """Open the directory of a dataset; its attributes can be read even after the seal."""
    incoming = _incoming(mountpoint, what)
    path = os.path.join(incoming, dataset_name_bytes(name))
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{what}: {os.fsdecode(path)} does not exist") from error
    except OSError as error:
        raise _device_error(what, error) from error
    try:
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _translated(directory: int, what: str) -> Iterator[None]:
    """Translate an errno of the mount into an error with the reason."""
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
