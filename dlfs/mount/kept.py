"""The connection and the dataset numbers that a keeper hands to each server of its mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from dlfs._native.fuse import KernelConnection

_UUID_BYTES = 16


class DatasetNumbers:
    """The numbers that the servers of one mount have given to datasets, in memory that they share.

    Number n belongs to the n-th UUID. Inode numbers contain it, so it must outlive a server.

    Threads: any; one server at a time.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("dlfs-dataset-numbers")

    def __iter__(self) -> Iterator[UUID]:
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        for start in range(0, len(data), _UUID_BYTES):
            yield UUID(bytes=data[start : start + _UUID_BYTES])

    def set(self, number: int, uuid: UUID) -> None:
        """Record the number of a dataset, counted from 1."""
        os.pwrite(self._descriptor, uuid.bytes, _UUID_BYTES * (number - 1))

    def close(self) -> None:
        """Free the memory, once the other processes have closed it too."""
        os.close(self._descriptor)


@dataclass(frozen=True)
class KeptMount:
    """A file system that the keeper has mounted, for one server.

    Attributes:
        connection: the kernel's side.
        numbers: numbers of the datasets that earlier servers have shown.
    """

    connection: KernelConnection
    numbers: DatasetNumbers
