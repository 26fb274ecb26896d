"""Passes a mount from its keeper to each server: the connection, and the numbers of datasets."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

from dlfs._native.fuse import KernelConnection
from dlfs.mount.mountpoint import MountRecord

_RECORD = struct.Struct("<16s?")
"""A dataset's UUID, and whether a server has loaded it. Servers of other versions read it."""


class DatasetNumbers:
    """The numbers that the servers of one mount have given to datasets, in memory that they share.

    Number n belongs to the n-th UUID. Inode numbers contain it, so it must outlive a server.

    Args:
        descriptor: the memory, from the keeper before; None makes a new one.

    Threads: any; one server at a time writes.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("dlfs-dataset-numbers")
        self.descriptor = descriptor

    def _records(self) -> Iterator[tuple[bytes, bool]]:
        data = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        return _RECORD.iter_unpack(data)

    def __iter__(self) -> Iterator[UUID]:
        for uuid, _ in self._records():
            yield UUID(bytes=uuid)

    def loaded(self) -> set[int]:
        """Return the numbers of the datasets that a server has loaded."""
        return {number for number, (_, loaded) in enumerate(self._records(), 1) if loaded}

    def set(self, number: int, uuid: UUID) -> None:
        """Record the number of a dataset, counted from 1."""
        record = _RECORD.pack(uuid.bytes, False)
        os.pwrite(self.descriptor, record, _RECORD.size * (number - 1))

    def set_loaded(self, number: int) -> None:
        """Record that the dataset of a number was loaded."""
        os.pwrite(self.descriptor, b"\1", _RECORD.size * number - 1)

    def close(self) -> None:
        """Free the memory, once the other processes have closed it too."""
        os.close(self.descriptor)


@dataclass(frozen=True)
class InheritedMount:
    """A file system that a keeper has mounted or will mount, for one server.

    Attributes:
        path: the mount point when the server starts; for a mount of a holder, its name.
        record: the mount; None if the keeper has not mounted it when the server starts.
        connect: says that the server is prepared, and returns the kernel's side of the mount, which
            no other server answers then. Blocks until the server before it is dead.
        numbers: numbers of the datasets that earlier servers have shown.
        resumed: an earlier server has answered on this mount.
        replaces: the earlier server is answering until ``connect`` is called.
        is_visible: the mount is in this mount namespace. Otherwise another process unmounts it.
    """

    path: str
    record: MountRecord | None
    connect: Callable[[], KernelConnection]
    numbers: DatasetNumbers
    resumed: bool
    replaces: bool
    is_visible: bool = True
