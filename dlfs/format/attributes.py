"""The attribute segment: a dataset's columns as bytes (FORMAT.md, section 6.2).

A segment is a head and then the columns, each in whole blocks. The head says which columns there
are, and has a CRC32C of every block of them; everything else about where they lie follows from it,
so a head is either right as a whole or refused. Columns can be read, and verified, one by one.

A column's values are views of its bytes: numbers as they are, strings as offsets and UTF-8 text,
or, where few differ, as small indices into such a dictionary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c, crc32c_blocks
from dlfs.base.wording import quote
from dlfs.errors import ChecksumError, FormatError, LimitError, TruncatedError, VersionError
from dlfs.format.constants import (
    ADDRESS_MAX,
    ATTRIBUTE_BLOCK_BYTES,
    ATTRIBUTE_COLUMNS_MAX,
    ATTRIBUTE_MAGIC,
    ATTRIBUTE_VERSION,
    COLUMN_NAME_BYTES_MAX,
)

Bytes = NDArray[np.uint8]

FIXED = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
"""Kinds of fixed width; the number of a kind on media is its position here, from 1 on."""

TEXT = "text"
DICTIONARY = "dictionary"
KINDS = ("", *FIXED, TEXT, DICTIONARY)

# magic, CRC32C of what follows it, version, UUID, samples, segment bytes, head bytes, columns, -
_HEAD = struct.Struct("<8sII16sQQQII")
_CRC_END = 12
# kind, name bytes, index bytes, dictionary's values, text bytes
_COLUMN = struct.Struct("<HHIQQ")


def blocks_up(size_bytes: int) -> int:
    """Round up to a multiple of 4096 bytes."""
    return -(-size_bytes // ATTRIBUTE_BLOCK_BYTES) * ATTRIBUTE_BLOCK_BYTES


def column_name_problem(name: str) -> str | None:
    """Return the reason why a column cannot have this name, or None."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        return "expected text that UTF-8 can write"
    if not 1 <= len(raw) <= COLUMN_NAME_BYTES_MAX or "\0" in name:
        return f"expected 1 to {COLUMN_NAME_BYTES_MAX} bytes without NUL, got {len(raw)}"
    return None


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """The form of a column's bytes.

    Attributes:
        name: name of the column.
        kind: one of ``FIXED``, ``TEXT`` or ``DICTIONARY``.
        index_bytes: size of an index into the dictionary: 1 or 2; 0 for other kinds.
        value_count: number of strings in the dictionary; 0 for other kinds.
        text_bytes: length of the text of a dictionary's or a text column's strings; else 0.
    """

    name: str
    kind: str
    index_bytes: int = 0
    value_count: int = 0
    text_bytes: int = 0

    @property
    def is_text(self) -> bool:
        """Return True if the column's values are strings."""
        return self.kind in (TEXT, DICTIONARY)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the column's values as a numpy array: ``object`` for strings."""
        return np.dtype(object) if self.is_text else np.dtype(self.kind).newbyteorder("<")

    def length_bytes(self, sample_count: int) -> int:
        """Return the length of the column's bytes, without the padding of the last block."""
        if self.kind == TEXT:
            return 8 * (sample_count + 1) + self.text_bytes
        if self.kind == DICTIONARY:
            return self.offsets_at(sample_count) + 8 * (self.value_count + 1) + self.text_bytes
        return sample_count * self.dtype.itemsize

    def offsets_at(self, sample_count: int) -> int:
        """Return the offset in the column's bytes at which the offsets of its strings begin."""
        return -(-sample_count * self.index_bytes // 8) * 8


@dataclass(frozen=True, slots=True, eq=False)
class AttributeHead:
    """The head of a segment.

    Attributes:
        dataset_uuid: UUID of the dataset.
        sample_count: number of samples, thus of values of each column.
        columns: in the order in which they were added.
        checksums: uint32[n_blocks], CRC32C of each block after the head.
    """

    dataset_uuid: UUID
    sample_count: int
    columns: tuple[ColumnForm, ...]
    checksums: NDArray[np.uint32]
    _starts: list[int] = field(init=False, repr=False)
    """Offset of each column behind the head, in bytes, and the end of the last one."""

    def __post_init__(self) -> None:
        lengths = (blocks_up(column.length_bytes(self.sample_count)) for column in self.columns)
        object.__setattr__(self, "_starts", list(accumulate(lengths, initial=0)))

    @property
    def head_bytes(self) -> int:
        """Length of the head in bytes, a multiple of 4096."""
        return blocks_up(_table_at(self.columns) + 4 * self._starts[-1] // ATTRIBUTE_BLOCK_BYTES)

    @property
    def segment_bytes(self) -> int:
        """Length of the segment in bytes, a multiple of 4096."""
        return self.head_bytes + self._starts[-1]

    def extent(self, number: int) -> tuple[int, int]:
        """Return a column's byte offset in the segment and its length, both multiples of 4096."""
        start, end = self._starts[number : number + 2]
        return self.head_bytes + start, end - start

    def described(self) -> list[tuple[bytes, bytes]]:
        """Return the name of each column, and what the head says of it: form, name, checksums."""
        found = []
        for number, column in enumerate(self.columns):
            start, end = (at // ATTRIBUTE_BLOCK_BYTES for at in self._starts[number : number + 2])
            name = column.name.encode()
            sums = self.checksums[start:end].astype("<u4").tobytes()
            found.append((name, _encode_form(column, len(name)) + name + sums))
        return found

    def wrong_blocks(self, number: int, memory: Bytes) -> NDArray[np.intp]:
        """Find the blocks of a column whose checksum is wrong, in rising order.

        Args:
            number: number of the column.
            memory: uint8[n_bytes], as long as its extent.
        """
        got, expected = self._sums(number, memory)
        return np.flatnonzero(got != expected)

    def verify(self, number: int, memory: Bytes, where: str) -> None:
        """Check a column's blocks against their checksums.

        Args:
            number: number of the column.
            memory: uint8[n_bytes], as long as its extent.
            where: name of the segment in errors.

        Raises:
            ChecksumError: a block is wrong; names column and byte offset.
        """
        got, expected = self._sums(number, memory)
        wrong = np.flatnonzero(got != expected)
        if len(wrong):
            block = int(wrong[0])
            raise ChecksumError(
                f"{where}: read column {self.columns[number].name!r}: expected CRC32C "
                f"{int(expected[block]):#010x} of the block at byte "
                f"{self.extent(number)[0] + block * ATTRIBUTE_BLOCK_BYTES} of the segment, "
                f"got {int(got[block]):#010x}"
            )

    def _sums(self, number: int, memory: Bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Compute the checksums of a column's blocks; also return the recorded ones."""
        offset, length = self.extent(number)
        first = (offset - self.head_bytes) // ATTRIBUTE_BLOCK_BYTES
        got = crc32c_blocks(memory[:length].data, ATTRIBUTE_BLOCK_BYTES)
        return got, self.checksums[first : first + len(got)]


def _table_at(columns: tuple[ColumnForm, ...]) -> int:
    """Return the offset of the checksums in the head."""
    names = sum(len(column.name.encode()) for column in columns)
    return -(-(_HEAD.size + _COLUMN.size * len(columns) + names) // 8) * 8


# ---- the head ------------------------------------------------------------------------------------


def encode_head(head: AttributeHead) -> Bytes:
    """Encode a head.

    Returns:
        uint8[head.head_bytes].

    Raises:
        LimitError: there are too many columns, or they are too long.
    """
    if len(head.columns) > ATTRIBUTE_COLUMNS_MAX or head.segment_bytes > ADDRESS_MAX:
        raise LimitError(
            f"encode attributes: expected at most {ATTRIBUTE_COLUMNS_MAX} columns in {ADDRESS_MAX} "
            f"bytes, got {len(head.columns)} in {head.segment_bytes}"
        )
    names = [column.name.encode() for column in head.columns]
    raw = bytearray(head.head_bytes)
    _HEAD.pack_into(
        raw, 0, ATTRIBUTE_MAGIC, 0, ATTRIBUTE_VERSION, head.dataset_uuid.bytes, head.sample_count,
        head.segment_bytes, len(raw), len(names), 0,
    )  # fmt: skip
    forms = b"".join(
        _encode_form(column, len(name)) for column, name in zip(head.columns, names, strict=True)
    )
    remaining = forms + b"".join(names)
    raw[_HEAD.size : _HEAD.size + len(remaining)] = remaining
    table = head.checksums.astype("<u4").tobytes()
    at = _table_at(head.columns)
    raw[at : at + len(table)] = table
    struct.pack_into("<I", raw, _CRC_END - 4, crc32c(bytes(raw[_CRC_END:])))
    return np.frombuffer(bytes(raw), np.uint8)


def _encode_form(column: ColumnForm, name_bytes: int) -> bytes:
    return _COLUMN.pack(
        KINDS.index(column.kind),
        name_bytes,
        column.index_bytes,
        column.value_count,
        column.text_bytes,
    )


def decode_head(data: Bytes, where: str) -> AttributeHead:
    """Decode and check a head.

    Args:
        data: uint8[n_bytes], the head and nothing else.
        where: dataset, device and byte offset, for errors.

    Raises:
        TruncatedError: there are too few bytes.
        ChecksumError: they do not have the CRC32C that they record.
        VersionError: the segment is of a version unknown to this code.
        FormatError: anything in it is out of its range or disagrees with the remaining.
    """
    if data.size < _HEAD.size:
        raise TruncatedError(
            f"{where}: read attributes: expected a head of at least {_HEAD.size} bytes, "
            f"got {data.size}"
        )
    raw = data.tobytes()
    magic, crc, version, uuid, samples, segment_bytes, head_bytes, count, _ = _HEAD.unpack_from(raw)
    if magic != ATTRIBUTE_MAGIC:
        raise FormatError(
            f"{where}: read attributes: expected {quote(ATTRIBUTE_MAGIC)}, got {quote(magic)}"
        )
    actual = crc32c(raw[_CRC_END:])
    if crc != actual:
        raise ChecksumError(
            f"{where}: read attributes: expected CRC32C {crc:#010x} over {len(raw)} bytes of head, "
            f"got {actual:#010x}"
        )
    if version != ATTRIBUTE_VERSION:
        raise VersionError(
            f"{where}: read attributes: expected version {ATTRIBUTE_VERSION}, got {version}"
        )
    columns = _decode_columns(raw, count, where)
    head = AttributeHead(UUID(bytes=uuid), samples, columns, np.empty(0, np.uint32))
    expected = head.head_bytes, head.segment_bytes
    if expected != (len(raw), segment_bytes) or head_bytes != len(raw):
        raise FormatError(
            f"{where}: read attributes: expected a head of {len(raw)} bytes, {expected[0]} by its "
            f"columns, in a segment of {expected[1]}, got {head_bytes} and {segment_bytes}"
        )
    blocks = (segment_bytes - head_bytes) // ATTRIBUTE_BLOCK_BYTES
    table = np.frombuffer(raw, "<u4", blocks, _table_at(columns))
    return AttributeHead(head.dataset_uuid, samples, columns, table)


def _decode_columns(raw: bytes, count: int, where: str) -> tuple[ColumnForm, ...]:
    names_at = _HEAD.size + _COLUMN.size * count
    if count > ATTRIBUTE_COLUMNS_MAX or names_at > len(raw):
        raise FormatError(
            f"{where}: read attributes: expected at most {ATTRIBUTE_COLUMNS_MAX} columns in a head "
            f"of {len(raw)} bytes, got {count}"
        )
    forms = [_COLUMN.unpack_from(raw, _HEAD.size + _COLUMN.size * i) for i in range(count)]
    ends = list(accumulate((form[1] for form in forms), initial=names_at))
    columns = []
    for number, (kind, _, index_bytes, values, text_bytes) in enumerate(forms):
        try:
            name = raw[ends[number] : ends[number + 1]].decode()
            column = ColumnForm(name, KINDS[kind], index_bytes, values, text_bytes)
        except (UnicodeDecodeError, IndexError) as error:
            raise FormatError(f"{where}: read attributes: column {number}: {error}") from error
        problem = _form_problem(column) or column_name_problem(name)
        if ends[number + 1] > len(raw) or problem:
            raise FormatError(f"{where}: read attributes: column {number} {name!r}: {problem}")
        columns.append(column)
    if len({column.name for column in columns}) != count:
        raise FormatError(f"{where}: read attributes: expected columns of different names")
    return tuple(columns)


def _form_problem(column: ColumnForm) -> str | None:
    """Return the reason why a column's form is invalid, or None."""
    has_dictionary = column.kind == DICTIONARY
    if not column.kind:
        return "expected a kind of column, got 0"
    if column.index_bytes not in ((1, 2) if has_dictionary else (0,)):
        return f"expected bytes of an index as {column.kind} has them, got {column.index_bytes}"
    values_max = 256**column.index_bytes if has_dictionary else 0
    text_bytes_max = ADDRESS_MAX if column.is_text else 0
    for name, value, high in (
        ("values of a dictionary", column.value_count, values_max),
        ("bytes of text", column.text_bytes, text_bytes_max),
    ):
        if value > high:
            return f"expected at most {high} {name} in a column of kind {column.kind}, got {value}"
    return None


# ---- columns -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    """Strings in memory: string i is ``text[offsets[i]:offsets[i + 1]]``, in UTF-8."""

    offsets: NDArray[np.uint64]
    text: Bytes

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ColumnValues:
    """A column's values, as views of its bytes.

    Attributes:
        fixed: values of a column of fixed width, ``[n_samples]``; else None.
        strings: all strings of a text; the distinct strings of a dictionary; else None.
        codes: index of each sample's string in a dictionary, ``uint8`` or ``uint16[n_samples]``.
    """

    fixed: NDArray[Any] | None = None
    strings: Strings | None = None
    codes: NDArray[Any] | None = None


def view_column(head: AttributeHead, number: int, memory: Bytes, where: str) -> ColumnValues:
    """View a column's bytes as values. Copies nothing, and does not check that text is UTF-8.

    Args:
        head: head of the segment.
        number: number of the column.
        memory: uint8[n_bytes], verified, as long as its extent.
        where: name of the segment in errors.

    Raises:
        FormatError: offsets fall or leave the text, an index leaves the dictionary, or a bool is
            neither 0 nor 1.
    """
    column, count = head.columns[number], head.sample_count
    if not column.is_text:
        values = memory[: column.length_bytes(count)].view(column.dtype)
        if column.kind == "bool" and memory[:count].size and memory[:count].max() > 1:
            raise FormatError(f"{where}: read column {column.name!r}: expected 0 or 1 in a bool")
        return ColumnValues(fixed=values)
    at = column.offsets_at(count)
    string_count = column.value_count if column.kind == DICTIONARY else count
    text_at = at + 8 * (string_count + 1)
    offsets: NDArray[np.uint64] = memory[at:text_at].view("<u8")
    text = memory[text_at : text_at + column.text_bytes]
    if offsets[0] != 0 or offsets[-1] != len(text) or np.any(offsets[1:] < offsets[:-1]):
        raise FormatError(
            f"{where}: read column {column.name!r}: expected offsets rising from 0 to {len(text)}"
        )
    strings = Strings(offsets, text)
    if column.kind == TEXT:
        return ColumnValues(strings=strings)
    codes = memory[: count * column.index_bytes].view(f"<u{column.index_bytes}")
    if codes.size and codes.max() >= string_count:
        raise FormatError(
            f"{where}: read column {column.name!r}: expected indices below {string_count}, "
            f"got {codes.max()}"
        )
    return ColumnValues(strings=strings, codes=codes)


def encode_fixed(name: str, values: NDArray[Any]) -> tuple[ColumnForm, Bytes]:
    """Encode a column of fixed width; return its form and its bytes, padded to whole blocks."""
    column = ColumnForm(name, values.dtype.newbyteorder("=").name)
    raw = np.ascontiguousarray(values.astype(column.dtype, copy=False)).view(np.uint8)
    return column, _padded([raw])


def encode_text(name: str, strings: Strings) -> tuple[ColumnForm, Bytes]:
    """Encode a column of strings; return its form and its bytes, padded to whole blocks."""
    column = ColumnForm(name, TEXT, text_bytes=strings.text.size)
    return column, _padded([strings.offsets.astype("<u8", copy=False).view(np.uint8), strings.text])


def encode_dictionary(
    name: str, codes: NDArray[np.uint16], strings: Strings
) -> tuple[ColumnForm, Bytes]:
    """Encode a column of indices into a dictionary; return its form and its padded bytes."""
    index_bytes = 1 if len(strings) <= 256 else 2
    column = ColumnForm(name, DICTIONARY, index_bytes, len(strings), strings.text.size)
    indices = codes.astype(f"<u{index_bytes}").view(np.uint8)
    gap = np.zeros(-indices.size % 8, np.uint8)
    offsets = strings.offsets.astype("<u8", copy=False).view(np.uint8)
    return column, _padded([indices, gap, offsets, strings.text])


def _padded(parts: list[Bytes]) -> Bytes:
    """Concatenate parts and pad them with zeroes to whole blocks."""
    size = sum(part.size for part in parts)
    return np.concatenate([*parts, np.zeros(blocks_up(size) - size, np.uint8)])
