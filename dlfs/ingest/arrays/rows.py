"""Arrays as samples: one source for every format that keeps n-dimensional arrays.

What a sample is, is chosen:

- ``rows``: each row along the first axis, ``images/00000042``. Rows are numbered with eight digits,
  more for longer arrays, so that the order of paths is that of rows.
- ``arrays``: each array as a whole, by its name, ``images``.
- ``groups``: the arrays of each group together, as an NPZ archive (uncompressed) that
  ``numpy.load`` reads, by the group's name.

Several files put their names without suffix before it, ``run7/images/00000042``; so does an array
or a group that has no name of its own. Bytes are taken as they are stored, in C order and in the
array's own byte order; ``dlfs:dtype`` and ``dlfs:shape`` record what they mean, and are empty for
structures, whose fields a type in one word does not tell.

Other arrays may be attributes of the samples: of one value for each row, or a single one for all of
them. Beside a whole array or a group it is a single value.

All files are looked at first, which finds what can be found beforehand, then closed. Reading goes
through each array from its first row to its last, in windows that end where its chunks end, so that
each chunk is decompressed once; ``shuffled`` draws the order of the arrays from the seed, and the
writer shuffles their samples. Memory: the two buffers of ``read_ahead``, and for chunks that
hold more than a buffer twice ``WINDOW_BYTES_MAX``; a band of chunks over that is decompressed again
for each window. A larger sample takes memory of its own.
"""

from __future__ import annotations

import errno
import io
import math
import posixpath
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.errors import DeviceError, LimitError
from dlfs.ingest.arrays.description import array_attributes
from dlfs.ingest.arrays.file import (
    ArrayFile,
    ArrayInfo,
    Opener,
    Samples,
    parse_attributes,
    reading,
)
from dlfs.ingest.arrays.plan import ROW_DIGITS_MIN, Plan, Unit, state_of
from dlfs.ingest.order import packing_order
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    BUFFER_BYTES,
    SampleBlock,
    Source,
    read_ahead,
    show,
    source_name,
)
from dlfs.reader.arrays import DIMENSIONS_MAX, DTYPE_COLUMN, KINDS, SHAPE_COLUMN
from dlfs.units import GIB, MIB

WINDOW_BYTES_MAX = 256 * MIB
"""What is read at once of chunks that hold more than a buffer."""

WINDOW_ROWS_MAX = 1 << 20

RAGGED_ROWS = 64
"""Rows of any length that are read at once."""

GROUP_BYTES_MAX = 2 * GIB
"""A group as one sample: larger archives have other headers."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Samples that are read together."""

    paths: list[bytes]
    lengths: npt.NDArray[np.int64]
    read: Callable[[npt.NDArray[np.uint8]], None]
    """Reads them one behind the other into a buffer of just their size."""
    attributes: Mapping[str, npt.NDArray[Any]]


