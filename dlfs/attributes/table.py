"""The columns of a sealed dataset, by index.

A table has its head from the start and loads a column's bytes on the first use of the column: from
the volume, from memory shared with other processes, or from a buffer with the whole segment.
Columns of fixed width are views of these bytes, which must not change.

Threads: any at once; ``close`` by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes.vectors import component_of, find_vectors, vector_dtype
from dlfs.base.distinct import number_distinct
from dlfs.base.forks import Lock
from dlfs.base.wording import list_names, show_value
from dlfs.directory import check_indices
from dlfs.errors import FormatError, NotFoundError, UsageError
from dlfs.format.attributes import (
    AttributeHead,
    ColumnForm,
    ColumnValues,
    Strings,
    decode_head,
    view_column,
)
from dlfs.format.constants import ATTRIBUTE_BLOCK_BYTES

if TYPE_CHECKING:
    import pyarrow

Bytes = NDArray[np.uint8]


class AttributeTable:
    """All columns of one dataset.

    Args:
        head: describes the columns.
        load: returns the bytes of a column by its number, verified and as long as its extent;
            called once for each column, and again only after it raised.
        where: name of the segment in errors.
        release: called once by ``close``.
    """

    def __init__(
        self,
        head: AttributeHead,
        load: Callable[[int], Bytes],
        *,
        where: str = "the attributes",
        release: Callable[[], None] | None = None,
    ) -> None:
        self.head = head
        self._load = load
        self._where = where
        self._release = release
        self._vectors = find_vectors(head.columns)
        self._numbers = {column.name: number for number, column in enumerate(head.columns)}
        self._values: dict[int, ColumnValues] = {}
        self._dictionaries: dict[str, NDArray[Any]] = {}
        self._parsed: dict[str, NDArray[Any]] = {}
        self._loading = Lock()

    @classmethod
    def empty(cls, dataset_uuid: UUID, sample_count: int) -> Self:
        """Return the table of a dataset without columns."""
        head = AttributeHead(dataset_uuid, sample_count, (), np.empty(0, np.uint32))
        return cls(head, lambda _number: np.empty(0, np.uint8))

    @classmethod
    def of_parts(cls, parts: Sequence[Bytes]) -> Self:
        """Return the table of what ``AttributesBuilder.freeze`` has encoded; borrows its memory."""
        head = decode_head(parts[0], "the attributes")
        return cls(head, lambda number: parts[1 + number][: head.extent(number)[1]])

    @classmethod
    def over(
        cls, segment: Bytes, head_bytes: int, *, where: str = "the attributes", verify: bool = True
    ) -> Self:
        """Make the table of a segment in memory.

        Args:
            segment: uint8[n_bytes], aligned to 8 bytes; borrowed, and not to be changed.
            head_bytes: length of its head.
            where: name of the segment in errors.
            verify: check each column when it is first asked for.

        Raises:
            FormatError: it is malformed.
        """
        head = decode_head(segment[:head_bytes], where)
        if head.segment_bytes > segment.size:
            raise FormatError(
                f"{where}: read attributes: expected {head.segment_bytes} bytes, got {segment.size}"
            )
        return cls(head, partial(_cut, segment, head, where if verify else None), where=where)

    def __len__(self) -> int:
        """Return the number of samples, which is that of the values of each column."""
        return self.head.sample_count

    def __contains__(self, name: object) -> bool:
        return name in self._numbers or name in self._vectors

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """The dtype of each column as ``column`` returns it, by name.

        It is ``object`` for strings. A column of vectors has a dtype with a ``shape``, and its
        components are not listed.
        """
        stored = {column.name: column.dtype for column in self.head.columns}
        found: dict[str, np.dtype[Any]] = {}
        for name, dtype in stored.items():
            component = component_of(name)
            if component is None or name not in self._vectors.get(component[0], ()):
                found[name] = dtype
            elif component[1] == 0:
                found[component[0]] = vector_dtype(dtype, len(self._vectors[component[0]]))
        return found

    def form(self, name: str) -> ColumnForm:
        """Return how a column is stored.

        Raises:
            NotFoundError: there is no such column.
        """
        return self.head.columns[self._number(name)]

    def column_bytes(self, name: str) -> int:
        """Return the size of a column in bytes, all of which its first use loads.

        Raises:
            NotFoundError: there is no such column.
        """
        parts = self._vectors.get(name, [name])
        return sum(self.head.extent(self._number(part))[1] for part in parts)

    def column(self, name: str, indices: ArrayLike | None = None) -> NDArray[Any]:
        """Return a column's values.

        Args:
            name: name of the column.
            indices: indices of samples; all by default.

        Returns:
            ``dtype[n]``, read-only; strings as an ``object`` array of ``str``, made for each call.
            All values of a column of fixed width are a view. Vectors are a copy, ``dtype[n, k]``.

        Raises:
            NotFoundError: there is no such column.
            UsageError: an index is out of range.
            FormatError: the column is malformed (ChecksumError).
            DeviceError: it cannot be read.
        """
        if name in self._vectors:
            parts = [self.column(part, indices) for part in self._vectors[name]]
            vectors: NDArray[Any] = np.stack(parts, axis=1)
            vectors.flags.writeable = False
            return vectors
        chosen = None if indices is None else self._chosen(indices)
        values = self.values(name)
        if values.fixed is not None:
            if chosen is None:
                return values.fixed
            picked: NDArray[Any] = values.fixed[chosen]
        elif values.codes is not None:
            codes = values.codes if chosen is None else values.codes[chosen]
            picked = self._dictionary(name, values)[codes]
        else:
            picked = self._decoded(name, values.strings, chosen)
        picked.flags.writeable = False
        return picked

    def distinct(self, name: str, indices: ArrayLike) -> tuple[list[str], NDArray[np.intp]]:
        """Return the distinct strings among some values of a column.

        Args:
            name: name of a column of strings.
            indices: indices of samples.

        Returns:
            The strings, and for each sample which one it has, ``intp[n]``.

        Raises:
            UsageError: the column is of numbers; or as ``column``.
            NotFoundError, FormatError, DeviceError: as ``column``.
        """
        values = self._strings(name)
        chosen = self._chosen(indices)
        if values.codes is None:
            found, places = number_distinct(self.column(name, chosen))
            return found.tolist(), places
        if values.strings is not None and len(values.strings) == 1 and len(chosen):
            return self._dictionary(name, values).tolist(), np.zeros(len(chosen), np.intp)
        codes, places = number_distinct(values.codes[chosen])
        return self._dictionary(name, values)[codes].tolist(), places

    def parsed(
        self, name: str, indices: ArrayLike, parse: Callable[[list[str]], NDArray[Any]]
    ) -> NDArray[Any]:
        """Return what a function makes of the strings of some samples.

        Args:
            name: name of a column of strings.
            indices: indices of samples.
            parse: returns an array with a row for each string. It is called once for the strings of
                a dictionary, whose rows are kept; and for the strings of the samples elsewhere.

        Raises:
            UsageError: the column is of numbers; or as ``column``.
            NotFoundError, FormatError, DeviceError: as ``column``.
        """
        values = self._strings(name)
        if values.codes is None:
            return parse(self.column(name, indices).tolist())
        rows = self._parsed.get(name)
        if rows is None:
            rows = self._parsed[name] = parse(self._dictionary(name, values).tolist())
        found: NDArray[Any] = rows[values.codes[self._chosen(indices)]]
        return found

    def _strings(self, name: str) -> ColumnValues:
        """Return the values of a column of strings.

        Raises:
            UsageError: the column is of numbers.
        """
        values = self.values(name)
        if values.fixed is not None:
            raise UsageError(
                f"read column {name!r} of {self._where}: expected strings, got {values.fixed.dtype}"
            )
        return values

    def values(self, name: str) -> ColumnValues:
        """Return a column's values as they are stored: read-only views.

        Raises:
            NotFoundError, FormatError, DeviceError: as ``column``.
        """
        number = self._number(name)
        found = self._values.get(number)
        if found is not None:
            return found
        with self._loading:
            if number not in self._values:
                memory = self._load(number)
                self._values[number] = view_column(self.head, number, memory, self._where)
            return self._values[number]

    def to_arrow(self) -> pyarrow.Table:
        """Return all columns as an Arrow table; only bools and vectors are copied.

        Raises:
            UsageError: pyarrow is not installed.
            FormatError, DeviceError: as ``column``.
        """
        from dlfs.attributes.arrow import to_arrow

        columns = {
            name: self.column(name) if name in self._vectors else self.values(name)
            for name in self.dtypes
        }
        return to_arrow(columns, self._where)

    def verify(self) -> None:
        """Load every column, which checks it.

        Raises:
            FormatError, DeviceError: as ``column``.
        """
        for column in self.head.columns:
            values = self.values(column.name)
            if values.strings is not None:
                self._check_text(column.name, values.strings)

    def close(self) -> None:
        """Release the memory. Idempotent; views stay valid."""
        self._values.clear()
        self._dictionaries.clear()
        self._parsed.clear()
        release, self._release = self._release, None
        if release:
            release()

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            there = list_names(self.dtypes, wanted=str(name))
            raise NotFoundError(
                f"read column {show_value(name)} of {self._where}: no such column; "
                f"there are: {there}"
            )
        return number

    def _chosen(self, indices: ArrayLike) -> NDArray[np.uint64]:
        action = f"read a column of {self._where}"
        return check_indices(indices, len(self), option="indices", action=action)

    def _dictionary(self, name: str, values: ColumnValues) -> NDArray[Any]:
        """Return the decoded strings of a dictionary; decoded once."""
        found = self._dictionaries.get(name)
        if found is None:
            found = self._dictionaries[name] = self._decoded(name, values.strings)
        return found

    def _decoded(
        self, name: str, strings: Strings | None, chosen: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Return some strings, or all, as Python strings."""
        assert strings is not None
        if chosen is None:
            chosen = np.arange(len(strings))
        starts, ends = strings.offsets[chosen].tolist(), strings.offsets[chosen + 1].tolist()
        raw = strings.text.data
        decoded = np.empty(len(chosen), object)
        try:
            decoded[:] = [
                str(raw[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)
            ]
        except UnicodeDecodeError as error:
            raise FormatError(f"{self._where}: read column {name!r}: {error}") from error
        return decoded

    def _check_text(self, name: str, strings: Strings) -> None:
        for first in range(0, len(strings), ATTRIBUTE_BLOCK_BYTES):
            last = min(first + ATTRIBUTE_BLOCK_BYTES, len(strings))
            self._decoded(name, strings, np.arange(first, last))


class AttributesLater:
    """A table that is opened on its first use.

    Args:
        load: opens it.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, load: Callable[[], AttributeTable]) -> None:
        self._load = load
        self._table: AttributeTable | None = None
        self._loading = Lock()

    def __call__(self) -> AttributeTable:
        """Return the table; open it on the first call.

        Raises:
            DlfsError: whatever ``load`` raises.
        """
        if self._table is None:
            with self._loading:
                self._table = self._table or self._load()
        return self._table

    def close(self) -> None:
        """Close the table, if it was opened. Idempotent."""
        if self._table is not None:
            self._table.close()


def _cut(segment: Bytes, head: AttributeHead, where: str | None, number: int) -> Bytes:
    """Return a column's part of a segment, verified if ``where`` names it in errors."""
    offset, length = head.extent(number)
    memory = segment[offset : offset + length].view()
    memory.flags.writeable = False
    if where is not None:
        head.verify(number, memory, where)
    return memory
