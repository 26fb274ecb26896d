"""``tf.train.Example`` read without a protocol compiler: which features it has, and their values.

An Example is a protocol buffer of four fixed levels: Features, a map of names to Feature, and in
each one list of bytes, floats or whole numbers. So few fields need no generated code, and no
recursion: each level is a walk over a span of the record that ends where the span above it says.
Features are found first, and only those asked for are decoded; bytes stay where they are.

Source: tensorflow/core/example/{example,feature}.proto; the wire format as the Protocol Buffers
documentation gives it. Unknown fields are passed over, groups (wire types 3 and 4) are errors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dlfs.errors import FormatError

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_KINDS = {1: "bytes", 2: "float", 3: "int64"}


class ExampleError(FormatError):
    """A record is no tf.train.Example."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature: what its list is of, and the span of the list's message in the record."""

    kind: str
    start: int
    end: int


def features(record: memoryview) -> dict[bytes, Feature]:
    """The features of an Example, by name; of a name given twice the last counts.

    Args:
        record: the serialised Example.

    Raises:
        ExampleError: it is malformed.
    """
    found: dict[bytes, Feature] = {}
    for field, start, end in _messages(record, 0, len(record)):
        if field != 1:
            continue
        for field_of_map, entry, entry_end in _messages(record, start, end):
            if field_of_map == 1:
                name, feature = _entry(record, entry, entry_end)
                found[name] = feature
    return found


def bytes_span(record: memoryview, feature: Feature, name: str) -> tuple[int, int]:
    """Where the one value of a feature of bytes lies: start and end in the record.

    Raises:
        ExampleError: it is of another kind, or has not exactly one value.
    """
    if feature.kind != "bytes":
        raise ExampleError(f"expected bytes in feature {name}, got {feature.kind}")
    values = [
        (start, end)
        for field, start, end in _messages(record, feature.start, feature.end)
        if field == 1
    ]
    if len(values) != 1:
        raise ExampleError(f"expected one value in feature {name}, got {len(values)}")
    return values[0]


def scalar(record: memoryview, feature: Feature, name: str) -> int | float | str:
    """The one value of a feature: text of bytes, a float or a whole number.

    Raises:
        ExampleError: it has not exactly one value, or bytes are not UTF-8.
    """
    if feature.kind == "bytes":
        start, end = bytes_span(record, feature, name)
        try:
            return str(record[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise ExampleError(f"expected text in feature {name}, got other bytes") from error
    read = _floats if feature.kind == "float" else _integers
    values = list(read(record, feature))
    if len(values) != 1:
        raise ExampleError(f"expected one value in feature {name}, got {len(values)}")
    return values[0]


def _entry(record: memoryview, start: int, end: int) -> tuple[bytes, Feature]:
    """A pair of the map: its name and its feature."""
    name, feature = b"", Feature("bytes", end, end)
    for field, first, last in _messages(record, start, end):
        if field == 1:
            name = bytes(record[first:last])
        elif field == 2:
            for kind, low, high in _messages(record, first, last):
                if kind in _KINDS:
                    feature = Feature(_KINDS[kind], low, high)
    return name, feature


def _floats(record: memoryview, feature: Feature) -> Iterator[float]:
    for field, wire, value, end in _fields(record, feature.start, feature.end):
        if field != 1:
            continue
        if wire == _DELIMITED and (end - value) % 4 == 0:
            yield from struct.unpack(f"<{(end - value) // 4}f", record[value:end])
        elif wire == _FIXED32:
            yield from struct.unpack("<f", record[value:end])
        else:
            raise ExampleError(f"expected floats at byte {value}")


def _integers(record: memoryview, feature: Feature) -> Iterator[int]:
    for field, wire, value, end in _fields(record, feature.start, feature.end):
        if field != 1:
            continue
        if wire not in (_DELIMITED, _VARINT):
            raise ExampleError(f"expected whole numbers at byte {value}")
        position = value
        while position < end:
            number, position = _varint(record, position, end)
            yield number - (1 << 64) if number >> 63 else number


def _messages(record: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields with a length, strings and messages alike: number, start and end."""
    for field, wire, value, last in _fields(record, start, end):
        if wire == _DELIMITED:
            yield field, value, last


def _fields(record: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Every field of a message: number, wire type, start and end of its value."""
    position = start
    while position < end:
        tag, value = _varint(record, position, end)
        wire = tag & 7
        if wire == _VARINT:
            position = _varint(record, value, end)[1]
        elif wire == _DELIMITED:
            length, value = _varint(record, value, end)
            position = value + length
        elif wire in (_FIXED64, _FIXED32):
            position = value + (8 if wire == _FIXED64 else 4)
        else:
            raise ExampleError(f"expected a protocol buffer, got wire type {wire} at {position}")
        if position > end:
            raise ExampleError(f"expected a field to end by byte {end}, got {position}")
        yield tag >> 3, wire, value, position


def _varint(record: memoryview, position: int, end: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    number = 0
    for shift in range(_VARINT_BYTES_MAX):
        if position + shift >= end:
            raise ExampleError(f"expected a number at byte {position}, got the end")
        byte = record[position + shift]
        number |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return number & ((1 << 64) - 1), position + shift + 1
    raise ExampleError(f"expected a number of at most {_VARINT_BYTES_MAX} bytes at {position}")