class ArraySource(Source):
    """The arrays of some files of one format.

    Args:
        paths: of the files, which exist.
        opener: opens one of them.
        select: patterns (as ``fnmatch``) of the arrays to take; none for all but attributes.
        samples: what is a sample: ``rows``, ``arrays`` or ``groups``.
        attributes: ``NAME=ARRAY``, or ``ARRAY``: one beside the samples' own, or, with ``/`` before
            it, from the top of its file.
        buffer_bytes: of each of the two buffers.

    Raises:
        UsageError: nothing matches, two files have the same name, or an attribute does not fit.
        NotFoundError: a file is not there.
        FormatError: a file is damaged, or a name in it cannot be a path.
        DeviceError: a file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[str],
        opener: Opener,
        *,
        select: Sequence[str] = (),
        samples: Samples = "rows",
        attributes: Sequence[str] = (),
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._paths = list(paths)
        self._opener = opener
        self._buffer_bytes = buffer_bytes
        plan = Plan(self._paths, select, samples, parse_attributes(attributes))
        for index, path in enumerate(self._paths):
            with reading(path):
                file = opener(path)
            with closing(file):
                plan.add(index, file)
        self._units, self._column_types = plan.finish()
        self._states = plan.states
        self._skipped = dict(plan.skipped)
        self._makes_archives = samples == "groups"
        for unit in self._units if self._makes_archives else []:
            _check_group(self._paths[unit.file], unit)

    @property
    def name(self) -> str:
        """Path of the file, or of the first and the last."""
        return source_name(self._paths)

    @property
    def skipped(self) -> Mapping[str, int]:
        """Arrays left out, by reason."""
        return self._skipped

    @property
    def sample_count(self) -> int:
        """Samples in all files."""
        return sum(unit.count for unit in self._units)

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of all samples; None where rows are of any length."""
        if any(unit.members[0].kind != "fixed" for unit in self._units):
            return None
        if self._makes_archives:
            return sum(archive_bytes(unit.members) for unit in self._units)
        return sum(unit.members[0].size_bytes for unit in self._units)

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every sample once; see ``Source.blocks``.

        Raises:
            FormatError: a file is damaged.
            DeviceError: a file cannot be read, or changed meanwhile.
        """
        with closing(self._pieces(self._order(layout, seed))) as pieces:
            yield from read_ahead(_Filler(pieces), buffer_bytes=self._buffer_bytes)

    def _order(self, layout: Layout, seed: int) -> list[Unit]:
        """File by file, each opened once: in path order, or files and their units as drawn."""
        units = packing_order(len(self._units), layout=layout, seed=seed).tolist()
        chosen = [self._units[index] for index in units]
        if layout == "shuffled":
            places = packing_order(len(self._paths), layout=layout, seed=seed).tolist()
            chosen.sort(key=lambda unit: places[unit.file])
        return chosen

    def _pieces(self, units: Sequence[Unit]) -> Generator[_Piece, None, None]:
        """Everything, unit by unit; a file stays open while its units follow each other."""
        position = 0
        while position < len(units):
            index = units[position].file
            path = self._paths[index]
            with reading(path):
                file = self._opener(path)
            with closing(file):
                while position < len(units) and units[position].file == index:
                    reader = _UnitReader(
                        path, file, units[position], self._column_types, self._buffer_bytes
                    )
                    reader.check()
                    yield from reader.groups() if self._makes_archives else reader.pieces()
                    position += 1
            if state_of(path) != self._states[index]:
                raise DeviceError(
                    f"import {path}: the file changed during the import", errno.ESTALE
                )


class _UnitReader:
    """Reads one unit of an open file."""

    def __init__(
        self,
        path: str,
        file: ArrayFile,
        unit: Unit,
        column_types: Mapping[str, np.dtype[Any]],
        buffer_bytes: int,
    ) -> None:
        self._path = path
        self._file = file
        self._unit = unit
        self._column_types = column_types
        self._buffer_bytes = buffer_bytes

    def check(self) -> None:
        """Raise DeviceError when an array is no longer what it was."""
        for array in self._unit.members:
            if self._file.arrays.get(array.name) != array:
                raise DeviceError(
                    f"import {self._path}: {array.name or 'the array'} changed during the import",
                    errno.ESTALE,
                )

    def pieces(self) -> Iterator[_Piece]:
        """The rows of an array, or all of it."""
        array = self._unit.members[0]
        if not self._unit.rows:
            yield self._fixed(array, 0, array.count)
            return
        for first, count in windows(array, self._buffer_bytes):
            if array.kind == "fixed":
                yield self._fixed(array, first, count)
            else:
                yield self._ragged(array, first, count)

    def groups(self) -> Iterator[_Piece]:
        """A group as an NPZ archive."""
        unit = self._unit

        def read(buffer: npt.NDArray[np.uint8]) -> None:
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as archive:
                for array in unit.members:
                    values = np.empty((array.count, *array.row_shape), array.dtype)
                    self._read(array, 0, values)
                    with archive.open(_entry(array), "w") as entry:
                        entry.write(_npy_header(array))
                        entry.write(values.reshape(-1).view(np.uint8).data)
            buffer[:] = np.frombuffer(out.getbuffer(), np.uint8)

        lengths = np.array([archive_bytes(unit.members)], np.int64)
        yield _Piece([unit.path], lengths, read, self._columns(0, 1))

    def _fixed(self, array: ArrayInfo, first: int, count: int) -> _Piece:
        """Rows of one size, or the array as one sample."""
        shape = array.row_shape if self._unit.rows else array.shape
        samples = count if self._unit.rows else 1
        size = math.prod(shape) * array.dtype.itemsize

        def read(buffer: npt.NDArray[np.uint8]) -> None:
            target = buffer
            if buffer.ctypes.data % max(1, array.dtype.alignment):
                target = np.empty(buffer.size, np.uint8)
            rows = np.ndarray((count, *array.row_shape), array.dtype, target.data)
            self._read(array, first, rows)
            if target is not buffer:
                buffer[:] = target

        return _Piece(
            self._sample_paths(first, samples),
            np.full(samples, size, np.int64),
            read,
            {**_form(array, shape, samples), **self._columns(first, samples)},
        )

    def _ragged(self, array: ArrayInfo, first: int, count: int) -> _Piece:
        """Rows of any length, which only reading them tells."""
        where = self._where(array, first, count)
        with reading(where):
            values = self._file.read_values(array, first, count)
            items = [_item(value, array.dtype) for value in values]
        lengths = np.array([item.nbytes for item in items], np.int64)
        data = np.concatenate([item.view(np.uint8) for item in items])
        form = _form(array, (0,), count)
        form[SHAPE_COLUMN][:] = [str(item.size) for item in items]
        return _Piece(
            self._sample_paths(first, count),
            lengths,
            partial(_copy, data),
            {**form, **self._columns(first, count)},
        )

    def _read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        if out.size:
            with reading(self._where(array, first, len(out))):
                self._file.read(array, first, out)

    def _columns(self, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        return {
            name: self._column(array, first, count, self._column_types[name])
            for name, array in self._unit.attributes.items()
        }

    def _column(
        self, array: ArrayInfo, first: int, count: int, dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """The values of an attribute for some samples; a single one is repeated."""
        single = math.prod(array.shape) == 1 and self._unit.count != 1
        first, rows = (0, 1) if single else (first, count)
        if array.kind == "text":
            with reading(self._where(array, first, rows)):
                texts = [_text(value) for value in self._file.read_values(array, first, rows)]
            values: npt.NDArray[Any] = np.array(texts, object)
        else:
            read = np.empty((rows, *array.row_shape), array.dtype)
            self._read(array, first, read)
            read = read.reshape(rows)
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
        digits = max(ROW_DIGITS_MIN, len(str(unit.count - 1)))
        return [b"%b/%0*d" % (unit.path, digits, row) for row in range(first, first + count)]

    def _where(self, array: ArrayInfo, first: int, count: int) -> str:
        name = f"{self._path}: {array.name}" if array.name else self._path
        return f"{name}, rows {first}..{first + count - 1}" if array.shape else name


class _Filler:
    """Makes blocks of pieces, for ``read_ahead``."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._next = next(pieces, None)

    def __call__(self, buffer: npt.NDArray[np.uint8]) -> SampleBlock | None:
        """Fill a buffer with as many pieces as fit; one that is larger gets memory of its own."""
        taken: list[_Piece] = []
        used = samples = 0
        while self._next is not None:
            piece = self._next
            size = int(piece.lengths.sum())
            full = size > len(buffer) - used or samples + len(piece.paths) > BLOCK_SAMPLES_MAX
            if taken and full:
                break
            if size > len(buffer):
                buffer = np.empty(size, np.uint8)
            piece.read(buffer[used : used + size])
            taken.append(piece)
            used += size
            samples += len(piece.paths)
            self._next = next(self._pieces, None)
        return _block(taken, buffer) if taken else None


