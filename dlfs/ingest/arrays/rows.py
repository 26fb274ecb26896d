"""Makes samples of arrays, for every format that stores n-dimensional arrays.

The option ``samples`` says what makes a sample:

- ``rows``: each row along the first axis, ``images/00000042``. Row numbers have eight digits, or
  more for longer arrays, so that paths sort in the order of rows.
- ``arrays``: each whole array, by its name, ``images``.
- ``groups``: the arrays of each group together, by the group's name, as an uncompressed NPZ archive
  that ``numpy.load`` reads.

With ``fields``, samples have several arrays as fields: the rows of one number, by the name of the
group and this number, or the whole arrays of a group. See ``arrays.plan``.

If there are several files, each path begins with the file's name without suffix,
``run7/images/00000042``. So does the path of an array or a group without a name. The bytes are
those of the file, in C order and in the array's byte order. ``dlfs:dtype`` and ``dlfs:shape``
record their type and shape; they are empty for structures, which one type cannot describe.

Other arrays may give attributes: an array with a value for each row, or one with a single value for
all samples. A whole array or a group takes an array with a single value.

All files are opened once to plan the import, so that most errors are found beforehand. Then the
rows are read in windows that end where chunks end. So each chunk is decompressed once. Layout
``path`` has them in their order. Layout ``shuffled`` draws the order of all windows from the seed,
each of ``PART_BYTES`` or of one row of chunks; the dataset writer shuffles their samples. Members
of NPZ archives are read from their first row to their last, and so are NPY files in Fortran order.

Memory: three blocks of a buffer's size, or two of ``WINDOW_BYTES_MAX`` for chunks that exceed it. A
row of chunks larger than that is decompressed again for each window. A larger sample takes memory
of its own. Arrays that are read in parts of their chunks, such as labels, are in memory as far as
``WHOLE_BYTES_MAX`` hold them.
"""

from __future__ import annotations

import errno
import io
import math
import posixpath
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from dlfs.base.extras import load_package
from dlfs.base.units import GIB, MIB
from dlfs.errors import DeviceError, FormatError, LimitError
from dlfs.fields import FieldType
from dlfs.fields.arrays import DTYPE_COLUMN, SHAPE_COLUMN, is_element
from dlfs.fields.types import DIMENSIONS_MAX
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, ArrayOptions, Opener, reading
from dlfs.ingest.arrays.plan import Plan, Unit, row_digits
from dlfs.ingest.bad_records import (
    REST,
    BadRecords,
    Name,
    RecordError,
    opening,
)
from dlfs.ingest.fields import FieldRecords
from dlfs.ingest.isolation.confines import allow_memory
from dlfs.ingest.records import PART_BYTES, PartSource, make_block
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    Array,
    Bytes,
    Int64Array,
    SampleBlock,
    Uint64Array,
    array_attributes,
    show,
)

WINDOW_BYTES_MAX = 256 * MIB
"""Most bytes of one read from an array whose chunks exceed a buffer."""

WINDOW_ROWS_MAX = 1 << 20

WHOLE_BYTES_MAX = 64 * MIB
"""Most bytes of arrays that are in memory because parts of their chunks are read."""

RAGGED_ROWS = 64
"""Number of rows of any length that are read at once."""

_COPIES = 4
"""Memory that reading a sample may take, in multiples of its size."""

GROUP_BYTES_MAX = 2 * GIB
"""Most bytes of a group as one sample: larger NPZ archives have other headers."""


