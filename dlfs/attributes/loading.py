"""Loads attribute segments from a volume: verified, and shared by the node's processes.

A table's head is read at once, and each column when it is first asked for, into a file in memory of
its own that all processes of the user map (``dlfs.directory.sharing``). With replicas, what is
wrong in one copy is read from the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import aligned_buffer
from dlfs.attributes.table import AttributeTable
from dlfs.base.closing import Uses
from dlfs.base.deadlines import limit_call
from dlfs.block import BlockDevice
from dlfs.directory.sharing import LOADER_WAIT_S, SHARED_ROOT, Part, open_part
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.format.attributes import AttributeHead, decode_head
from dlfs.format.catalog import AttributeExtent, DatasetRecord
from dlfs.format.constants import ATTRIBUTE_BLOCK_BYTES
from dlfs.format.geometry import DataSpace, Geometry
from dlfs.format.paths import display
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_into

Bytes = NDArray[np.uint8]


def load_attributes(
    sources: Sequence[BlockDevice],
    geometry: Geometry,
    record: DatasetRecord,
    *,
    volume_uuid: UUID,
    diagnose: Callable[[], DlfsError | None] = lambda: None,
    uses: Uses | None = None,
    root: Path | None = SHARED_ROOT,
) -> AttributeTable:
    """Open a dataset's attributes.

    Args:
        sources: readers of the members, in the order to try them; used until the table is closed.
        geometry: geometry of the volume.
        record: record of the dataset.
        volume_uuid: UUID of the volume.
        diagnose: called when the bytes read are malformed; returns a better error, or None.
        uses: calls under way that use the sources; reading a column becomes one of them.
        root: where shared memory is mounted; None keeps the columns private.

    Raises:
        FormatError: the head is malformed (ChecksumError), or not the dataset's.
        DeviceError: it cannot be read.
    """
    extent = record.attribute_extent
    if extent is None:
        return AttributeTable.empty(record.uuid, record.sample_count)
    segment = _Segment(sources, geometry, record, extent, diagnose)
    used = uses or nullcontext()
    with used, limit_call():
        raw = aligned_buffer(extent.head_bytes, ATTRIBUTE_BLOCK_BYTES)
        head = segment.fill_head(raw)
    digest = hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()
    key = f"{volume_uuid.hex}-{record.uuid.hex}-{digest}"
    parts: list[Part] = []

    def load(number: int) -> Bytes:
        """Load a column into memory; called by one thread at a time."""
        _, length = head.extent(number)
        if not length:
            return np.empty(0, np.uint8)

        def fill(memory: memoryview) -> None:
            segment.fill_column(head, number, np.frombuffer(memory, np.uint8))

        with used, limit_call():
            part = open_part(root, f"{key}-column{number}", length, fill, LOADER_WAIT_S)
        parts.append(part)
        return part.memory

    def release() -> None:
        while parts:
            parts.pop().release()

    return AttributeTable(head, load, where=segment.where, release=release)


def read_attributes(
    sources: Sequence[BlockDevice], geometry: Geometry, record: DatasetRecord
) -> NDArray[np.uint8] | None:
    """Read a whole attribute segment and verify it; None when the dataset has none.

    Returns:
        uint8[n_bytes], whole chunks: with what fills up the last one.

    Raises:
        FormatError: no copy is right; tells of the first.
        DeviceError: no copy can be read.
    """
    extent = record.attribute_extent
    if extent is None:
        return None
    segment = _Segment(sources, geometry, record, extent, lambda: None)
    memory = aligned_buffer(segment.space.size_bytes, max(geometry.block_bytes, 4096))
    segment.fill_whole(memory)
    return memory


def load_attributes_whole(
    sources: Sequence[BlockDevice],
    geometry: Geometry,
    record: DatasetRecord,
    *,
    diagnose: Callable[[], DlfsError | None],
) -> Part | None:
    """Load a whole segment into a file in memory that other processes can map.

    ``AttributeTable.over`` a mapping of the part's descriptor is the table; the file is sealed.

    Args:
        sources: readers of the members, in order.
        geometry: geometry of the volume.
        record: record of the dataset.
        diagnose: called when the bytes read are malformed; returns a better error, or None.

    Returns:
        The part: ``segment_bytes`` of the record's ``attribute_extent``; None without attributes.

    Raises:
        FormatError: no copy is right; tells of the first.
        DeviceError: no copy can be read.
    """
    extent = record.attribute_extent
    if extent is None:
        return None
    segment = _Segment(sources, geometry, record, extent, diagnose)

    def fill(memory: memoryview) -> None:
        segment.fill_whole(np.frombuffer(memory, np.uint8))

    with limit_call():
        return open_part(None, "", extent.segment_bytes, fill, LOADER_WAIT_S)


class _Segment:
    """An attribute segment on media."""

    def __init__(
        self,
        sources: Sequence[BlockDevice],
        geometry: Geometry,
        record: DatasetRecord,
        extent: AttributeExtent,
        diagnose: Callable[[], DlfsError | None],
    ) -> None:
        self._sources = sources
        self._record = record
        self._extent = extent
        self._diagnose = diagnose
        self.space = DataSpace(geometry, record.split_data_runs(geometry.chunk_bytes)[1])
        member, offset_bytes = self.space.resolve(0)
        self.where = (
            f"the attributes of dataset {display(record.name)!r} version {record.version}, "
            f"on {sources[member].uri} from byte {offset_bytes} on"
        )

    def fill_head(self, memory: Bytes) -> AttributeHead:
        """Read the head from the first copies that have it intact, and decode it."""
        problem: FormatError | None = None
        for choice in copy_orders(self.space.geometry):
            self._read(0, memory, choice)
            try:
                return self._check_head(memory)
            except FormatError as error:
                problem = problem or error
        assert problem is not None
        raise self._diagnose() or problem

    @contextmanager
    def _diagnosed(self) -> Iterator[None]:
        """Raise a better error, if there is one, for what was read in the block."""
        try:
            yield
        except (DeviceError, FormatError) as error:
            cause = self._diagnose()
            if cause is None:
                raise
            raise cause from error

    def _read(self, address: int, memory: Bytes, choice: CopyOrder) -> None:
        with self._diagnosed():
            read_into(self._sources, self.space, address, memory, choice)

    def fill_whole(self, memory: Bytes) -> None:
        """Read the whole segment, each part from the first copies that have it intact."""
        head = self.fill_head(memory[: self._extent.head_bytes])
        for number in range(len(head.columns)):
            offset, length = head.extent(number)
            self.fill_column(head, number, memory[offset : offset + length])
        memory[head.segment_bytes :] = 0

    def fill_column(self, head: AttributeHead, number: int, memory: Bytes) -> None:
        """Read a column, each block from the first copy that has it intact."""
        offset, _ = head.extent(number)
        choices = copy_orders(self.space.geometry)
        self._read(offset, memory, choices[0])
        wrong = head.wrong_blocks(number, memory)
        if not len(wrong):
            return
        other = aligned_buffer(memory.nbytes, ATTRIBUTE_BLOCK_BYTES)
        for choice in choices[1:]:
            self._read(offset, other, choice)
            is_wrong = np.isin(wrong, head.wrong_blocks(number, other), assume_unique=True)
            still, right = wrong[is_wrong], wrong[~is_wrong]
            _blocks(memory)[right] = _blocks(other)[right]
            wrong = still
            if not len(wrong):
                return
        with self._diagnosed():
            head.verify(number, memory, self.where)

    def _check_head(self, memory: Bytes) -> AttributeHead:
        """Decode the head, and check that it belongs to the dataset."""
        head = decode_head(memory, self.where)
        got = head.dataset_uuid, head.sample_count, head.segment_bytes
        record = self._record
        expected = record.uuid, record.sample_count, self._extent.segment_bytes
        if got != expected:
            raise FormatError(
                f"{self.where}: expected the dataset {expected[0]} with {expected[1]} samples in "
                f"{expected[2]} bytes, got {got[0]} with {got[1]} in {got[2]}"
            )
        return head


def _blocks(memory: Bytes) -> Bytes:
    return memory.reshape(-1, ATTRIBUTE_BLOCK_BYTES)
