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

libdlfs decodes catalogs as well (native/src/volume), for programs without Python. This decoder is
here because it names the record that is wrong, and checks what a writer commits by the same rules.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, overload
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
    RUN_KINDS,
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


@dataclass(eq=False, repr=False)
class Catalog:
    """The records of one generation, in order of (name, version), and its free runs, in order.

    Attributes:
        generation: generation of the volume.
        volume_uuid: UUID of the volume.
        table: rows of the records, ``ROW[n]``.
        runs: of each record its data, directory, journal and granted runs, in order of the rows.
        free_runs: runs of the chunks without an owner.
        text: of each record its name and its tagged values, ``uint8[n]``, in order of the rows.

    The arrays are not changed. Threads: any at once.
    """

    generation: int
    volume_uuid: UUID
    table: NDArray[np.void]
    runs: RunArray
    free_runs: RunArray
    text: NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        generation: int,
        volume_uuid: UUID,
        records: Sequence[DatasetRecord],
        free: Sequence[ChunkRun],
    ) -> Catalog:
        """Return a catalog of records in order of (name, version)."""
        tags = [encode_tags(record) for record in records]
        rows = [encode_row(record, len(tag)) for record, tag in zip(records, tags, strict=True)]
        text = b"".join(record.name + tag for record, tag in zip(records, tags, strict=True))
        return cls(
            generation,
            volume_uuid,
            np.array(rows, ROW),
            to_array(run for record in records for run in record.runs),
            to_array(free),
            np.frombuffer(text, np.uint8),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Catalog) and encode_catalog(self) == encode_catalog(other)

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

    def find_unfinished(self, name: bytes) -> DatasetRecord | None:
        """Return the record of the unfinished import of a dataset; None if there is none."""
        low, high = self._range_of(name)
        found = low + np.flatnonzero(self.table["state"][low:high] != _SEALED)
        return Records(self, found)[0] if len(found) else None

    def find_content(self, digest: str) -> DatasetRecord | None:
        """Return the record of a dataset with a content digest; None if there is none."""
        for record in self.datasets:
            if record.digests.content == digest:
                return record
        return None

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
    def run_counts(self) -> NDArray[np.int64]:
        """Number of data, directory, journal and granted runs of records, ``int64[n, 4]``."""
        counts = [self.table[f"{kind}_run_count"] for kind in RUN_KINDS]
        return np.stack(counts, axis=1).astype(np.int64)

    @cached_property
    def run_starts(self) -> NDArray[np.int64]:
        """Position of each record's first run, and the number of runs, ``int64[n + 1]``."""
        return np.concatenate([[0], np.cumsum(self.run_counts.sum(axis=1))])

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
            ``int64[n_records, 4]``: over its data, directory, journal and granted runs. A sum that
            is too large wraps around.
        """
        ends = np.cumsum(self.run_counts).reshape(-1, len(RUN_KINDS))
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
        of_kinds: NDArray[np.int64] = sums[ends] - sums[ends - self.run_counts]
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
        made = copy(self)
        made.free_runs = free_runs
        for name in ("free", "datasets"):  # computed from the free runs, or with this object in it
            made.__dict__.pop(name, None)
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
        ordered = sorted(added, key=lambda record: record.key)
        fresh = Catalog.of(self.generation, self.volume_uuid, ordered, ())
        edits = [(self._position_of(record), 1, 0) for record in removed]
        edits += [(self.position(*r.key), 0, number) for number, r in enumerate(ordered)]
        pieces = []
        start = 0
        for position, removes, number in sorted(edits):
            pieces.append(self._slice(start, position))
            start = position + removes
            if not removes:
                pieces.append(fresh._slice(number, number + 1))
        pieces.append(self._slice(start, len(self.table)))
        table, runs, text = map(np.concatenate, zip(*pieces, strict=True))
        return Catalog(self.generation + 1, self.volume_uuid, table, runs, self.free_runs, text)

    def _slice(self, start: int, end: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return rows, runs and text of consecutive records."""
        runs = slice(self.run_starts[start], self.run_starts[end])
        text = slice(self.text_starts[start], self.text_starts[end])
        return self.table[start:end], self.runs[runs], self.text[text]

    def _position_of(self, record: DatasetRecord) -> int:
        at = self.position(*record.key)
        found = self.records[at] if at < len(self.table) else None
        if found is None or (found.key, found.uuid) != (record.key, record.uuid):
            raise UsageError(
                f"change the catalog: expected dataset {quote(record.name)} version "
                f"{record.version}, got none"
            )
        return at


@dataclass(eq=False, repr=False)
class Records(Sequence[DatasetRecord]):
    """Some records of a catalog; each is decoded when it is looked at.

    Attributes:
        catalog: the catalog.
        positions: positions of the records in it.
    """

    catalog: Catalog
    positions: NDArray[np.intp]

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

    def __repr__(self) -> str:
        return f"<Records {[(record.name, record.version) for record in self]}>"


_NAME_BYTES = (ROW.names or ()).index("name_bytes")


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
        np.frombuffer(memoryview(raw)[text_at:], np.uint8),
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
