"""Imports TFRecord files: every record is a sample, or one feature of each tf.train.Example.

A record is its length (8 bytes, little-endian), that length's checksum, the data, and the data's
checksum. Checksums are masked CRC32C; all are checked. A file ends behind a record.

``tfrecord.records`` makes samples of the data: of whole records, or of features.

Plain files are indexed first. An index file next to them, as ``tfrecord2idx`` writes it, has a line
``offset length`` for each record, and must cover the file without a gap. Without one, the lengths
of all records are read. Records are then read in the order of packing, so that ``shuffled`` is a
true shuffle of all of them.

Files compressed with gzip or zlib can only be read in order. If there is one, all files are
streamed, in an order drawn from the seed. A record in a compressed file has at most
``RECORD_BYTES_MAX``, because memory for it is taken before its data is seen.

Memory: 16 bytes for each record of plain files, and the blocks.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import numpy as np

from dlfs._native.checksums import crc32c
from dlfs.base.units import GIB
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
)
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.formats.tfrecord.records import RecordOptions, RecordSource
from dlfs.ingest.records import (
    IndexedSamples,
    Record,
    attribute_array,
    files_of,
    find_fitting,
    make_block,
)
from dlfs.ingest.source import (
    Bytes,
    Int64Array,
    SampleBlock,
    Uint64Array,
    file_errors,
    file_state,
)

Compression = Literal["auto", "none", "gzip", "zlib"]

RECORD_BYTES_MAX = 1 * GIB
"""Most bytes of a record in a compressed file."""

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_OVERHEAD_BYTES = _HEADER.size + _FOOTER.size
_MASK_DELTA = 0xA282EAD8
"""Constant of the checksum mask. Source: tensorflow/core/lib/hash/crc32c.h."""


@dataclass(frozen=True, slots=True)
class TfRecordOptions(RecordOptions):
    """Options of TFRecord files."""

    index: Annotated[str, "auto, none, or the folder of the index files"] = "auto"
    compression: Annotated[Compression, "compression of the files; auto: by their names"] = "auto"

    def open(self, paths: Sequence[str]) -> TfRecordSource:
        """Open TFRecord files, or folders of them; see ``TfRecordSource``."""
        return TfRecordSource(files_of(paths, "tfrecord", noun="a TFRecord file"), self)

    def open_described(self, paths: Sequence[str], samples: IndexedSamples) -> TfRecordSource:
        """Open files of which some records are known; see ``registry.IndexedOptions``."""
        return TfRecordSource(paths, self, samples)


class TfRecordSource(RecordSource):
    """The records of some TFRecord files.

    Args:
        shards: paths of the files.
        options: options of the format.
        described: records of plain files, which another source has found; None to find them.

    Raises:
        UsageError: the list of files is empty, or two files have one name.
        NotFoundError: a file, or a requested index, does not exist.
        ChecksumError: the checksum of a length is wrong.
        FormatError: an index does not fit its file.
        TruncatedError: a file ends within a record.
        DeviceError: a file cannot be read.
    """

    def __init__(
        self,
        shards: Sequence[str],
        options: TfRecordOptions,
        described: IndexedSamples | None = None,
    ) -> None:
        super().__init__(shards, options, noun="a TFRecord file", format_name="tfrecord")
        self._index_option = options.index
        endings = {".gz": "gzip", ".zlib": "zlib"}
        self._compressions = [
            endings.get(Path(shard).suffix.lower(), "none")
            if options.compression == "auto"
            else options.compression
            for shard in shards
        ]
        if set(self._compressions) == {"none"}:
            self.described = described
            self.index = self._find_records() if described is None else self._take(described)
            self.gives_shuffled = True
            self.sample_count = len(self.index.sizes) if options.nulls != "skip" else None
            if self._examples is None:
                data_bytes = self.index.sizes - np.uint64(_OVERHEAD_BYTES)
                self.sample_bytes = int(data_bytes.sum())
        elif "none" in self._compressions:
            self.undivided = "some of its files are compressed, and some are not"
        else:
            self.divide_by_file()

    def _find_records(self) -> RangeReader:
        """Find the place of each record in plain files, with its header and checksums."""
        index = RangeReader(self.shards)
        sizes: list[Uint64Array] = []
        for shard in self.shards:
            with file_errors(f"import {shard}"), open(shard, "rb") as file:
                index.states.append(file_state(file.fileno()))
                size_bytes = index.states[-1][0]
                found = _find_index(shard, self._index_option)
                if found is None:
                    records = _scan(shard, file, size_bytes)
                    sizes.append(np.fromiter(self.bad.salvage(records, shard), np.uint64))
                else:
                    sizes.append(_read_index(found, shard, size_bytes))
        self._firsts = np.cumsum([0, *map(len, sizes)])
        self._positions = np.concatenate([np.cumsum(part) - part for part in sizes])
        index.sizes = np.concatenate(sizes)
        return index

    def _take(self, described: IndexedSamples) -> RangeReader:
        """Take the places of records that another source has found."""
        index = RangeReader(self.shards)
        index.states = list(described.states)
        index.sizes = described.sizes
        if len(index.sizes) and int(index.sizes.min()) < _OVERHEAD_BYTES:
            raise FormatError(f"import {self.name}: expected records of {_OVERHEAD_BYTES} bytes")
        return index

    def _places(self, indices: Uint64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the file of each record, its position in it, and its number."""
        if self.described is not None:
            shards, positions, numbers = self.described.places[indices].T
            return shards, positions, numbers
        shards = np.searchsorted(self._firsts, indices, side="right") - 1
        positions = self._positions[indices].astype(np.int64)
        return shards, positions, indices.astype(np.int64) - self._firsts[shards]

    def describe_samples(self, indices: Uint64Array) -> IndexedSamples | None:
        """Return the places of records; see ``ShardSource``."""
        assert self.index is not None
        if self._options.fields or self._options.nulls == "default":
            self.undivided = "the first record gives the types of its fields or defaults"
            return None
        return IndexedSamples(np.stack(self._places(indices), axis=1), self.index.sizes[indices])

    def described_bytes(self) -> Int64Array:
        """Return zeros: of a record, only its place is described; see ``ShardSource``."""
        assert self.index is not None
        return np.zeros(len(self.index.sizes), np.int64)

    def stream(self, number: int, bad: BadRecords) -> Generator[tuple[int, bytes], None, None]:
        """Yield the records of one file; see ``RecordSource``."""
        return _stream(self.shards[number], self._compressions[number], bad)

    def read_indexed(self, indices: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        """Read and check whole records; make a block of the samples in them."""
        assert self.index is not None
        sizes = self.index.sizes[indices].astype(np.int64)
        shards, positions, numbers = self._places(indices)
        ranges = np.stack([shards, positions, sizes, offsets])
        are_read = self.read_places(ranges, offsets, buffer, lambda i: f"record {numbers[i]}")
        memory = buffer.data
        records: list[Record] = []
        firsts: list[int] = []
        places = np.stack([shards, numbers, offsets, sizes], axis=1)[are_read]
        for shard, number, at, size in places.tolist():
            where = f"import {self.shards[shard]}: record {number}"
            try:
                _check_record(memory[at : at + size], where)
            except FormatError as error:
                self.bad.note(self.shards[shard], f"record {number}", error)
                continue
            first = at + _HEADER.size
            last = at + size - _FOOTER.size
            record = self.sample(shard, number, memory[first:last])
            if record is None:
                continue
            if self._options.column is not None:  # the sample overwrites its record in the buffer
                data = memory[first : first + len(record.data)]
                data[:] = record.data
                record = Record(record.path, data, record.attributes)
            records.append(record)
            firsts.append(first)
        where = f"import {self.name}"
        if self.bad.are_allowed:
            fitting = find_fitting(records, where, self.bad)
            records, firsts = [records[i] for i in fitting], [firsts[i] for i in fitting]
        if self._options.fields and records:
            return make_block(records, where)
        columns = {
            name: attribute_array([record.attributes[name] for record in records], name, where)
            for name in self._options.attributes
        }
        return SampleBlock(
            [record.path for record in records],
            buffer,
            np.array(firsts, np.int64),
            np.array([len(record.data) for record in records], np.int64),
            columns,
        )


def masked_crc32c(data: Any) -> int:
    """Return the masked checksum of some data: its CRC32C, rotated and shifted by a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _check_record(record: memoryview, where: str) -> None:
    """Check a record, its header and its footer against the record's size."""
    length = _check_header(record[: _HEADER.size], where)
    if length != len(record) - _OVERHEAD_BYTES:
        raise FormatError(
            f"{where}: expected {len(record) - _OVERHEAD_BYTES} bytes as the index says, got a "
            f"record of {length}"
        )
    _check_data(record[_HEADER.size : -_FOOTER.size], record[-_FOOTER.size :], where)


def _check_header(header: bytes | memoryview, where: str) -> int:
    length, expected = _HEADER.unpack(header)
    got = masked_crc32c(header[:8])
    if got != expected:
        raise ChecksumError(
            f"{where}: expected {expected:#010x} as the checksum of its length, got {got:#010x}"
        )
    return int(length)


def _check_data(data: bytes | memoryview, footer: bytes | memoryview, where: str) -> None:
    (expected,) = _FOOTER.unpack(footer)
    got = masked_crc32c(data)
    if got != expected:
        raise ChecksumError(
            f"{where}: expected {expected:#010x} as the checksum of its {len(data)} bytes, "
            f"got {got:#010x}"
        )


# ---- finding records -----------------------------------------------------------------------------


def _scan(shard: str, file: IO[bytes], size_bytes: int) -> Iterator[int]:
    """Yield the sizes of a file's records, from their headers."""
    position = count = 0
    while position < size_bytes:
        where = f"import {shard}: record {count}"
        file.seek(position)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise _cut(where, position)
        size = _check_header(header, where) + _OVERHEAD_BYTES
        if size > size_bytes - position:
            raise _cut(where, position)
        yield size
        position, count = position + size, count + 1


def _find_index(shard: str, index: str) -> str | None:
    if index == "none":
        return None
    folder = Path(shard).parent if index == "auto" else Path(index)
    name, stem = Path(shard).name, Path(shard).stem
    endings = (".index", ".idx", ".tfindex")
    for candidate in (start + ending for start in (name, stem) for ending in endings):
        if (folder / candidate).is_file():
            return str(folder / candidate)
    if index != "auto":
        raise NotFoundError(f"import {shard}: expected its index in {index}, got none")
    return None


def _read_index(path: str, shard: str, size_bytes: int) -> Uint64Array:
    """Return the sizes of a file's records, from an index that must cover it without a gap."""
    try:
        with file_errors(f"import {path}"), open(path, "rb") as file:
            lines = [line.split() for line in file if line.strip()]
        pairs = np.array(lines, "S20").reshape(len(lines), 2).astype(np.uint64)
    except ValueError as error:
        raise FormatError(f"import {path}: expected lines of an offset and a length") from error
    offsets, sizes = pairs.T.copy()
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)])
    wrong = np.flatnonzero(
        (offsets != ends[:-1]) | (sizes < _OVERHEAD_BYTES) | (sizes > size_bytes)
    )
    if len(wrong):
        at = int(wrong[0])
        raise FormatError(
            f"import {path}: line {at + 1}: expected a record at byte {ends[at]} of {shard}, got "
            f"{sizes[at]} bytes at {offsets[at]}; the option index=none imports without it"
        )
    if int(ends[-1]) != size_bytes:
        raise FormatError(
            f"import {path}: expected {shard} to have {ends[-1]} bytes, got {size_bytes}; "
            "the option index=none imports without it"
        )
    return sizes


