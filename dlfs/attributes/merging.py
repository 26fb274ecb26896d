"""Makes the columns of a dataset out of stored ones, in the order in which samples are merged.

Columns of fixed width are written where they stay; strings are collected as
``AttributesBuilder`` collects them. Of the stored columns, a range is in memory at a time.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.attributes.builder import StringColumn, encode_parts, pack_strings
from dlfs.attributes.stored import StoredColumns
from dlfs.errors import FormatError, UsageError
from dlfs.format.attributes import ColumnForm, Strings, blocks_up

Columns = Mapping[str, np.dtype[Any]]
"""Dtype of each column as it is stored, by name; ``object`` for strings."""


_NO_STRINGS = Strings(np.zeros(1, np.uint64), np.empty(0, np.uint8))


class _Piece(NamedTuple):
    """Consecutive samples of one source that are among those of a merged block."""

    source: int
    first: int
    last: int


class MergedColumns:
    """The columns of merged samples.

    Args:
        sources: columns of each source.
        counts: number of samples of each source.
        columns: columns that the merged samples have; a source may lack some.
        defaults: value of samples of sources that lack a column, by its name; otherwise NaN, 0,
            False or "".
        constants: columns of strings that have one value for all samples, which is used instead
            of the stored ones.

    Raises:
        UsageError: a column has another type in a source.
    """

    def __init__(
        self,
        sources: Sequence[StoredColumns],
        counts: Sequence[int],
        columns: Columns,
        *,
        defaults: Mapping[str, Any],
        constants: Mapping[str, str],
    ) -> None:
        self._starts = np.cumsum([0, *counts])[:-1].astype(np.uint64)
        count = sum(counts)
        self._columns: list[_Fixed | _Strings] = []
        for name, dtype in columns.items():
            if dtype.kind == "O":
                default = constants.get(name, defaults.get(name, ""))
                having = [] if name in constants else sources
                self._columns.append(_Strings(name, having, default))
            else:
                empty = np.nan if dtype.kind == "f" else 0
                made = _Fixed(name, dtype, count, sources, defaults.get(name, empty))
                self._columns.append(made)
        self._count = count

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    def append(self, rows: NDArray[np.uint64]) -> None:
        """Append the values of merged samples.

        Args:
            rows: number of each sample among those of all sources one after the other,
                ``uint64[n]``; those of each source rise without a gap over all calls.
        """
        if not self._columns or not len(rows):
            return
        sources = (np.searchsorted(self._starts, rows, side="right") - 1).astype(np.uint16)
        places = None
        if sources[0] != sources[-1] or int(rows[-1] - rows[0]) != len(rows) - 1:
            places = np.argsort(sources, kind="stable")
            rows, sources = rows[places], sources[places]
        cuts = [0, *(np.flatnonzero(sources[1:] != sources[:-1]) + 1).tolist(), len(rows)]
        pieces = []
        for begin, end in pairwise(cuts):
            source = int(sources[begin])
            first = int(rows[begin] - self._starts[source])
            pieces.append(_Piece(source, first, first + end - begin))
        for column in self._columns:
            column.append(pieces, places)

    def freeze(self, dataset_uuid: UUID) -> list[NDArray[np.uint8]]:
        """Encode the segment as consecutive parts, as ``AttributesBuilder.freeze`` does."""
        made = []
        while self._columns:
            made.append(self._columns.pop(0).encode())
        return encode_parts(dataset_uuid, self._count, made)


def check_columns(name: str, expected: Columns, got: Columns) -> None:
    """Check that columns of one name have one type.

    Raises:
        UsageError: they have not.
    """
    for column in expected.keys() & got.keys():
        if expected[column] != got[column]:
            types = [
                "strings" if dtype.kind == "O" else str(dtype)
                for dtype in (expected[column], got[column])
            ]
            raise UsageError(f"{name}: expected attribute {column!r} of {types[0]}, got {types[1]}")


def _in_order(values: Iterable[NDArray[Any]], places: NDArray[np.intp] | None) -> NDArray[Any]:
    """Return values of pieces in merged order: value k belongs to the sample at places[k]."""
    together = np.concatenate(list(values))
    if places is None:
        return together
    ordered = np.empty_like(together)
    ordered[places] = together
    return ordered


class _Fixed:
    """A column of fixed width, in the memory that is written to the volume."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype[Any],
        count: int,
        sources: Sequence[StoredColumns],
        default: Any,
    ) -> None:
        self._form = ColumnForm(name, dtype.newbyteorder("=").name)
        self._sources = sources
        self._default = default
        self._memory = np.zeros(blocks_up(count * dtype.itemsize), np.uint8)
        self._values = self._memory[: count * dtype.itemsize].view(dtype)
        self._done = 0

    def append(self, pieces: Sequence[_Piece], places: NDArray[np.intp] | None) -> None:
        values = _in_order(map(self._read, pieces), places)
        self._values[self._done : self._done + len(values)] = values
        self._done += len(values)

    def _read(self, piece: _Piece) -> NDArray[Any]:
        source = self._sources[piece.source]
        if self._form.name not in source.columns:
            return np.full(piece.last - piece.first, self._default, self._values.dtype)
        found = source.read(self._form.name, piece.first, piece.last).fixed
        assert found is not None
        return found

    def encode(self) -> tuple[ColumnForm, NDArray[np.uint8]]:
        return self._form, self._memory


