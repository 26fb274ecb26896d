"""The catalog: the datasets of a volume, where they lie, and what is free (FORMAT.md, section 4).

One generation's catalog is one string of bytes, written to chunks of its own and found through the
superblock. A ``Catalog`` has it as arrays, as on media: a table of rows of one size, the runs of
all records, names and tagged values. A record becomes an object when it is looked at; records are
found by name by bisection. ``edited`` makes the catalog of the next generation from pieces of
these arrays. So the cost of a commit beyond that of copying and checking arrays is that of what it
changes.

Decoding checks the whole of it (``catalog_checks``): every chunk of the volume must belong to
exactly one owner, be it a dataset's data, a directory, a journal, the catalog or the free space.
Only the data of several datasets may share chunks. Counts are compared with the length of the bytes
before any memory is allocated by them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c
from dlfs.base.forks import cached_property
from dlfs.base.wording import quote
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
)
from dlfs.format.catalog_checks import check_arrays
from dlfs.format.constants import (
    CATALOG_BYTES_MAX,
    CATALOG_DATASETS_MAX,
    CATALOG_HEADER_BYTES,
    CATALOG_MAGIC,
    CATALOG_RUNS_MAX,
)
from dlfs.format.dataset_record import (
    LAYOUTS,
    ROW,
    AttributeExtent,
    DatasetRecord,
    decode_record,
    encode_row,
    encode_tags,
)
from dlfs.format.geometry import ChunkRun
from dlfs.format.run_arrays import RunArray, to_array, to_runs, unite
from dlfs.format.superblock import Superblock

__all__ = [
    "LAYOUTS",
    "AttributeExtent",
    "Catalog",
    "DatasetRecord",
    "check_catalog",
    "decode_catalog",
    "encode_catalog",
]

# magic, header bytes, reserved, volume UUID, generation, total bytes, records, free runs, runs of
# records, text bytes
_HEADER = struct.Struct("<8sII16sQQIIII")
_SEALED = 0
_NO_TEXT = np.zeros(0, np.uint8)


class Catalog:
    """The records of one generation, in order of (name, version), and its free runs, in order.

    Args:
        generation: generation of the volume.
        volume_uuid: UUID of the volume.
        table: rows of the records, ``ROW[n]``.
        runs: of each record its data runs, directory runs and journal runs, in order of the rows.
        free_runs: runs of the chunks without an owner.
        text: of each record its name and its tagged values, ``uint8[n]``, in order of the rows.

    The arrays are not changed. Threads: any at once.
    """

    def __init__(
        self,
        generation: int,
        volume_uuid: UUID,
        table: NDArray[np.void],
        runs: RunArray,
        free_runs: RunArray,
        text: NDArray[np.uint8],
    ) -> None:
        self.generation = generation
        self.volume_uuid = volume_uuid
        self.table = table
        self.runs = runs
        self.free_runs = free_runs
        self.text = text

    @classmethod
    def of(
        cls,
        generation: int,
        volume_uuid: UUID,
        records: Sequence[DatasetRecord],
        free: Sequence[ChunkRun],
    ) -> Catalog:
        """Return a catalog of records in order of (name, version)."""
        table, runs, text = _encode_records(records)
        return cls(generation, volume_uuid, table, runs, to_array(free), text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Catalog) and encode_catalog(self) == encode_catalog(other)

    __hash__ = None  # type: ignore[assignment]

    # ---- records -----------------------------------------------------------------------------

    @property
    def records(self) -> Records:
        """All records, unfinished ones included."""
        return Records(self, np.arange(len(self.table)))

    @cached_property
    def datasets(self) -> Records:
        """Records of the datasets, which are sealed."""
        return Records(self, np.flatnonzero(self.table["state"] == _SEALED))

    @property
    def unfinished(self) -> Records:
        """Records of the imports that are not finished."""
        return Records(self, np.flatnonzero(self.table["state"] != _SEALED))

    def find(self, name: bytes, version: int | None = None) -> Records:
        """Return the records of a dataset, by version: all, or the one with a version."""
        found = self._sealed_of(name)
        if version is not None:
            found = found[self.table["version"][found] == version]
        return Records(self, found)

    def find_uuid(self, uuid: UUID) -> DatasetRecord | None:
        """Return the record of a dataset; None if there is none."""
        found = np.flatnonzero((self.table["uuid"] == uuid.bytes) & (self.table["state"] == 0))
        return Records(self, found)[0] if len(found) else None

    def has_uuid(self, uuid: UUID) -> bool:
        """Return True if a record, sealed or unfinished, has a UUID."""
        return bool((self.table["uuid"] == uuid.bytes).any())

    def __contains__(self, name: object) -> bool:
        """Return True if a dataset has a name."""
        return isinstance(name, bytes) and len(self._sealed_of(name)) > 0

    def dataset_names(self) -> list[bytes]:
        """Return the names of all datasets, each once, in order."""
        names = self.names[self.table["state"] == _SEALED]
        first = np.ones(len(names), bool)
        first[1:] = names[1:] != names[:-1]
        found: list[bytes] = names[first].tolist()
        return found

    def _sealed_of(self, name: bytes) -> NDArray[np.intp]:
        low, high = self._range_of(name)
        return low + np.flatnonzero(self.table["state"][low:high] == _SEALED)

    def _range_of(self, name: bytes) -> tuple[int, int]:
        """Return the position of the first record with a name, and that after the last one."""
        names = self.names
        return int(names.searchsorted(name, "left")), int(names.searchsorted(name, "right"))

    def position(self, name: bytes, version: int) -> int:
        """Return the number of records before (name, version)."""
        low, high = self._range_of(name)
        return low + int(self.table["version"][low:high].searchsorted(np.uint32(version)))

    @cached_property
    def names(self) -> NDArray[np.bytes_]:
        """Name of each record, ``S[n]``. No name has a NUL byte, so none is cut short."""
        lengths = self.table["name_bytes"]
        width = max(1, int(lengths.max(initial=0)))
        text = self.text
        if self.table["tags_bytes"].any():
            both = np.stack([lengths, self.table["tags_bytes"]], axis=1).reshape(-1)
            text = text[np.repeat(np.tile([True, False], len(lengths)), both)]
        names = np.zeros((len(lengths), width), np.uint8)
        names[np.arange(width) < lengths[:, None]] = text
        return names.view(f"S{width}").reshape(-1)

    @cached_property
    def run_starts(self) -> NDArray[np.int64]:
        """Position of each record's first run, and the number of runs, ``int64[n + 1]``."""
        table = self.table
        counts = [table[f"{kind}_run_count"].astype(np.int64) for kind in _KINDS]
        return np.concatenate([[0], np.cumsum(counts[0] + counts[1] + counts[2])])

    @cached_property
    def text_starts(self) -> NDArray[np.int64]:
        """Position of each record's name, and the length of the text, ``int64[n + 1]``."""
        sizes = self.table["name_bytes"].astype(np.int64) + self.table["tags_bytes"]
        return np.concatenate([[0], np.cumsum(sizes)])

    def sums(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the sum of a value of each run over the runs of each record.

        Args:
            values: ``int64[n_runs]``.

        Returns:
            ``int64[n_records, 3]``: over its data, directory and journal runs.
        """
        counts = [self.table[f"{kind}_run_count"].astype(np.int64) for kind in _KINDS]
        ends = self.run_starts[:-1, None] + np.cumsum(np.stack([0 * counts[0], *counts], 1), 1)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
        of_kinds: NDArray[np.int64] = np.diff(sums[ends], axis=1)
        return of_kinds

    # ---- chunks ------------------------------------------------------------------------------

    @cached_property
    def free(self) -> tuple[ChunkRun, ...]:
        """Runs of the chunks without an owner."""
        return to_runs(self.free_runs)

    @cached_property
    def used_runs(self) -> RunArray:
        """Chunks of all records as sorted runs, each shared chunk once."""
        return unite(self.runs)

    # ---- the next generation -----------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Length of the encoded catalog, in bytes."""
        runs = len(self.runs) + len(self.free_runs)
        return CATALOG_HEADER_BYTES + self.table.nbytes + 16 * runs + len(self.text)

    def with_free(self, free_runs: RunArray) -> Catalog:
        """Return this catalog with other free runs."""
        made = Catalog(
            self.generation, self.volume_uuid, self.table, self.runs, free_runs, self.text
        )
        for name in ("names", "run_starts", "text_starts", "used_runs"):
            if name in self.__dict__:
                made.__dict__[name] = self.__dict__[name]
        return made

    def edited(self, removed: Sequence[DatasetRecord], added: Sequence[DatasetRecord]) -> Catalog:
        """Return the catalog of the next generation, with the same free runs.

        Args:
            removed: records of this catalog that the next one does not have.
            added: its other records; one may have the name and the version of a removed one.

        Raises:
            UsageError: a field of an added record has no room in it, or a record to remove is not
                there.
            LimitError: the tagged values of a record are too long.
        """
        gone = sorted(self._position_of(record) for record in removed)
        fresh = sorted(added, key=lambda record: record.key)
        table, runs, text = _encode_records(fresh)
        run_starts = [0, *accumulate(len(record.runs) for record in fresh)]
        sizes = table["name_bytes"].astype(np.int64) + table["tags_bytes"]
        text_starts = [0, *accumulate(sizes.tolist())]
        pieces = _Pieces(self)
        edits = [(position, 1, 0) for position in gone]
        edits += [(self.position(*r.key), 0, number) for number, r in enumerate(fresh)]
        for position, is_removal, number in sorted(edits):
            pieces.keep_until(position)
            if is_removal:
                pieces.position += 1
                continue
            pieces.add(
                table[number : number + 1],
                runs[run_starts[number] : run_starts[number + 1]],
                text[text_starts[number] : text_starts[number + 1]],
            )
        pieces.keep_until(len(self.table))
        return Catalog(
            self.generation + 1,
            self.volume_uuid,
            np.concatenate(pieces.tables),
            np.concatenate(pieces.runs),
            self.free_runs,
            np.concatenate(pieces.texts),
        )

    def _position_of(self, record: DatasetRecord) -> int:
        at = self.position(*record.key)
        found = self.records[at] if at < len(self.table) else None
        if found is None or (found.key, found.uuid) != (record.key, record.uuid):
            raise UsageError(
                f"change the catalog: expected dataset {quote(record.name)} version "
                f"{record.version}, got none"
            )
        return at


_KINDS = ("data", "directory", "journal")


class _Pieces:
    """The pieces of a new catalog: slices of an old one, and new records between them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.position = 0
        self.tables: list[NDArray[np.void]] = [catalog.table[:0]]
        self.runs: list[RunArray] = [catalog.runs[:0]]
        self.texts: list[NDArray[np.uint8]] = [catalog.text[:0]]

    def keep_until(self, end: int) -> None:
        """Keep the old records before a position."""
        first, catalog = self.position, self._catalog
        if first < end:
            run_starts, text_starts = catalog.run_starts, catalog.text_starts
            self.add(
                catalog.table[first:end],
                catalog.runs[run_starts[first] : run_starts[end]],
                catalog.text[text_starts[first] : text_starts[end]],
            )
            self.position = end

    def add(self, table: NDArray[np.void], runs: RunArray, text: NDArray[np.uint8]) -> None:
        """Add records."""
        self.tables.append(table)
        self.runs.append(runs)
        self.texts.append(text)


class Records(Sequence[DatasetRecord]):
    """Some records of a catalog; each is decoded when it is looked at.

    Args:
        catalog: the catalog.
        positions: positions of the records in it.
    """

    def __init__(self, catalog: Catalog, positions: NDArray[np.intp]) -> None:
        self.catalog = catalog
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> DatasetRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> DatasetRecord | Records:
        if isinstance(index, slice):
            return Records(self.catalog, self.positions[index])
        return next(iter(Records(self.catalog, self.positions[[index]])))

    def __iter__(self) -> Iterator[DatasetRecord]:
        catalog, positions = self.catalog, self.positions
        run_starts, text_starts = catalog.run_starts, catalog.text_starts
        ends = positions + 1
        rows = zip(
            catalog.table[positions].tolist(),
            run_starts[positions].tolist(),
            run_starts[ends].tolist(),
            text_starts[positions].tolist(),
            text_starts[ends].tolist(),
            strict=True,
        )
        for row, run_start, run_end, text_start, text_end in rows:
            raw = catalog.text[text_start:text_end].tobytes()
            name_bytes = row[_NAME_BYTES]
            runs = catalog.runs[run_start:run_end].tolist()
            yield decode_record(row, runs, raw[:name_bytes], raw[name_bytes:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Records {[(record.name, record.version) for record in self]}>"


_NAME_BYTES = (ROW.names or ()).index("name_bytes")


def _encode_records(
    records: Sequence[DatasetRecord],
) -> tuple[NDArray[np.void], RunArray, NDArray[np.uint8]]:
    """Return table, runs and text of some records."""
    tags = [encode_tags(record) for record in records]
    rows = [encode_row(record, len(tag)) for record, tag in zip(records, tags, strict=True)]
    text = b"".join(record.name + tag for record, tag in zip(records, tags, strict=True))
    runs = to_array(run for record in records for run in record.runs)
    return np.array(rows, ROW), runs, np.frombuffer(text, np.uint8)


def encode_catalog(catalog: Catalog) -> bytes:
    """Encode a catalog, which ``check_catalog`` has checked.

    Raises:
        LimitError: it has more datasets, runs or bytes than FORMAT.md allows.
    """
    runs = len(catalog.free_runs) + len(catalog.runs)
    if len(catalog.table) > CATALOG_DATASETS_MAX or runs > CATALOG_RUNS_MAX:
        raise LimitError(
            f"encode the catalog: expected at most {CATALOG_DATASETS_MAX} datasets and "
            f"{CATALOG_RUNS_MAX} runs of chunks, got {len(catalog.table)} and {runs}"
        )
    if catalog.size_bytes > CATALOG_BYTES_MAX:
        raise LimitError(
            f"encode the catalog: expected at most {CATALOG_BYTES_MAX} bytes, "
            f"got {catalog.size_bytes}"
        )
    header = _HEADER.pack(
        CATALOG_MAGIC, CATALOG_HEADER_BYTES, 0, catalog.volume_uuid.bytes, catalog.generation,
        catalog.size_bytes, len(catalog.table), len(catalog.free_runs), len(catalog.runs),
        len(catalog.text),
    )  # fmt: skip
    arrays = (catalog.table, catalog.runs, catalog.free_runs, catalog.text)
    return header + b"".join(array.tobytes() for array in arrays)


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
    try:
        catalog = _parse(raw)
        check_catalog(catalog, superblock)
    except UsageError as error:
        raise FormatError(f"{where}: read the catalog: {error}") from error
    return catalog


def _parse(raw: bytes) -> Catalog:
    """Return the arrays of a catalog, whose lengths add up to that of the bytes."""
    if len(raw) < CATALOG_HEADER_BYTES:
        raise UsageError(f"expected {CATALOG_HEADER_BYTES} bytes of header, got {len(raw)}")
    magic, header_bytes, _, volume, generation, total, records, free, runs, text_bytes = (
        _HEADER.unpack_from(raw)
    )
    if magic != CATALOG_MAGIC or header_bytes != CATALOG_HEADER_BYTES or total != len(raw):
        raise UsageError(
            f"expected {quote(CATALOG_MAGIC)} with {CATALOG_HEADER_BYTES} of {len(raw)} bytes, "
            f"got {quote(magic)} with {header_bytes} of {total}"
        )
    if records > CATALOG_DATASETS_MAX or runs + free > CATALOG_RUNS_MAX:
        raise UsageError(
            f"expected at most {CATALOG_DATASETS_MAX} datasets and {CATALOG_RUNS_MAX} runs of "
            f"chunks, got {records} and {runs + free}"
        )
    runs_at = CATALOG_HEADER_BYTES + ROW.itemsize * records
    free_at = runs_at + 16 * runs
    text_at = free_at + 16 * free
    if text_at + text_bytes != len(raw):
        raise UsageError(
            f"expected {text_at + text_bytes} bytes for {records} datasets, {runs} and {free} runs "
            f"and {text_bytes} bytes of names, got {len(raw)}"
        )
    return Catalog(
        generation,
        UUID(bytes=volume),
        np.frombuffer(raw, ROW, records, CATALOG_HEADER_BYTES),
        np.frombuffer(raw, "<u8", 2 * runs, runs_at).reshape(-1, 2),
        np.frombuffer(raw, "<u8", 2 * free, free_at).reshape(-1, 2),
        np.frombuffer(raw, np.uint8, text_bytes, text_at) if text_bytes else _NO_TEXT,
    )


def check_catalog(catalog: Catalog, superblock: Superblock) -> None:
    """Check a catalog against the superblock that names it: identity, and who owns which chunk.

    A writer calls it on what it is about to commit, with the superblock it is about to write.

    Raises:
        UsageError: a field is out of its range, records are not in order of (name, version), the
            superblock disagrees, two owners share a chunk, or a chunk has none.
    """
    for name, expected, got in (
        ("volume UUID", superblock.volume_uuid, catalog.volume_uuid),
        ("generation", superblock.generation, catalog.generation),
    ):
        if expected != got:
            raise UsageError(f"expected {name} {expected}, got {got}")
    check_arrays(catalog, superblock)
