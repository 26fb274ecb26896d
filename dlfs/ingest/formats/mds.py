"""Imports MosaicML MDS shards from the folder of their ``index.json``.

``index.json`` lists the shards: number of samples, columns with encodings and fixed sizes, and
files, plain or compressed, with sizes and perhaps hashes. A shard begins with the number n of its
samples and n + 1 offsets. Its columns follow as JSON, then the samples. A sample begins with the
sizes of the columns without a fixed one; the columns' bytes follow. All numbers are little-endian,
of 4 bytes.

One column is the sample, as stored: the named one, else the only one that is neither number, text
nor JSON, else the only one of text. Columns of numbers and of text become attributes, unless
``attributes`` names some. A sample's path is ``SHARD/NUMBER`` (see ``records``), or the value of
the column ``path``. A sample that is an array of fixed type and shape (``ndarray:float32:3,4``) is
recorded as an array.

With ``fields``, a sample has the columns that it names as fields, with their values decoded. This
is so by itself if several columns could be the sample: these are the fields then. A number is a
scalar, and text and JSON are text. An array (``ndarray``) names the type of its elements, its
shape, both or neither in its encoding; the bytes begin with what is missing. Images and pickled
objects (``jpeg``, ``png``, ``pil``, ``pkl``) and all others are bytes, as stored. Nothing is
unpickled.

Sizes are always checked; hashes are checked if the index has any, unless ``hashes=no``.

Memory: up to three shards, which are read whole; writers make them of 64 MiB by default.

Source: https://docs.mosaicml.com/projects/streaming, "Dataset format" (version 2).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from dlfs.base.extras import load_package
from dlfs.base.json_records import parse_json, to_record
from dlfs.base.units import GIB, MIB
from dlfs.base.wording import quote
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.fields import FieldType
from dlfs.ingest.archives.archive import Compression, decompressed
from dlfs.ingest.bad_records import Name, RecordError
from dlfs.ingest.fields import (
    Choices,
    ColumnOptions,
    FieldRecords,
    choose_fields,
    only_sample,
    parse_choices,
)
from dlfs.ingest.records import (
    Record,
    Records,
    ShardSource,
    Value,
    attribute_array,
    number_path,
    shard_prefixes,
    text_path,
)
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    Int64Array,
    SampleBlock,
    array_attributes,
    check_attribute_names,
    file_errors,
    left_out_names,
    single_path,
)

SHARD_BYTES_MAX = 4 * GIB
"""Most bytes of a shard, whose offsets have 32 bits."""
_INDEX_BYTES_MAX = 512 * MIB
_VERSION = 2

NUMBERS = {
    "int": np.dtype("<i8"),
    **{
        name: np.dtype(name).newbyteorder("<")
        for name in (
            "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
            "float32", "float64",
        )
    },
}  # fmt: skip
TEXTS: dict[str, Callable[[str], Value]] = {
    "str": str,
    "str_int": int,
    "str_float": float,
    "str_decimal": str,
}
JSON = "json"
_ELEMENTS = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""Types of elements by the number that arrays begin with."""

_COMPRESSIONS: dict[str, Compression] = {
    "zstd": "zstd",
    "gz": "gzip",
    "gzip": "gzip",
    "bz2": "bzip2",
}


@dataclass(frozen=True, slots=True)
class MdsOptions(ColumnOptions):
    """Options of MDS shards."""

    attributes: Annotated[
        tuple[str, ...] | None, "columns to store as attributes; by default all numbers and texts"
    ] = None
    hashes: Annotated[bool, "check the files' hashes"] = True

    def open(self, paths: Sequence[str]) -> MdsSource:
        """Open the folder with ``index.json``; see ``MdsSource``."""
        return MdsSource(single_path(paths, "folder of shards"), self)


class _File(msgspec.Struct, frozen=True, rename={"name": "basename", "size_bytes": "bytes"}):
    """A shard's file, plain or compressed."""

    name: str
    size_bytes: int
    hashes: dict[str, str] | None = None


_SHARD_FIELDS = {
    "names": "column_names",
    "encodings": "column_encodings",
    "sizes": "column_sizes",
    "raw": "raw_data",
    "packed": "zip_data",
}


class _Shard(msgspec.Struct, frozen=True, rename=_SHARD_FIELDS):
    """A shard's entry in the index."""

    samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    raw: _File
    packed: _File | None = None
    compression: str | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """Encoding of each column, by name."""
        return dict(zip(self.names, self.encodings, strict=True))


