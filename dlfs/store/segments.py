"""Reads a whole directory segment and verifies it, from the first copies that are right.

The checksums cover every byte of the segment and the storage order of its samples. The UUID tells a
directory from that of another dataset which had the same chunks: a stale member still has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import aligned_buffer
from dlfs._native.directory import NativeDirectory
from dlfs.block import BlockDevice
from dlfs.errors import FormatError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace, Geometry
from dlfs.store.chunk_reader import copy_orders, read_into


def read_segment(
    sources: Sequence[BlockDevice], geometry: Geometry, record: DatasetRecord
) -> NDArray[np.uint8]:
    """Read the directory segment of a dataset: both parts, and the padding of their last chunk.

    Raises:
        FormatError: no copy is right; the error describes the first copy.
        DeviceError: no copy can be read.
    """
    space = DataSpace(geometry, record.directory_runs)
    memory = aligned_buffer(space.size_bytes, max(geometry.block_bytes, 4096))
    problem: FormatError | None = None
    for choice in copy_orders(geometry):
        read_into(sources, space, 0, memory, choice)
        try:
            _verify(memory, record)
        except FormatError as error:
            problem = problem or error
        else:
            return memory
    assert problem is not None
    raise problem


def _verify(memory: NDArray[np.uint8], record: DatasetRecord) -> None:
    entries = memory[: record.entries_bytes]
    label = f"the directory of {record.uuid}"
    directory = NativeDirectory(entries, label=label)
    try:
        found = directory.dataset_uuid
        if found != record.uuid:
            raise FormatError(f"{label}: expected this dataset UUID, got {found}")
        directory.verify_memory(0, entries)
        directory.verify_memory(1, memory[record.entries_bytes :][: record.names_bytes])
    finally:
        directory.close()