class _Strings:
    """A column of strings."""

    def __init__(self, name: str, sources: Sequence[StoredColumns], default: str) -> None:
        self._name = name
        self._sources = sources
        self._column = StringColumn()
        self._known = [
            source.dictionary(name) if name in source.columns else [default] for source in sources
        ] or [[default]]
        """Strings of each source's dictionary; the default of a source without the column."""
        self._codes = [self._column.register(strings) for strings in self._known]
        """Code in the new column of each of these."""

    def append(self, pieces: Sequence[_Piece], places: NDArray[np.intp] | None) -> None:
        read = [(self._number(piece), self._read(piece)) for piece in pieces]
        if not self._column.has_dictionary:
            self._append_text(read, places)
            return
        codes = [self._codes[n][part] for n, part in read if not isinstance(part, Strings)]
        if len(codes) == len(read):
            self._column.append_codes(_in_order(codes, places))
        else:
            values = _in_order((self._decoded(number, part) for number, part in read), places)
            self._column.append(values.tolist())

    def _number(self, piece: _Piece) -> int:
        return piece.source if self._sources else 0

    def _read(self, piece: _Piece) -> NDArray[Any] | Strings:
        """Return the indices of a piece in the strings known of its source, or its strings."""
        if not self._sources or self._name not in self._sources[piece.source].columns:
            return np.zeros(piece.last - piece.first, np.uint8)
        found = self._sources[piece.source].read(self._name, piece.first, piece.last)
        return found.codes if found.codes is not None else (found.strings or _NO_STRINGS)

    def _decoded(self, number: int, part: NDArray[Any] | Strings) -> NDArray[Any]:
        if not isinstance(part, Strings):
            known: NDArray[Any] = np.array(self._known[number], object)[part]
            return known
        ends, text = part.offsets.tolist(), part.text.tobytes()
        values = np.empty(len(part), object)
        try:
            values[:] = [text[a:b].decode() for a, b in pairwise(ends)]
        except UnicodeDecodeError as error:
            raise FormatError(f"read column {self._name!r}: {error}") from error
        return values

    def _append_text(
        self,
        read: Sequence[tuple[int, NDArray[Any] | Strings]],
        places: NDArray[np.intp] | None,
    ) -> None:
        texts, starts, lengths, base = [], [], [], 0
        for number, part in read:
            strings = part
            if not isinstance(strings, Strings):
                strings = pack_strings([value.encode() for value in self._known[number]])
            begin, size = strings.offsets[:-1].astype(np.int64), np.diff(strings.offsets)
            chosen = slice(None) if isinstance(part, Strings) else part
            starts.append(begin[chosen] + base)
            lengths.append(size[chosen].astype(np.int64))
            texts.append(strings.text)
            base += strings.text.size
        sizes, text = _in_order(lengths, places), np.concatenate(texts)
        ends = np.cumsum(sizes)
        first = _in_order(starts, places) - (ends - sizes)
        gathered = text[np.arange(int(ends[-1])) + np.repeat(first, sizes)]
        self._column.append_text(gathered, sizes.astype(np.uint64))

    def encode(self) -> tuple[ColumnForm, NDArray[np.uint8]]:
        return self._column.encode(self._name, None)