class MdsSource(ShardSource):
    """The samples of some shards.

    Args:
        folder: path of the folder with ``index.json`` and the shards.
        options: options of the format.

    Raises:
        NotFoundError: the folder has no index.
        UsageError: a column does not exist, or does not fit its use.
        FormatError: the index is malformed, or of another version.
        DeviceError: the index cannot be read.
    """

    def __init__(self, folder: str, options: MdsOptions) -> None:
        self._folder = Path(folder)
        self._index = _read_index(self._folder / "index.json")
        super().__init__(
            [str(self._folder / shard.raw.name) for shard in self._index], noun="a shard"
        )
        self._options = options
        self._prefixes = shard_prefixes(self.shards, [".mds"])
        first = self._index[0]
        for shard, path in zip(self._index, self.shards, strict=True):
            _check_columns(shard, first, f"import {path}", self.shards[0])
        where = f"import {folder}"
        chosen = parse_choices(options.fields, where)
        self._fields = _choose_fields(first, options, chosen, where)
        named = [name for name in (options.column, options.path) if name is not None]
        _check_known(first, named, where)
        self._column = options.column
        if self._column is None and not self._fields:
            self._column = only_sample(_candidates(first), first.names, where)
        taken = {self._column, options.path, *self._fields}
        self._attributes = _choose_attributes(first, options, taken, where)
        check_attribute_names(self._attributes, where)
        types = {
            name: field_type(first.kinds[name], f"{where}: column {name}") for name in self._fields
        }
        known = {name: kind for name, kind in types.items() if kind is not None}
        self._maker = FieldRecords(self._fields, known)
        self._is_known = known.keys() >= {name for name, kind in self._fields.items() if not kind}
        self.is_exact, self.shards_are_independent = self._is_known, True
        self.name = str(self._folder)
        self.sample_count = sum(shard.samples for shard in self._index)
        used = {*taken, *self._attributes}
        self.skipped = left_out_names("column", [name for name in first.names if name not in used])

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Read one shard; see ``ShardSource``."""
        shard, where = self._index[number], f"import {self.shards[number]}"
        if self._is_known and self.passes(shard.samples):
            return
        self._is_known |= shard.samples > 0  # the first sample gives the types it does not
        data = self._load(shard, where)
        ends = _sample_ends(shard, data, where)
        if self._column is None:
            yield from self.gather(number, self._records(number, data, ends))
            return
        for begin in range(0, shard.samples, BLOCK_SAMPLES_MAX):
            end = min(begin + BLOCK_SAMPLES_MAX, shard.samples)
            make = partial(self._block, number, self._column, data, ends[begin : end + 1], begin)
            name = partial(self._name, number, begin)
            yield from self.bad.each_part(end - begin, make, name)

    def _name(self, number: int, begin: int, index: int) -> Name:
        """Return the file and the name of a sample, by its number from ``begin`` on."""
        return self.shards[number], f"sample {begin + index}"

    def _samples(
        self, number: int, data: bytes, ends: Int64Array, first: int = 0
    ) -> Iterator[tuple[str, bytes, dict[str, tuple[int, int]]]]:
        """Yield the samples from ``first`` on: location, path, and start and end of each column.

        Args:
            number: number of the shard.
            data: the shard.
            ends: start of the sample ``first``, and end of it and of those behind it.
            first: number of a sample.
        """
        shard, prefix, path = self._index[number], self._prefixes[number], self._options.path
        for i, (start, end) in enumerate(pairwise(ends.tolist()), first):
            where = f"import {self.shards[number]}: sample {i}"
            found = _column_spans(shard, data, start, end, where)
            spans = dict(zip(shard.names, found, strict=True))
            known = number_path(prefix, i)
            if path is not None:
                known = text_path(data[slice(*spans[path])], where)
            yield where, known, spans

    def _block(
        self,
        number: int,
        column: str,
        data: bytes,
        ends: Int64Array,
        begin: int,
        first: int,
        count: int,
    ) -> SampleBlock:
        """Make a block of some samples.

        Args:
            number: number of the shard.
            column: the column of the samples.
            data: the shard.
            ends: as for ``_samples``, from the sample ``begin`` on.
            begin: number of a sample.
            first: number of the first sample of the block, counted from ``begin``.
            count: number of samples in the block.
        """
        ends, first = ends[first : first + count + 1], begin + first
        kinds, where = self._index[number].kinds, f"import {self.shards[number]}: sample"
        rows: dict[str, list[Value]] = {name: [] for name in self._attributes}
        found: list[tuple[int, int]] = []
        paths: list[bytes] = []
        for here, path, spans in self._samples(number, data, ends, first):
            paths.append(path)
            found.append(spans[column])
            for name, values in rows.items():
                values.append(column_value(kinds[name], data[slice(*spans[name])], name, here))
        starts, stops = np.array(found, np.int64).T
        attributes = {name: attribute_array(values, name, where) for name, values in rows.items()}
        attributes |= array_form(kinds[column], len(paths), where)
        return SampleBlock(
            paths, np.frombuffer(data, np.uint8), starts.copy(), stops - starts, attributes
        )

    def _records(self, number: int, data: bytes, ends: Int64Array) -> Records:
        """Yield the samples with fields of a shard."""
        for i in range(len(ends) - 1):
            try:
                record = self._record(number, data, ends[i : i + 2], i)
            except RecordError as error:
                self.bad.note(*self._name(number, i, 0), error)
            else:
                yield record

    def _record(self, number: int, data: bytes, ends: Int64Array, index: int) -> Record:
        """Return a sample with fields; see ``_samples``."""
        kinds = self._index[number].kinds
        where, path, spans = next(self._samples(number, data, ends, index))
        columns = {name: (kinds[name], data[slice(*spans[name])]) for name in kinds}
        attributes = {name: column_value(*columns[name], name, where) for name in self._attributes}
        values = {
            name: field_value(*columns[name], name, kind, where)
            for name, kind in self._fields.items()
        }
        return self._maker.make(path, values, where, attributes)

    def _load(self, shard: _Shard, where: str) -> bytes:
        """Read, check and decompress a shard."""
        if shard.packed is not None and not (self._folder / shard.raw.name).exists():
            packed = _read(self._folder / shard.packed.name, shard.packed)
            self._check_hashes(packed, shard.packed)
            data = _decompress(packed, shard, where)
        else:
            data = _read(self._folder / shard.raw.name, shard.raw)
        self._check_hashes(data, shard.raw)
        return data

    def _check_hashes(self, data: bytes, file: _File) -> None:
        if not self._options.hashes:
            return
        where = f"import {self._folder / file.name}"
        for name, expected in (file.hashes or {}).items():
            got = _digest(name, data, where)
            if got != expected:
                raise ChecksumError(f"{where}: expected {name} {expected}, got {got}")


# ---- columns -------------------------------------------------------------------------------------


def _check_columns(shard: _Shard, first: _Shard, where: str, first_shard: str) -> None:
    """Check that a shard has the columns of the first, in its order."""
    got, expected = shard.kinds, first.kinds
    for name in dict.fromkeys([*expected, *got]):
        if got.get(name) != expected.get(name):
            raise FormatError(
                f"{where}: column {name}: expected {expected.get(name, 'none')} as in "
                f"{first_shard}, got {got.get(name, 'none')}"
            )
    if shard.names != first.names:
        raise FormatError(
            f"{where}: expected the columns {', '.join(first.names)} as in {first_shard}, got "
            f"{', '.join(shard.names)}"
        )


def _check_known(shard: _Shard, names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in shard.names:
            raise UsageError(f"{where}: expected column {name}, got {', '.join(shard.names)}")


def _candidates(shard: _Shard) -> list[str]:
    """Return the columns that are neither number, text nor JSON, else those of text."""
    kinds = shard.kinds.items()
    opaque = [name for name, kind in kinds if kind not in (*NUMBERS, *TEXTS, JSON)]
    return opaque or [name for name, kind in kinds if kind == "str"]


def _choose_fields(shard: _Shard, options: MdsOptions, chosen: Choices, where: str) -> Choices:
    """Return the fields; none if one column is the sample."""
    if chosen and options.column is not None:
        raise UsageError(f"{where}: expected a column or fields, got both")
    others = (options.path, *(options.attributes or ()))
    if chosen:
        found = choose_fields(chosen, [name for name in shard.names if name not in others])
        _check_known(shard, found, where)
        return found
    candidates = [] if options.column is not None else _candidates(shard)
    free = [name for name in candidates if name not in others]
    return dict.fromkeys(free) if len(free) > 1 else {}


def _choose_attributes(
    shard: _Shard, options: MdsOptions, taken: Container[str | None], where: str
) -> tuple[str, ...]:
    kinds = shard.kinds
    able = [name for name, kind in kinds.items() if kind in NUMBERS or kind in TEXTS]
    if options.attributes is None:
        return tuple(name for name in able if name not in taken)
    _check_known(shard, options.attributes, where)
    for name in options.attributes:
        if name not in able:
            raise UsageError(
                f"{where}: expected a number or text in column {name}, got {kinds[name]}"
            )
    return options.attributes


def _sample_ends(shard: _Shard, data: bytes, where: str) -> Int64Array:
    """Return ``int64[samples + 1]``: the start of the first sample, and the end of each."""
    header = 4 * (shard.samples + 2)
    if len(data) < header:
        raise TruncatedError(f"{where}: expected {header} bytes of offsets, got {len(data)}")
    count, *_ = np.frombuffer(data, "<u4", 1).tolist()
    ends = np.frombuffer(data, "<u4", shard.samples + 1, 4).astype(np.int64)
    if count != shard.samples:
        raise FormatError(f"{where}: expected {shard.samples} samples, got {count}")
    falls = np.flatnonzero(np.diff(ends) < 0)
    if len(falls) or ends[0] < header or ends[-1] != len(data):
        at = int(falls[0]) if len(falls) else 0
        raise FormatError(
            f"{where}: sample {at}: expected rising offsets from {header} to {len(data)}, "
            f"got {ends[at]} and {ends[at + 1] if len(falls) else ends[-1]}"
        )
    return ends


def _column_spans(
    shard: _Shard, data: bytes, start: int, end: int, where: str
) -> list[tuple[int, int]]:
    """Return the start and end of each column of a sample."""
    variable = shard.sizes.count(None)
    if start + 4 * variable > end:
        raise FormatError(f"{where}: expected {variable} sizes in {end - start} bytes")
    stored = iter(np.frombuffer(data, "<u4", variable, start).tolist() if variable else [])
    position = start + 4 * variable
    spans = []
    for fixed in shard.sizes:
        size = next(stored) if fixed is None else fixed
        spans.append((position, position + size))
        position += size
    if position != end:
        raise FormatError(
            f"{where}: expected columns of {end - start} bytes in all, got {position - start}"
        )
    return spans


# ---- files ---------------------------------------------------------------------------------------


def _read_index(path: Path) -> list[_Shard]:
    with file_errors(f"import {path}"), path.open("rb") as file:
        text = file.read(_INDEX_BYTES_MAX)
    try:
        index = parse_json(text)
        listed = index["shards"]
        versions = {index["version"], *(shard["version"] for shard in listed)}
        formats = {shard["format"] for shard in listed}
    except (FormatError, TypeError, KeyError) as error:
        raise FormatError(f"import {path}: expected an index of shards: {error!r}") from error
    if versions != {_VERSION}:
        raise VersionError(f"import {path}: expected version {_VERSION}, got {versions}")
    if not formats <= {"mds"}:
        raise FormatError(f"import {path}: expected shards of format mds, got {formats}")
    return [_read_shard(shard, f"import {path}: shard {i}") for i, shard in enumerate(listed)]


def _read_shard(shard: Any, where: str) -> _Shard:
    try:
        found = to_record(shard, _Shard)
    except FormatError as error:
        raise FormatError(f"{where}: expected a shard's description: {error}") from error
    names, sizes = found.names, found.sizes
    fixed = [size for size in sizes if size is not None]
    if not len(names) == len(found.encodings) == len(sizes) or min([0, found.samples, *fixed]) < 0:
        raise FormatError(f"{where}: expected as many encodings and sizes as columns")
    if len(set(names)) != len(names):
        raise FormatError(f"{where}: expected columns of different names, got {list(names)}")
    for file in filter(None, (found.raw, found.packed)):
        if not file.name or Path(file.name).name != file.name:
            raise FormatError(f"{where}: expected a file's name, got {file.name!r}")
        if not 0 <= file.size_bytes <= SHARD_BYTES_MAX:
            raise LimitError(
                f"{where}: expected at most {SHARD_BYTES_MAX} bytes, got {file.size_bytes}"
            )
    return found


def _read(path: Path, file: _File) -> bytes:
    with file_errors(f"import {path}", "shard"), path.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != file.size_bytes:
            kind = TruncatedError if size < file.size_bytes else FormatError
            raise kind(f"import {path}: expected {file.size_bytes} bytes, got {size}")
        return opened.read()


def _decompress(packed: bytes, shard: _Shard, where: str) -> bytes:
    """Decompress a shard up to the size in the index."""
    name = (shard.compression or "none").partition(":")[0]
    kind = _COMPRESSIONS.get(name)
    if kind is None:
        raise UsageError(
            f"{where}: expected compression zstd, gz or bz2, got {name}; "
            "decompress the shards first"
        )
    stream = decompressed(io.BytesIO(packed), kind)
    try:
        data = stream.read(shard.raw.size_bytes + 1)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise FormatError(f"{where}: the {name} stream is damaged: {error}") from error
    if len(data) != shard.raw.size_bytes:
        raise FormatError(
            f"{where}: expected {shard.raw.size_bytes} bytes when decompressed, "
            f"got {len(data)} or more"
        )
    return data


def _digest(name: str, data: bytes, where: str) -> str:
    if name in hashlib.algorithms_available and not name.startswith("shake_"):
        return hashlib.new(name, data).hexdigest()
    if not name.startswith("xxh"):
        raise UsageError(
            f"{where}: hash {name} is unknown; the option hashes=no imports without a check"
        )
    xxhash = load_package("xxhash", extra="mds", what=where)
    found: str = getattr(xxhash, name)(data).hexdigest()
    return found


# ---- values --------------------------------------------------------------------------------------


def column_value(encoding: str, data: bytes, name: str, where: str) -> Value:
    """Return a number of the encoding's type, or text, as the value of an attribute.

    Raises:
        FormatError: the bytes are no such value.
    """
    dtype = NUMBERS.get(encoding)
    try:
        if dtype is None:
            return TEXTS[encoding](data.decode())
        (value,) = np.frombuffer(data, dtype)
    except ValueError as error:
        raise FormatError(
            f"{where}: column {name}: expected {encoding}, got {quote(bytes(data))}"
        ) from error
    return cast(Value, value)


def array_form(encoding: str, count: int, where: str) -> dict[str, npt.NDArray[Any]]:
    """Return the columns for type and shape if the encoding fixes both, else none.

    Raises:
        FormatError: the encoding is malformed.
    """
    form = _array_type(encoding, where)
    if form is None:
        return {}
    return array_attributes(form.dtype, cast(tuple[int, ...], form.shape), count)


def field_type(encoding: str, where: str) -> FieldType | None:
    """Return the type of a field; None for arrays without a shape in their encoding.

    Raises:
        FormatError: the encoding is malformed.
    """
    if encoding in NUMBERS:
        return FieldType.array(NUMBERS[encoding].str, ())
    if encoding == JSON or TEXTS.get(encoding) is str:
        return FieldType("text")
    if encoding in TEXTS:
        return FieldType.array("<i8" if TEXTS[encoding] is int else "<f8", ())
    if encoding.partition(":")[0] != "ndarray":
        return FieldType("bytes")
    return _array_type(encoding, where)


def field_value(
    encoding: str, data: bytes, name: str, declared: FieldType | None, where: str
) -> Any:
    """Return the value of a field: a number, text, an array or bytes.

    One that is declared as bytes or text is not decoded.

    Raises:
        FormatError: the bytes are no such value, or a whole number has more than 64 bits.
    """
    if declared is not None and declared.kind != "array":
        return data
    try:
        if encoding in NUMBERS:
            return np.frombuffer(data, NUMBERS[encoding]).reshape(())
        if encoding == JSON or TEXTS.get(encoding) is str:
            return data.decode()
        if encoding in TEXTS:
            value = TEXTS[encoding](data.decode())
            return np.array(value, np.int64 if isinstance(value, int) else np.float64)
        return _array(encoding, data) if encoding.partition(":")[0] == "ndarray" else data
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{where}: field {name!r}: expected {encoding}: {error}") from error


def _array(encoding: str, data: bytes) -> npt.NDArray[Any]:
    """Return the array in some bytes, which begin with what the encoding does not say."""
    _, name, form = (encoding + "::").split(":")[:3]
    at = 0
    if not name:
        if not data or data[0] not in _ELEMENTS:
            raise ValueError(f"expected the number of a type, got {data[:1]!r}")
        name, at = _ELEMENTS[data[0]], 1
    if form:
        shape = [int(length) for length in form.split(",")]
    else:
        dimensions, size = divmod(data[at], 4) if at < len(data) else (0, 0)
        end = at + 1 + dimensions * (1 << size)
        shape = np.frombuffer(data[at + 1 : end], f"<u{1 << size}").tolist()
        at = end
        if len(shape) < dimensions:
            raise ValueError(f"expected a shape of {dimensions} lengths, got {len(shape)}")
    return np.frombuffer(data[at:], np.dtype(name).newbyteorder("<")).reshape(shape)


def _array_type(encoding: str, where: str) -> FieldType | None:
    """Return the type of an array whose encoding fixes element and shape, else None."""
    kind, _, form = encoding.partition(":")
    name, _, shape = form.partition(":")
    if kind != "ndarray" or not shape:
        return None
    try:
        sizes = tuple(int(size) for size in shape.split(","))
        return FieldType.array(np.dtype(name).newbyteorder("<").str, sizes)
    except (ValueError, TypeError, UsageError) as error:
        raise FormatError(f"{where}s: expected an array's form, got {encoding!r}") from error
