"""The columns of a stored attribute segment, read from the first sample to the last.

A column is read in ranges of samples that only go on, so that a part of it is in memory. Of a
dictionary, the strings stay.

Threads: one at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import FormatError
from dlfs.format.attributes import ColumnForm, ColumnValues, Strings, decode_head
from dlfs.store.excerpts import Cursor, Excerpts, SegmentReader


class StoredColumns:
    """The columns of one segment.

    Args:
        reader: reads the segment, whose head begins at its first byte.
        segment_bytes: length of the segment; 0 without columns.
        head_bytes: length of its head.
        dataset_uuid: expected UUID of the dataset.
        sample_count: expected number of samples.

    Attributes:
        columns: form of each column, by name.

    Raises:
        FormatError: the head is malformed, or of other samples.
        DeviceError: a read failed.
    """

    def __init__(
        self,
        reader: SegmentReader,
        segment_bytes: int,
        head_bytes: int,
        *,
        dataset_uuid: UUID,
        sample_count: int,
    ) -> None:
        self.columns: dict[str, ColumnForm] = {}
        self._where = reader.where
        self._count = sample_count
        self._columns: dict[str, _StoredColumn] = {}
        if not segment_bytes:
            return
        excerpts = Excerpts(reader, 0, segment_bytes)
        head = None
        for number, choice in enumerate(reader.orders):
            excerpts.read(0, head_bytes, choice)
            try:
                head = decode_head(excerpts.memory[:head_bytes], self._where)
                break
            except FormatError:
                if number + 1 == len(reader.orders):
                    raise
        assert head is not None
        got = head.dataset_uuid, head.sample_count, head.segment_bytes
        if got != (dataset_uuid, sample_count, segment_bytes):
            raise FormatError(
                f"read {self._where}: expected the dataset {dataset_uuid} with {sample_count} "
                f"samples in {segment_bytes} bytes, got {got[0]} with {got[1]} in {got[2]}"
            )
        excerpts.cover(head.checksums, head_bytes)
        for number, column in enumerate(head.columns):
            self.columns[column.name] = column
            where = f"column {column.name!r} of {self._where}"
            at = head.extent(number)[0]
            self._columns[column.name] = _StoredColumn(excerpts, column, at, sample_count, where)

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column as it is stored, by name; ``object`` for strings."""
        return {name: form.dtype for name, form in self.columns.items()}

    def dictionary(self, name: str) -> list[str]:
        """Return all strings of a dictionary.

        Raises:
            FormatError, DeviceError: the column is malformed, or cannot be read.
        """
        return self._columns[name].dictionary

    def read(self, name: str, first: int, last: int) -> ColumnValues:
        """Return the values of a range of samples: views, valid until the next call.

        Those of a dictionary are indices alone.

        Raises:
            FormatError, DeviceError: the column is malformed, or cannot be read.
        """
        return self._columns[name].read(first, last)


class _StoredColumn:
    """One column: a cursor in each of its parts."""

    def __init__(
        self, excerpts: Excerpts, form: ColumnForm, at: int, count: int, where: str
    ) -> None:
        self._form = form
        self._where = where
        self._values_at = at
        self._offsets_at = at + (form.offsets_at(count) if form.is_text else 0)
        self.dictionary: list[str] = []
        end = at + form.length_bytes(count)
        if not form.is_text:
            self._item_bytes = form.dtype.itemsize
            self._values = Cursor(excerpts, at, end)
            return
        strings = form.value_count if form.index_bytes else count
        self._text_at = self._offsets_at + 8 * (strings + 1)
        self._item_bytes = form.index_bytes
        if not form.index_bytes:
            self._offsets = Cursor(excerpts, at, self._text_at)
            self._text = Cursor(excerpts, self._text_at, end)
            return
        whole = Cursor(excerpts, self._offsets_at, end).need(self._offsets_at, end)
        offsets = self._checked(whole[: 8 * (strings + 1)].view("<u8"))
        ends, text = offsets.tolist(), whole[8 * (strings + 1) :].tobytes()
        try:
            self.dictionary = [text[a:b].decode() for a, b in pairwise(ends)]
        except UnicodeDecodeError as error:
            raise FormatError(f"read {where}: {error}") from error
        self._values = Cursor(excerpts, at, self._offsets_at)

    def read(self, first: int, last: int) -> ColumnValues:
        if self._form.is_text and not self._form.index_bytes:
            start, end = self._values_at + 8 * first, self._values_at + 8 * (last + 1)
            offsets = self._checked(self._offsets.need(start, end).view("<u8"))
            begin, behind = int(offsets[0]), int(offsets[-1])
            text = self._text.need(self._text_at + begin, self._text_at + behind)
            return ColumnValues(strings=Strings(offsets - np.uint64(begin), text))
        start = self._values_at + self._item_bytes * first
        raw = self._values.need(start, self._values_at + self._item_bytes * last)
        if not self._form.is_text:
            if self._form.kind == "bool" and raw.size and raw.max() > 1:
                raise FormatError(f"read {self._where}: expected 0 or 1 in a bool")
            return ColumnValues(fixed=raw.view(self._form.dtype))
        codes = raw.view(f"<u{self._item_bytes}")
        if codes.size and codes.max() >= len(self.dictionary):
            raise FormatError(
                f"read {self._where}: expected indices below {len(self.dictionary)}, "
                f"got {codes.max()}"
            )
        return ColumnValues(codes=codes)

    def _checked(self, offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Check offsets of strings in the text, of all or of a range of them."""
        if offsets[-1] > self._form.text_bytes or np.any(offsets[1:] < offsets[:-1]):
            raise FormatError(
                f"read {self._where}: expected offsets rising up to {self._form.text_bytes}"
            )
        return offsets