class ArraySource(PartSource[ArrayFile]):
    """The samples of the arrays in some files of one format.

    Args:
        paths: paths of existing files.
        opener: function that opens one of them.
        options: options of the format.

    Raises:
        UsageError: no array matches, two files have the same name, or an attribute does not fit.
        NotFoundError: a file does not exist.
        FormatError: a file is damaged, or a name in it cannot be a path.
        DeviceError: a file cannot be read.
    """

    def __init__(self, paths: Sequence[str], opener: Opener, options: ArrayOptions) -> None:
        super().__init__(paths, noun="a file of arrays")
        self._opener = opener
        plan = Plan(self.shards, options, self.bad)
        for index, path in enumerate(self.shards):
            try:
                with reading(path):
                    file = opener(path)
            except (FormatError, DeviceError) as error:
                self.bad.note(path, REST, error)
                plan.add_lost()
                continue
            with closing(file):
                if self.bad.are_allowed:
                    file.leave_out_damaged(self.bad)
                plan.add(index, file)
        self._units, self._column_types = plan.finish()
        self._maker = FieldRecords(known=plan.field_types)
        self.states = plan.states
        self.skipped = plan.skipped
        self.sample_count = sum(unit.count for unit in self._units)
        self._makes_archives = options.samples == "groups" and not plan.field_types
        if plan.field_types:
            self.sample_bytes = _fields_bytes(self._units, plan.field_types)
        elif self._makes_archives:
            self.sample_bytes = sum(
                _group_bytes(self.shards[unit.file], unit) for unit in self._units
            )
        elif all(unit.members[0].kind == "fixed" for unit in self._units):
            self.sample_bytes = sum(unit.members[0].size_bytes for unit in self._units)
        allow_memory(_COPIES * max(map(_sample_bytes, self._units)))
        self._whole = _WholeArrays()
        self.find_runs()

    def find_parts(self, size_bytes: int) -> tuple[Int64Array, Uint64Array]:
        """Divide the units into windows, or samples; see ``PartSource``."""
        parts: list[Int64Array] = []
        for number, unit in enumerate(self._units):
            starts = _unit_starts(unit, size_bytes, 0, unit.count)
            if any(array.in_order for array in unit.members):
                starts = starts[:1]
            ends = np.append(starts, unit.count)[1:]
            parts.append(np.stack([np.full(len(starts), number), starts, ends - starts], axis=1))
        found = np.concatenate(parts)
        row_bytes = np.array([_row_bytes(unit) for unit in self._units], np.uint64)
        return found, found[:, 2].astype(np.uint64) * row_bytes[found[:, 0]]

    @property
    def files(self) -> Sequence[int]:
        """Number of the file of each unit."""
        return [unit.file for unit in self._units]

    def read_part(self, group: int, first: int, count: int) -> Iterator[SampleBlock]:
        """Yield some samples of a unit; see ``PartSource``."""
        unit = self._units[group]
        file, types, size_bytes = self.opened(unit.file), self._column_types, self.buffer_bytes
        reader = _UnitReader(
            self.shards[unit.file],
            file,
            unit,
            types,
            size_bytes,
            self._whole,
            self.passes,
            self.bad,
        )
        reader.check()
        if unit.fields:
            return reader.fields(self._maker, first, count)
        return reader.groups() if self._makes_archives else reader.windows(first, count)

    def open_file(self, number: int) -> ArrayFile:
        """Open a file; see ``PartSource``."""
        path = self.shards[number]
        with reading(path), opening(self.bad.unreported()):
            return self._opener(path)


class FileOptions(ArrayOptions):
    """Base of the options of a format, which says how its files are opened.

    Attributes:
        file_class: class of an open file, made of its path.
        packages: modules that it needs.
        extra: extra of dlfs that installs them.
    """

    file_class: ClassVar[type[Any]]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""

    def open(self, paths: Sequence[str]) -> ArraySource:
        """Open files of this format as one source; see ``ArraySource``."""
        for name in self.packages:
            load_package(name, extra=self.extra, what=f"import {paths[0]}")
        return ArraySource(paths, self.file_class, self)


