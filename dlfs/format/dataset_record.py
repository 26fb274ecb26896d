"""The record of one version of a dataset in a catalog (FORMAT.md, section 4.2).

On media a record is a row of a table, some runs of chunks, a name and tagged values. ``encode_row``
and ``encode_tags`` make the bytes of one record, ``decode_record`` makes the object of them. Ranges
are checked for all records of a catalog at once, by ``catalog_checks``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np

from dlfs.base.wording import quote
from dlfs.errors import LimitError, UsageError
from dlfs.format.constants import TAGS_BYTES_MAX
from dlfs.format.digests import Digests
from dlfs.format.geometry import ChunkRun, split_runs

LAYOUTS = ("path", "shuffled")
"""Names of the packing orders; the number of a layout on media is its position here."""
STATES = ("sealed", "unfinished")
"""States of a record; the number of a state on media is its position here."""
RUN_KINDS = ("data", "directory", "journal", "granted")
"""Kinds of a record's runs, in the order of the catalog."""

ROW = np.dtype(
    [
        ("uuid", "S16"),
        ("version", "<u4"),
        ("state", "<u2"),
        ("layout", "<u2"),
        ("created_ns", "<u8"),
        ("sample_count", "<u8"),
        ("sample_bytes", "<u8"),
        ("seed", "<u8"),
        ("data_bytes", "<u8"),
        ("entries_bytes", "<u8"),
        ("names_bytes", "<u8"),
        ("attributes_address", "<u8"),
        ("attributes_bytes", "<u8"),
        ("attributes_head_bytes", "<u8"),
        ("data_run_count", "<u4"),
        ("directory_run_count", "<u4"),
        ("journal_run_count", "<u4"),
        ("name_bytes", "<u2"),
        ("tags_bytes", "<u2"),
        ("journal_bytes", "<u8"),
        ("content_digest", "V16"),
        ("packing_digest", "V16"),
        ("granted_run_count", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""The fixed part of a record, 168 bytes."""
_NAMES = ROW.names or ()
_TAG = struct.Struct("<HHI")


@dataclass(frozen=True, slots=True)
class AttributeExtent:
    """The location of a dataset's attribute segment in its data space, after its samples.

    Attributes:
        address: its first byte in the data space, a multiple of the chunk size.
        segment_bytes: length of the segment, a multiple of 4096.
        head_bytes: length of its head, a multiple of 4096.
    """

    address: int
    segment_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecord:
    """One version of one dataset, or an import that is not finished.

    ``data_runs`` hold its samples and behind them its attribute segment, if it has one
    (``data_bytes``), ``directory_runs`` its directory segment: the entries part and, right behind
    it, the names part. ``tags`` are (tag, bytes) pairs; those that this version does not define are
    kept.

    An unfinished record has version 0 and no directory yet. Its data runs are all runs that the
    import has taken, and its journal runs describe the samples that they hold. Its granted runs are
    chunks that workers of the import may be writing.
    """

    name: bytes
    version: int
    uuid: UUID
    created_ns: int
    sample_count: int
    sample_bytes: int
    layout: str
    seed: int
    data_runs: tuple[ChunkRun, ...]
    data_bytes: int
    directory_runs: tuple[ChunkRun, ...]
    entries_bytes: int
    names_bytes: int
    attribute_extent: AttributeExtent | None = None
    """Location of the dataset's attribute segment; None if it has no attributes."""
    tags: tuple[tuple[int, bytes], ...] = ()
    state: str = "sealed"
    journal_runs: tuple[ChunkRun, ...] = ()
    journal_bytes: int = 0
    granted_runs: tuple[ChunkRun, ...] = ()
    digests: Digests = field(default_factory=Digests)
    """Digests by which copies are known; zeroes of an unfinished record."""

    @property
    def key(self) -> tuple[bytes, int]:
        """Name and version, by which records are sorted."""
        return self.name, self.version

    @property
    def runs(self) -> tuple[ChunkRun, ...]:
        """All runs of the record, in the order of the catalog."""
        return (*self.data_runs, *self.directory_runs, *self.journal_runs, *self.granted_runs)

    def split_data_runs(
        self, chunk_bytes: int
    ) -> tuple[tuple[ChunkRun, ...], tuple[ChunkRun, ...]]:
        """Return the data runs that hold samples, and those that hold the attribute segment."""
        extent = self.attribute_extent
        samples_end = self.data_bytes if extent is None else extent.address
        return split_runs(self.data_runs, samples_end // chunk_bytes)


def encode_row(record: DatasetRecord, tags_bytes: int) -> tuple[bytes | int, ...]:
    """Return the row of a record in a catalog's table.

    Raises:
        UsageError: a field has no room in the row.
    """
    what = f"encode the dataset {quote(record.name)}"
    for option, word, known in (
        ("layout", record.layout, LAYOUTS),
        ("state", record.state, STATES),
    ):
        if word not in known:
            raise UsageError(f"{what}: expected {option} {' or '.join(known)}, got {word!r}")
    extent = record.attribute_extent or AttributeExtent(0, 0, 0)
    numbers = (
        record.version, STATES.index(record.state),
        LAYOUTS.index(record.layout), record.created_ns, record.sample_count, record.sample_bytes,
        record.seed, record.data_bytes, record.entries_bytes, record.names_bytes, extent.address,
        extent.segment_bytes, extent.head_bytes, len(record.data_runs),
        len(record.directory_runs), len(record.journal_runs), len(record.name), tags_bytes,
        record.journal_bytes,
    )  # fmt: skip
    granted_count = len(record.granted_runs)
    for name, value in zip(
        (*_NAMES[1:-4], "granted_run_count"), (*numbers, granted_count), strict=True
    ):
        bits = 8 * ROW[name].itemsize
        if not 0 <= int(value) < 1 << bits:
            raise UsageError(f"{what}: expected {name} in 0..{(1 << bits) - 1}, got {value!r}")
    digests = record.digests.content, record.digests.packing
    return (record.uuid.bytes, *numbers, *map(bytes.fromhex, digests), granted_count, 0)


def encode_tags(record: DatasetRecord) -> bytes:
    """Return the tagged values of a record, each padded to a multiple of 8 bytes.

    Raises:
        LimitError: they are too long.
    """
    encoded = b"".join(
        _TAG.pack(tag, 0, len(value)) + value + bytes(-len(value) % 8) for tag, value in record.tags
    )
    if len(encoded) > TAGS_BYTES_MAX:
        raise LimitError(
            f"encode the dataset {quote(record.name)}: expected at most {TAGS_BYTES_MAX} bytes of "
            f"tagged values, got {len(encoded)}"
        )
    return encoded


def decode_tags(raw: bytes) -> tuple[tuple[int, bytes], ...]:
    """Return the (tag, bytes) pairs of a record.

    Raises:
        UsageError: they do not end where the bytes end.
    """
    pairs = []
    at, end = 0, len(raw)
    while at < end:
        if at + _TAG.size > end:
            raise UsageError(f"expected a tagged value at byte {at}, got the end at {end}")
        tag, _, length = _TAG.unpack_from(raw, at)
        value_at = at + _TAG.size
        at = value_at + length + -length % 8
        if at > end:
            raise UsageError(f"expected {length} bytes at byte {value_at}, got the end at {end}")
        pairs.append((tag, raw[value_at : value_at + length]))
    return tuple(pairs)


def decode_record(
    row: Sequence[Any], runs: Sequence[Sequence[int]], name: bytes, tags: bytes
) -> DatasetRecord:
    """Return the record of a row that was checked.

    Args:
        row: fields of the row.
        runs: first chunk and number of chunks of each of its runs.
        name: its name.
        tags: its tagged values.
    """
    (
        uuid, version, state, layout, created_ns, sample_count, sample_bytes, seed, data_bytes,
        entries_bytes, names_bytes, address, segment_bytes, head_bytes, data_end, directory_count,
        journal_count, _, _, journal_bytes, content_digest, packing_digest, _, _,
    ) = row  # fmt: skip
    all_runs = tuple([ChunkRun(first, count) for first, count in runs])
    directory_end = data_end + directory_count
    journal_end = directory_end + journal_count
    extent = AttributeExtent(address, segment_bytes, head_bytes) if segment_bytes else None
    return DatasetRecord(
        name=name,
        version=version,
        uuid=UUID(bytes=uuid.ljust(16, b"\0")),
        created_ns=created_ns,
        sample_count=sample_count,
        sample_bytes=sample_bytes,
        layout=LAYOUTS[layout],
        seed=seed,
        data_runs=all_runs[:data_end],
        data_bytes=data_bytes,
        directory_runs=all_runs[data_end:directory_end],
        entries_bytes=entries_bytes,
        names_bytes=names_bytes,
        attribute_extent=extent,
        tags=decode_tags(tags) if tags else (),
        state=STATES[state],
        journal_runs=all_runs[directory_end:journal_end],
        journal_bytes=journal_bytes,
        granted_runs=all_runs[journal_end:],
        digests=Digests(bytes(content_digest).hex(), bytes(packing_digest).hex()),
    )
