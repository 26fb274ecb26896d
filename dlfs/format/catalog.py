"""The catalog: the datasets of a volume, where they lie, and what is free (FORMAT.md, section 4).

One generation's catalog is one string of bytes, written to chunks of its own and found through the
superblock. Decoding checks the whole of it: every chunk of the volume must belong to exactly one
owner, be it a dataset's data, a directory, the catalog or the free space. Only the data of several
datasets may share chunks. Time is that of sorting the runs; their number is bounded before any is
made into an object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from dlfs._native.checksums import crc32c
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
)
from dlfs.format.constants import (
    ADDRESS_MAX,
    ATTRIBUTE_BLOCK_BYTES,
    CATALOG_BYTES_MAX,
    CATALOG_DATASETS_MAX,
    CATALOG_HEADER_BYTES,
    CATALOG_MAGIC,
    CATALOG_RUNS_MAX,
    DATASET_ATTRIBUTES_BYTES_MAX,
    DATASET_RECORD_BYTES,
    DATASET_VERSION_MAX,
    DIRECTORY_BLOCK_BYTES,
    LOCATION_BYTES,
    TAG_ATTRIBUTES,
    TIME_NS_MAX,
)
from dlfs.format.geometry import ChunkRun, Geometry, split_runs, unite_runs
from dlfs.format.names import dataset_name_problem
from dlfs.format.superblock import Superblock
from dlfs.wording import quote

LAYOUTS = ("path", "shuffled")
"""Names of the packing orders; the number of a layout on media is its position here."""

# magic, header bytes, reserved, volume UUID, generation, total bytes, datasets, free runs, reserved
_HEADER = struct.Struct("<8sII16sQQIIQ")
# record bytes, version, UUID, created, samples, sample bytes, seed, data bytes, entries bytes,
# names bytes, layout, name bytes, attribute bytes, data runs, directory runs, reserved
_RECORD = struct.Struct("<II16sQQQQQQQHHIIIQ")
_RUN = struct.Struct("<QQ")
_ATTRIBUTE = struct.Struct("<HHI")
_EXTENT = struct.Struct("<QQQ")
_U64_MAX = (1 << 64) - 1
NO_GROUP = "chunk numbers of no group"


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

    def encode(self) -> tuple[int, bytes]:
        """Return the (tag, bytes) pair of a dataset record that stores this extent."""
        value = _EXTENT.pack(self.address, self.segment_bytes, self.head_bytes)
        return TAG_ATTRIBUTES, value


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecord:
    """One version of one dataset.

    ``data_runs`` hold its samples and behind them its attribute segment, if it has one
    (``data_bytes``), ``directory_runs`` its directory segment: the entries part and, right behind
    it, the names part. ``attributes`` are (tag, bytes) pairs; those that this version does not
    define are kept.
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
    attributes: tuple[tuple[int, bytes], ...] = ()

    @property
    def data_chunks(self) -> int:
        """Number of chunks that hold the dataset's samples."""
        return sum(run.chunk_count for run in self.data_runs)

    @property
    def directory_chunks(self) -> int:
        """Number of chunks that hold the dataset's directory segment."""
        return sum(run.chunk_count for run in self.directory_runs)

    @property
    def attribute_extent(self) -> AttributeExtent | None:
        """Location of the dataset's attribute segment; None if it has no attributes."""
        value = next((value for tag, value in self.attributes if tag == TAG_ATTRIBUTES), None)
        return None if value is None else AttributeExtent(*_EXTENT.unpack(value))

    def split_data_runs(
        self, chunk_bytes: int
    ) -> tuple[tuple[ChunkRun, ...], tuple[ChunkRun, ...]]:
        """Return the data runs that hold samples, and those that hold the attribute segment."""
        extent = self.attribute_extent
        samples_end = self.data_bytes if extent is None else extent.address
        return split_runs(self.data_runs, samples_end // chunk_bytes)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The datasets of one generation, in order of (name, version), and its free runs, in order."""

    generation: int
    volume_uuid: UUID
    datasets: tuple[DatasetRecord, ...]
    free: tuple[ChunkRun, ...]

    @property
    def free_chunks(self) -> int:
        """Number of chunks without an owner."""
        return sum(run.chunk_count for run in self.free)

    @property
    def data_runs(self) -> list[ChunkRun]:
        """The chunks of all datasets' data as sorted runs, each shared chunk once."""
        return unite_runs(run for record in self.datasets for run in record.data_runs)


def encode_catalog(catalog: Catalog) -> bytes:
    """Encode a catalog. What it owns is checked against a volume by ``check_catalog``, not here.

    Raises:
        LimitError: it has more datasets, runs or bytes than FORMAT.md allows.
        UsageError: a field is out of its range, or datasets are not in order of (name, version).
    """
    runs = len(catalog.free) + sum(
        len(d.data_runs) + len(d.directory_runs) for d in catalog.datasets
    )
    if len(catalog.datasets) > CATALOG_DATASETS_MAX or runs > CATALOG_RUNS_MAX:
        raise LimitError(
            f"encode the catalog: expected at most {CATALOG_DATASETS_MAX} datasets and "
            f"{CATALOG_RUNS_MAX} runs of chunks, got {len(catalog.datasets)} and {runs}"
        )
    keys = [(d.name, d.version) for d in catalog.datasets]
    if any(a >= b for a, b in pairwise(keys)):
        raise UsageError("encode the catalog: expected datasets in rising order of (name, version)")
    body = b"".join([_encode_record(d) for d in catalog.datasets] + [_encode_runs(catalog.free)])
    total = CATALOG_HEADER_BYTES + len(body)
    if total > CATALOG_BYTES_MAX:
        raise LimitError(
            f"encode the catalog: expected at most {CATALOG_BYTES_MAX} bytes, got {total}"
        )
    header = _HEADER.pack(
        CATALOG_MAGIC, CATALOG_HEADER_BYTES, 0, catalog.volume_uuid.bytes, catalog.generation,
        total, len(catalog.datasets), len(catalog.free), 0,
    )  # fmt: skip
    return header + body


def decode_catalog(
    data: bytes | bytearray | memoryview, superblock: Superblock, where: str
) -> Catalog:
    """Decode the catalog of a superblock and check everything in it.

    Args:
        data: at least ``superblock.catalog_bytes`` bytes; what follows is ignored.
        superblock: the one that names this catalog; its geometry bounds every run.
        where: the devices' URIs and the byte offset, for errors.

    Raises:
        TruncatedError: there are too few bytes.
        ChecksumError: they do not have the CRC32C that the superblock records.
        FormatError: anything in them is out of its range or disagrees with the rest.
    """
    if len(data) < superblock.catalog_bytes:
        raise TruncatedError(
            f"{where}: read the catalog: expected {superblock.catalog_bytes} bytes, got {len(data)}"
        )
    raw = bytes(data[: superblock.catalog_bytes])
    actual = crc32c(raw)
    if actual != superblock.catalog_crc32c:
        raise ChecksumError(
            f"{where}: read the catalog: expected CRC32C {superblock.catalog_crc32c:#010x} over "
            f"{len(raw)} bytes, got {actual:#010x}"
        )
    catalog = _Parser(raw, where).catalog()
    try:
        check_catalog(catalog, superblock)
    except UsageError as error:
        raise FormatError(f"{where}: read the catalog: {error}") from error
    return catalog


def check_catalog(catalog: Catalog, superblock: Superblock) -> None:
    """Check a catalog against the superblock that names it: identity, and who owns which chunk.

    A writer calls it on what it is about to commit, with the superblock it is about to write.

    Raises:
        UsageError: they disagree, two owners share a chunk, or a chunk has none.
    """
    for name, expected, got in (
        ("volume UUID", superblock.volume_uuid, catalog.volume_uuid),
        ("generation", superblock.generation, catalog.generation),
    ):
        if expected != got:
            raise UsageError(f"expected {name} {expected}, got {got}")
    for record in catalog.datasets:
        _check_record(record, superblock.geometry.chunk_bytes)
    _check_free(catalog.free)
    _check_owners(catalog, superblock)


def _encode_runs(runs: tuple[ChunkRun, ...]) -> bytes:
    return b"".join(_RUN.pack(run.first_chunk, run.chunk_count) for run in runs)


def _encode_record(record: DatasetRecord) -> bytes:
    """Encode one dataset record, padded to 8 bytes."""
    attributes = b"".join(
        _ATTRIBUTE.pack(tag, 0, len(value)) + value + bytes(-len(value) % 8)
        for tag, value in record.attributes
    )
    if len(attributes) > DATASET_ATTRIBUTES_BYTES_MAX:
        raise LimitError(
            f"encode the dataset {quote(record.name)}: expected at most "
            f"{DATASET_ATTRIBUTES_BYTES_MAX} bytes of attributes, got {len(attributes)}"
        )
    problem = dataset_name_problem(record.name) or _range_problem(record)
    if problem:
        raise UsageError(f"encode the dataset {quote(record.name)}: {problem}")
    tail = _encode_runs(record.data_runs) + _encode_runs(record.directory_runs)
    tail += attributes + record.name
    tail += bytes(-len(tail) % 8)
    head = _RECORD.pack(
        DATASET_RECORD_BYTES + len(tail), record.version, record.uuid.bytes, record.created_ns,
        record.sample_count, record.sample_bytes, record.seed, record.data_bytes,
        record.entries_bytes, record.names_bytes, LAYOUTS.index(record.layout), len(record.name),
        len(attributes), len(record.data_runs), len(record.directory_runs), 0,
    )  # fmt: skip
    return head + tail


def _range_problem(record: DatasetRecord) -> str | None:
    """Return the name of the first field of a record that is out of its range, or None."""
    if record.layout not in LAYOUTS:
        return f"expected a layout of {', '.join(LAYOUTS)}, got {record.layout!r}"
    for name, value, low, high in (
        ("version", record.version, 1, DATASET_VERSION_MAX),
        ("creation time", record.created_ns, 0, TIME_NS_MAX),
        ("seed", record.seed, 0, _U64_MAX),
        ("entries bytes", record.entries_bytes, DIRECTORY_BLOCK_BYTES, ADDRESS_MAX),
        ("sample count", record.sample_count, 0, record.entries_bytes // LOCATION_BYTES),
        ("sample bytes", record.sample_bytes, 0, record.data_bytes),
        ("data bytes", record.data_bytes, 0, ADDRESS_MAX),
        ("names bytes", record.names_bytes, DIRECTORY_BLOCK_BYTES, ADDRESS_MAX),
    ):
        if not low <= value <= high:
            return f"expected {name} in {low}..{high}, got {value}"
    return _extent_problem(record)


def _extent_problem(record: DatasetRecord) -> str | None:
    """Return the reason why a record's attribute segment is not where it must be, or None."""
    values = [value for tag, value in record.attributes if tag == TAG_ATTRIBUTES]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) != _EXTENT.size:
        lengths = [len(value) for value in values]
        return f"expected the place of one attribute segment in {_EXTENT.size} bytes, got {lengths}"
    extent = AttributeExtent(*_EXTENT.unpack(values[0]))
    block = ATTRIBUTE_BLOCK_BYTES
    whole = not extent.segment_bytes % block and not extent.head_bytes % block
    end = extent.address + extent.segment_bytes
    if not whole or not block <= extent.head_bytes <= extent.segment_bytes:
        return f"expected an attribute segment of whole blocks with its head, got {extent}"
    if end > record.data_bytes:
        return f"expected an attribute segment within {record.data_bytes} bytes, got {extent}"
    return None


class _Parser:
    """Parses a catalog's bytes in order, never past their end."""

    def __init__(self, raw: bytes, where: str) -> None:
        self._raw = raw
        self._where = where
        self._runs_left = CATALOG_RUNS_MAX

    def catalog(self) -> Catalog:
        """Parse the whole catalog."""
        raw = self._raw
        if len(raw) < CATALOG_HEADER_BYTES:
            raise self._error(0, f"expected {CATALOG_HEADER_BYTES} bytes of header, got {len(raw)}")
        magic, header_bytes, _, volume, generation, total, datasets, free, _ = _HEADER.unpack_from(
            raw
        )
        if magic != CATALOG_MAGIC or header_bytes != CATALOG_HEADER_BYTES or total != len(raw):
            raise self._error(
                0,
                f"expected {quote(CATALOG_MAGIC)} with {CATALOG_HEADER_BYTES} of {len(raw)} bytes, "
                f"got {quote(magic)} with {header_bytes} of {total}",
            )
        if datasets > CATALOG_DATASETS_MAX:
            raise self._error(
                48, f"expected at most {CATALOG_DATASETS_MAX} datasets, got {datasets}"
            )
        records: list[DatasetRecord] = []
        at = CATALOG_HEADER_BYTES
        for _ in range(datasets):
            record, at = self._record(at)
            if records and (records[-1].name, records[-1].version) >= (record.name, record.version):
                raise self._error(at, "expected datasets in rising order of (name, version)")
            records.append(record)
        runs = self._runs(at, free, len(raw))
        if at + 16 * free != len(raw):
            raise self._error(at + 16 * free, f"expected the end, got {len(raw)} bytes")
        return Catalog(generation, UUID(bytes=volume), tuple(records), runs)

    def _record(self, at: int) -> tuple[DatasetRecord, int]:
        """Parse the record at an offset; also return the offset after it."""
        if at + DATASET_RECORD_BYTES > len(self._raw):
            raise self._error(at, f"expected a dataset record, got the end at {len(self._raw)}")
        fields = _RECORD.unpack_from(self._raw, at)
        end = at + fields[0]
        layout, name_bytes, attribute_bytes, data_count, directory_count = fields[10:15]
        data_at = at + DATASET_RECORD_BYTES
        directory_at = data_at + 16 * data_count
        attributes_at = directory_at + 16 * directory_count
        name_at = attributes_at + attribute_bytes
        name_end = name_at + name_bytes
        if end > len(self._raw) or end != name_end + (at - name_end) % 8:
            raise self._error(at, f"expected a record of {name_end - at} bytes, got {fields[0]}")
        if attribute_bytes > DATASET_ATTRIBUTES_BYTES_MAX or layout >= len(LAYOUTS):
            raise self._error(
                at, f"expected known layout and attributes, got {layout}, {attribute_bytes} bytes"
            )
        record = DatasetRecord(
            name=self._raw[name_at:name_end],
            version=fields[1],
            uuid=UUID(bytes=fields[2]),
            created_ns=fields[3],
            sample_count=fields[4],
            sample_bytes=fields[5],
            layout=LAYOUTS[layout],
            seed=fields[6],
            data_runs=self._runs(data_at, data_count, end),
            data_bytes=fields[7],
            directory_runs=self._runs(directory_at, directory_count, end),
            entries_bytes=fields[8],
            names_bytes=fields[9],
            attributes=tuple(self._attributes(attributes_at, name_at)),
        )
        problem = dataset_name_problem(record.name) or _range_problem(record)
        if problem:
            raise self._error(at, f"dataset {quote(record.name)}: {problem}")
        return record, end

    def _runs(self, at: int, count: int, end: int) -> tuple[ChunkRun, ...]:
        """Parse runs of chunks, which must end before an offset."""
        self._runs_left -= count
        if self._runs_left < 0 or at + 16 * count > end:
            raise self._error(
                at,
                f"expected runs up to offset {end}, {CATALOG_RUNS_MAX} in all, got {count} of them",
            )
        pairs = _RUN.iter_unpack(self._raw[at : at + 16 * count])
        return tuple(ChunkRun(first, length) for first, length in pairs)

    def _attributes(self, at: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Parse (tag, bytes) pairs that fill a range."""
        while at < end:
            if at + _ATTRIBUTE.size > end:
                raise self._error(at, f"expected an attribute, got the end at {end}")
            tag, _, length = _ATTRIBUTE.unpack_from(self._raw, at)
            value_at = at + _ATTRIBUTE.size
            at = value_at + length + -length % 8
            if at > end:
                raise self._error(value_at, f"expected {length} bytes, got the end at {end}")
            yield tag, self._raw[value_at : value_at + length]

    def _error(self, at: int, problem: str) -> FormatError:
        return FormatError(f"{self._where}: read the catalog at byte {at} of it: {problem}")


def _check_record(record: DatasetRecord, chunk_bytes: int) -> None:
    """Check a record's sizes against its runs."""
    segment = record.entries_bytes + record.names_bytes
    extent = record.attribute_extent or AttributeExtent(record.data_bytes, 0, 0)
    attribute_chunks = -(-extent.segment_bytes // chunk_bytes)
    for name, expected, got in (
        ("attribute address", record.data_bytes - attribute_chunks * chunk_bytes, extent.address),
        ("data bytes", record.data_chunks * chunk_bytes, record.data_bytes),
        ("entries bytes past a block", 0, record.entries_bytes % DIRECTORY_BLOCK_BYTES),
        ("names bytes past a block", 0, record.names_bytes % DIRECTORY_BLOCK_BYTES),
        ("directory chunks", -(-segment // chunk_bytes), record.directory_chunks),
    ):
        if expected != got:
            raise UsageError(
                f"dataset {quote(record.name)} version {record.version}: expected {name} "
                f"{expected}, got {got}"
            )


def _check_free(free: tuple[ChunkRun, ...]) -> None:
    """Check that free runs rise and that no two could be one."""
    for before, after in pairwise(free):
        if after.first_chunk <= before.end_chunk:
            raise UsageError(
                f"expected free runs in order with gaps between them, "
                f"got {before.chunk_count} at {before.first_chunk} before {after.first_chunk}"
            )


def _check_owners(catalog: Catalog, superblock: Superblock) -> None:
    """Check that every chunk has exactly one owner, or belongs to the data of several datasets."""
    for record in catalog.datasets:
        _check_own_data(record)
    owned = [(run, "the catalog", False) for run in superblock.catalog_runs]
    owned += [(run, "the free space", False) for run in catalog.free]
    for record in catalog.datasets:
        name = f"dataset {quote(record.name)} version {record.version}"
        owned += [(run, f"the data of {name}", True) for run in record.data_runs]
        owned += [(run, f"the directory of {name}", False) for run in record.directory_runs]
    owned += [(run, NO_GROUP, False) for run in _gaps(superblock.geometry)]
    owned.sort(key=lambda entry: entry[0].first_chunk)
    end, owner, owner_is_data = 0, "the start", False
    for run, name, is_data in owned:
        _check_count(run, name)
        if is_data and owner_is_data and run.first_chunk < end:
            if run.end_chunk > end:
                end, owner = run.end_chunk, name
            continue
        if run.first_chunk != end:
            what = "no owner" if run.first_chunk > end else "two owners"
            raise UsageError(
                f"expected one owner of every chunk, got {what} at chunk "
                f"{min(end, run.first_chunk)} between {owner} and {name}"
            )
        end, owner, owner_is_data = run.end_chunk, name, is_data
    total = superblock.geometry.groups[-1].end_chunk
    if end != total:
        raise UsageError(f"expected runs up to chunk {total}, got {owner} up to chunk {end}")


def _gaps(geometry: Geometry) -> Iterator[ChunkRun]:
    """Yield the numbers of chunks below and between the groups, which are of no chunk."""
    end = 0
    for group in geometry.groups:
        if group.first_chunk > end:
            yield ChunkRun(end, group.first_chunk - end)
        end = group.end_chunk


def _check_own_data(record: DatasetRecord) -> None:
    """Check that no chunk is in the data of one dataset twice."""
    name = f"the data of dataset {quote(record.name)} version {record.version}"
    end = 0
    for run in sorted(record.data_runs, key=lambda run: run.first_chunk):
        _check_count(run, name)
        if run.first_chunk < end:
            raise UsageError(f"{name}: expected each chunk once, got chunk {run.first_chunk} twice")
        end = run.end_chunk


def _check_count(run: ChunkRun, owner: str) -> None:
    if run.chunk_count < 1:
        raise UsageError(f"{owner}: expected runs of at least one chunk, got {run.chunk_count}")