@dataclass(frozen=True, slots=True)
class _UnitReader:
    """Reads one unit of an open file."""

    _path: str
    _file: ArrayFile
    _unit: Unit
    _column_types: Mapping[str, np.dtype[Any]]
    _buffer_bytes: int
    _whole: _WholeArrays
    _passes: Callable[[int], bool]
    """Returns True if a window of so many samples is to be left out."""
    _bad: BadRecords

    def check(self) -> None:
        """Raise DeviceError if an array has changed since the plan was made."""
        for array in self._unit.members:
            found = self._file.arrays.get(array.name) or self._file.members.get(array.name)
            if found != array and (found is not None or not self._unit.fields):
                raise DeviceError(
                    f"import {self._path}: {array.name or 'the array'} changed during the import",
                    errno.ESTALE,
                )

    def windows(self, first: int, count: int) -> Iterator[SampleBlock]:
        """Yield some rows of an array in windows, or the array as the only sample."""
        array = self._unit.members[0]
        if not self._unit.rows:
            yield from self._parts(0, 1, lambda *_: self._fixed(array, 0, array.count))
            return
        make = partial(self._fixed if array.kind == "fixed" else self._ragged, array)
        for start, size in windows(array, self._buffer_bytes, first, count):
            if not self._passes(size):
                yield from self._parts(start, size, make)

    def _parts(
        self, first: int, count: int, make: Callable[[int, int], SampleBlock]
    ) -> Iterator[SampleBlock]:
        """Yield a window of samples, in parts without those that cannot be read.

        Args:
            first: number of the first sample.
            count: number of samples.
            make: function that reads some of them: number of the first, and how many.
        """

        def name(index: int) -> Name:
            return self._path, show(self._sample_paths(first + index, 1)[0])

        errors = (*RecordError, DeviceError)
        return self._bad.each_part(count, lambda at, n: make(first + at, n), name, errors)

    def groups(self) -> Iterator[SampleBlock]:
        """Yield a group as an NPZ archive."""
        yield from self._parts(0, 1, lambda *_: self._group())

    def _group(self) -> SampleBlock:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for array in self._unit.members:
                values = self._read(array, 0, array.count)
                with archive.open(_entry(array), "w") as entry:
                    entry.write(_npy_header(array))
                    entry.write(values.reshape(-1).view(np.uint8).data)
        return self._block(0, np.frombuffer(out.getbuffer(), np.uint8), [out.tell()], {})

    def fields(self, maker: FieldRecords, first: int, count: int) -> Iterator[SampleBlock]:
        """Yield windows of samples whose fields are rows, or whole arrays."""
        make = partial(self._field_block, maker)
        starts = _unit_starts(self._unit, self._buffer_bytes, first, first + count).tolist()
        for start, end in pairwise([*starts, first + count]):
            if not self._passes(end - start):
                yield from self._parts(start, end - start, make)

    def _field_block(self, maker: FieldRecords, first: int, count: int) -> SampleBlock:
        """Return a window of samples with fields."""
        values = {
            name: self._field_values(array, first, count)
            for name, array in zip(self._unit.fields, self._unit.members, strict=True)
        }
        where = f"import {self._path}"
        records = [
            maker.make(
                path, {name: found[i] for name, found in values.items()}, f"{where}: {show(path)}"
            )
            for i, path in enumerate(self._sample_paths(first, count))
        ]
        block = make_block(records, where)
        return replace(block, attributes={**block.attributes, **self._columns(first, count)})

    def _field_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[Any]:
        """Return the values of a field: rows of an array, or the whole array as the only one."""
        where = self._where(array, first, count)
        if array.kind != "fixed":
            with reading(where):
                values = self._file.read_values(array, first, count)
                if array.kind == "text":
                    return [_text(value) for value in values]
                return [np.ascontiguousarray(value, array.dtype).reshape(-1) for value in values]
        rows = self._read(array, first, count if self._unit.rows else array.count)
        if self._unit.rows:
            found = [rows[i : i + 1].reshape(array.row_shape) for i in range(count)]
        else:
            found = [rows.reshape(array.shape)]
        is_string = not found[0].ndim and array.dtype.kind in "SU"
        return [value.item() for value in found] if is_string else found

    def _fixed(self, array: ArrayInfo, first: int, count: int) -> SampleBlock:
        """Return a window of rows of one size, or of the whole array as one sample."""
        shape = array.row_shape if self._unit.rows else array.shape
        samples = count if self._unit.rows else 1
        rows = self._read(array, first, count)
        data = rows.reshape(-1).view(np.uint8) if rows.nbytes else np.empty(0, np.uint8)
        lengths = [rows.nbytes // samples] * samples
        return self._block(first, data, lengths, _form(array, shape, samples))

    def _ragged(self, array: ArrayInfo, first: int, count: int) -> SampleBlock:
        """Read rows of any length, and return them as a window."""
        where = self._where(array, first, count)
        with reading(where):
            values = self._file.read_values(array, first, count)
            items = [_item(value, array.dtype) for value in values]
        form = _form(array, (0,), count)
        form[SHAPE_COLUMN][:] = [str(item.size) for item in items]
        parts = [item.view(np.uint8) for item in items]
        return self._block(first, np.concatenate(parts), list(map(len, parts)), form)

    def _block(
        self, first: int, data: Bytes, lengths: Sequence[int], columns: Mapping[str, Array]
    ) -> SampleBlock:
        """Return samples that lie one after the other in memory; some columns describe them."""
        sizes = np.array(lengths, np.int64)
        paths = self._sample_paths(first, len(sizes))
        columns = {**columns, **self._columns(first, len(sizes))}
        return SampleBlock(paths, data, np.cumsum(sizes) - sizes, sizes, columns)

    def _read(self, array: ArrayInfo, first: int, count: int) -> Array:
        """Return rows of a fixed array."""
        return self._whole.rows(self._path, array, first, count, partial(self._read_rows, array))

    def _read_rows(self, array: ArrayInfo, first: int, count: int) -> Array:
        """Read rows of a fixed array, zeroed before: a library may leave parts as they are."""
        rows = np.zeros((count, *array.row_shape), array.dtype)
        if rows.size:
            with reading(self._where(array, first, count)):
                self._file.read(array, first, rows)
        return rows

    def _columns(self, first: int, count: int) -> dict[str, Array]:
        return {
            name: self._column(array, first, count, self._column_types[name])
            for name, array in self._unit.attributes.items()
        }

    def _column(self, array: ArrayInfo, first: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return the values of an attribute for some samples; a single value is repeated."""
        single = math.prod(array.shape) == 1 and self._unit.count != 1
        first, rows = (0, 1) if single else (first, count)
        if array.kind == "text":
            with reading(self._where(array, first, rows)):
                texts = [_text(value) for value in self._file.read_values(array, first, rows)]
            values: Array = np.array(texts, object)
        else:
            read = self._read(array, first, rows).reshape(rows)
            with reading(self._where(array, first, rows)):
                if dtype.hasobject:
                    values = np.array([_text(value) for value in read.tolist()], object)
                else:
                    values = read.astype(dtype)
        return np.repeat(values, count) if single else values

    def _sample_paths(self, first: int, count: int) -> list[bytes]:
        unit = self._unit
        if not unit.rows:
            return [unit.path]
        digits = row_digits(unit.count)
        return [b"%b/%0*d" % (unit.path, digits, row) for row in range(first, first + count)]

    def _where(self, array: ArrayInfo, first: int, count: int) -> str:
        name = f"{self._path}: {array.name}" if array.name else self._path
        return f"{name}, rows {first}..{first + count - 1}" if array.shape else name


def windows(
    array: ArrayInfo, buffer_bytes: int, first: int = 0, rows: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the windows of an array as (first row, number of rows); they end where chunks end.

    Args:
        array: array with a first axis.
        buffer_bytes: size that a window should fit, unless its chunks are larger.
        first: number of the first row to read, that of a window.
        rows: number of rows to read; by default all from the first one on.
    """
    count = _window_rows(array, buffer_bytes)
    end = array.count if rows is None else first + rows
    for start in range(first, end, count):
        yield start, min(count, end - start)


def _window_rows(array: ArrayInfo, buffer_bytes: int) -> int:
    """Return the number of rows in a window of an array; see ``windows``."""
    row_bytes = max(1, array.row_bytes)
    count = min(buffer_bytes // row_bytes, BLOCK_SAMPLES_MAX)
    if array.kind != "fixed":
        count = RAGGED_ROWS
    band = min(array.chunk_rows, array.count)
    if count < band and band * row_bytes <= WINDOW_BYTES_MAX and band <= WINDOW_ROWS_MAX:
        count = band
    elif count > band > 1:
        count -= count % band
    return max(1, count)


def _unit_starts(unit: Unit, size_bytes: int, first: int, end: int) -> Int64Array:
    """Return the first row of each window in which samples of a unit are read together.

    Args:
        unit: a unit; if it is one sample, that has the number 0.
        size_bytes: size that a window should fit, unless chunks are larger.
        first: number of the first sample, that of a window.
        end: number of the sample behind the last one.
    """
    members = unit.members
    if not unit.rows:
        return np.zeros(1, np.int64)
    fixed = [array for array in members if array.kind == "fixed"]
    # Smaller arrays are in memory as a whole if their chunks are longer.
    large = [array for array in fixed if array.size_bytes > WHOLE_BYTES_MAX // 4] or members
    shape = members[0].count, sum(array.row_bytes for array in fixed)
    chunk_rows = max(array.chunk_rows for array in large)
    count = _window_rows(ArrayInfo("", np.dtype(np.uint8), shape, chunk_rows), size_bytes)
    step = count if len(fixed) == len(members) else min(count, RAGGED_ROWS)
    starts = np.arange(first, end, count)[:, None] + np.arange(0, count, step)
    return starts[starts < end]


def _row_bytes(unit: Unit) -> int:
    """Return the bytes of a sample of a unit; those of a row of any length are not known."""
    if not unit.rows:
        return sum(array.size_bytes for array in unit.members)
    return sum(
        array.row_bytes if array.kind == "fixed" else PART_BYTES // RAGGED_ROWS
        for array in unit.members
    )


class _WholeArrays:
    """Arrays that were read as a whole, because parts of their chunks are read one by one."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], Array | None] = {}
        self._free_bytes = WHOLE_BYTES_MAX

    def rows(
        self, path: str, array: ArrayInfo, first: int, count: int, read: Callable[[int, int], Array]
    ) -> Array:
        """Return rows of a fixed array.

        Args:
            path: path of its file.
            array: the array.
            first: number of the first row.
            count: number of rows.
            read: function that reads some rows: number of the first, and how many.
        """
        key = path, array.name
        if key not in self._arrays:
            end, chunk_rows = first + count, max(1, array.chunk_rows)
            is_part = first % chunk_rows or (end % chunk_rows and end < array.count)
            if not is_part or count > chunk_rows or array.size_bytes > self._free_bytes:
                return read(first, count)
            try:
                self._arrays[key] = read(0, array.count)
                self._free_bytes -= array.size_bytes
            except (*RecordError, DeviceError):  # some of its rows may be sound
                self._arrays[key] = None
        whole = self._arrays[key]
        return read(first, count) if whole is None else whole[first : first + count]


def _fields_bytes(units: Sequence[Unit], types: Mapping[str, FieldType]) -> int | None:
    """Return the size of samples with fields in bytes; None if only reading them gives it."""
    total = 0
    for unit in units:
        end = 0
        for name, array in zip(unit.fields, unit.members, strict=True):
            if types[name].kind != "array" or array.kind != "fixed":
                return None
            alignment = types[name].alignment_bytes
            size = array.row_bytes if unit.rows else array.size_bytes
            end = -(-end // alignment) * alignment + size
        total += end * unit.count
    return total


def _sample_bytes(unit: Unit) -> int:
    """Return the bytes that libraries decode together for a sample of a unit: whole chunks."""
    return sum(
        min(array.size_bytes, max(1, array.chunk_rows) * array.row_bytes)
        if unit.rows
        else array.size_bytes
        for array in unit.members
    )


# ---- NPZ archives --------------------------------------------------------------------------------


def archive_bytes(members: Sequence[ArrayInfo]) -> int:
    """Return the size of a group's NPZ archive in bytes; the arrays' names count too."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for array in members:
            archive.open(_entry(array), "w").close()
    headers = sum(len(_npy_header(array)) for array in members)
    return len(out.getbuffer()) + headers + sum(array.size_bytes for array in members)


def _group_bytes(path: str, unit: Unit) -> int:
    """Return the size of a group's NPZ archive, after a check of the limit."""
    size = archive_bytes(unit.members)
    if size > GROUP_BYTES_MAX:
        raise LimitError(
            f"import {path}: {show(unit.path)}: expected at most {GROUP_BYTES_MAX} bytes in a "
            f"group, got {size}; take arrays or rows as samples"
        )
    return size


def _entry(array: ArrayInfo) -> zipfile.ZipInfo:
    return zipfile.ZipInfo((posixpath.basename(array.name) or "data") + ".npy")


def _npy_header(array: ArrayInfo) -> bytes:
    out = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    np.lib.format.write_array_header_2_0(out, description)
    return out.getvalue()


# ---- values --------------------------------------------------------------------------------------


def _form(array: ArrayInfo, shape: tuple[int, ...], count: int) -> dict[str, Array]:
    """Return the columns for type and shape; empty texts if the type cannot be recorded."""
    if is_element(array.dtype) and len(shape) <= DIMENSIONS_MAX:
        return array_attributes(array.dtype, shape, count)
    return {name: np.full(count, "", object) for name in (DTYPE_COLUMN, SHAPE_COLUMN)}


def _item(value: object, dtype: np.dtype[Any]) -> Array:
    """Return a row of any length as a vector."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype).reshape(-1)
    raise TypeError(f"expected rows of bytes, text or vectors, got {type(value).__name__}")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    raise TypeError(f"expected text, got {type(value).__name__}")