def _block(pieces: Sequence[_Piece], buffer: npt.NDArray[np.uint8]) -> SampleBlock:
    lengths = np.concatenate([piece.lengths for piece in pieces])
    return SampleBlock(
        [path for piece in pieces for path in piece.paths],
        buffer,
        np.cumsum(lengths) - lengths,
        lengths,
        {
            name: np.concatenate([piece.attributes[name] for piece in pieces])
            for name in pieces[0].attributes
        },
    )


def windows(array: ArrayInfo, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """The (first row, number of rows) that are read together; they end where chunks end.

    Args:
        array: with a first axis.
        buffer_bytes: what a window should fit, unless its chunks hold more.
    """
    row_bytes = max(1, array.row_bytes)
    count = min(buffer_bytes // row_bytes, BLOCK_SAMPLES_MAX)
    if array.kind != "fixed":
        count = RAGGED_ROWS
    band = min(array.chunk_rows, array.count)
    if count < band and band * row_bytes <= WINDOW_BYTES_MAX and band <= WINDOW_ROWS_MAX:
        count = band
    elif count > band > 1:
        count -= count % band
    count = max(1, count)
    for first in range(0, array.count, count):
        yield first, min(count, array.count - first)


# ---- NPZ archives --------------------------------------------------------------------------------


def archive_bytes(members: Sequence[ArrayInfo]) -> int:
    """The size of the archive that a group becomes: beside the arrays, names decide it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for array in members:
            archive.open(_entry(array), "w").close()
    headers = sum(len(_npy_header(array)) for array in members)
    return len(out.getbuffer()) + headers + sum(array.size_bytes for array in members)


def _check_group(path: str, unit: Unit) -> None:
    size = archive_bytes(unit.members)
    if size > GROUP_BYTES_MAX:
        raise LimitError(
            f"import {path}: {show(unit.path)}: expected at most {GROUP_BYTES_MAX} bytes in a "
            f"group, got {size}; take arrays or rows as samples"
        )


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


def _form(array: ArrayInfo, shape: tuple[int, ...], count: int) -> dict[str, npt.NDArray[Any]]:
    """What the bytes of samples are; nothing where their type cannot be recorded."""
    if array.dtype.kind in KINDS and array.dtype.itemsize and len(shape) <= DIMENSIONS_MAX:
        return array_attributes(array.dtype, shape, count)
    return {name: np.full(count, "", object) for name in (DTYPE_COLUMN, SHAPE_COLUMN)}


def _item(value: object, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A row of any length as a vector."""
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


def _copy(data: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    target[:] = data