# ---- compressed files ----------------------------------------------------------------------------


def _stream(
    shard: str, compression: str, bad: BadRecords
) -> Generator[tuple[int, bytes], None, None]:
    """Yield the numbers and data of the records of a file, from its start to its end.

    Args:
        shard: path of the file.
        compression: its compression.
        bad: bad records, to which those with a wrong checksum are added.
    """
    count = 0
    with file_errors(f"import {shard}"), open(shard, "rb") as file:
        try:
            with _decompress(file, compression) as stream:
                position = 0
                while header := stream.read(_HEADER.size):
                    where = f"import {shard}: record {count}"
                    data, footer = _read_record(stream, header, where, position)
                    try:
                        _check_data(data, footer, where)
                    except ChecksumError as error:
                        bad.note(shard, f"record {count}", error)
                    else:
                        yield count, data
                    count += 1
                    position += len(data) + _OVERHEAD_BYTES
        except EOFError as error:
            raise _cut(f"import {shard}: record {count}", position) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise FormatError(
                f"import {shard}: record {count}: the {compression} stream is damaged: {error}"
            ) from error


def _read_record(
    stream: IO[bytes], header: bytes, where: str, position: int
) -> tuple[bytes, bytes]:
    """Read the data of a record, whose header has been read, and its footer."""
    if len(header) < _HEADER.size:
        raise _cut(where, position)
    length = _check_header(header, where)
    if length > RECORD_BYTES_MAX:
        raise LimitError(
            f"{where}: expected at most {RECORD_BYTES_MAX} bytes in a compressed file, got {length}"
        )
    data = stream.read(length + _FOOTER.size)
    if len(data) < length + _FOOTER.size:
        raise _cut(where, position)
    return data[:length], data[length:]


class _ZlibReader(io.RawIOBase):
    """A zlib stream that raises EOFError if it ends too early."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._inflater = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._inflater.eof:
            pending = self._inflater.unconsumed_tail
            data = pending or self._file.read(io.DEFAULT_BUFFER_SIZE)
            out = self._inflater.decompress(data, len(target))
            if out:
                target[: len(out)] = out
                return len(out)
            if not data:
                raise EOFError("the stream has no end")
        return 0


def _decompress(file: IO[bytes], compression: str) -> IO[bytes]:
    """Return a buffered stream of a file; it reads fewer bytes than asked for only at its end."""
    if compression == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    if compression == "zlib":
        return cast(IO[bytes], io.BufferedReader(_ZlibReader(file)))
    return file


def _cut(where: str, position: int) -> TruncatedError:
    return TruncatedError(f"{where}: at byte {position}: the file ends within the record")
