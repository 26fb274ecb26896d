"""``FieldEncoder``: makes the bytes and the reserved columns of samples with fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c
from dlfs._native.device import as_bytes_array
from dlfs.base.wording import show_value
from dlfs.errors import UsageError
from dlfs.fields.layout import bytes_column, crc_column, shape_column
from dlfs.fields.types import (
    BFLOAT16,
    FIELDS_COLUMN,
    Fields,
    FieldType,
    Shape,
    as_array,
    fields_to_json,
    parse_fields,
)

_RANKS = {kind: rank for rank, kinds in enumerate(("b", "iu", "f", "c")) for kind in kinds}
"""Rank of each kind of numbers: a number can be an element of its own kind and of later ones."""


class FieldEncoder:
    """Encodes the samples of one dataset, which all have the same fields.

    Args:
        fields: type of each field by name.

    Attributes:
        fields: type of each field by name, in order.
        text: value of the column that lists them, as JSON.

    Raises:
        UsageError: a name or a type is malformed.

    Threads: any.
    """

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.fields: Fields = parse_fields(fields)
        self.text: str = fields_to_json(self.fields)

    @classmethod
    def of_sample(cls, values: Mapping[str, Any], where: str) -> FieldEncoder:
        """Make an encoder for samples like the first one: all dimensions of its arrays vary.

        Args:
            values: value of each field.
            where: the action and the sample, for errors.

        Raises:
            UsageError: a field has no name or value that can be stored.
        """
        types = {}
        for name, value in values.items():
            try:
                types[name] = FieldType.of_value(value)
            except UsageError as error:
                raise UsageError(f"{where}: field {show_value(name)}: {error}") from error
        try:
            return cls(types)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def encode(
        self, values: Mapping[str, Any], where: str
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Encode one sample.

        Args:
            values: value of each field: bytes, a str, or an array, a list or a number.
            where: the action and the sample, for errors.

        Returns:
            The bytes of the sample, and the values of its reserved columns.

        Raises:
            UsageError: a field is missing, unknown, or of another type; the message names it.
        """
        if values.keys() != self.fields.keys():
            raise UsageError(
                f"{where}: expected the fields {', '.join(self.fields)}, got "
                f"{', '.join(map(str, values)) or 'none'}"
            )
        columns: dict[str, Any] = {FIELDS_COLUMN: self.text}
        parts = []
        end = 0
        for name, kind in self.fields.items():
            try:
                part, shape = encode_value(kind, values[name])
            except UsageError as error:
                raise UsageError(f"{where}: field {name!r}: {error}") from error
            if kind.kind != "array":
                columns[bytes_column(name)] = np.int64(part.size)
            elif kind.varies:
                columns[shape_column(name)] = ",".join(map(str, shape))
            columns[crc_column(name)] = np.uint32(crc32c(part.data))
            start = -(-end // kind.alignment_bytes) * kind.alignment_bytes
            parts.append((start, part))
            end = start + part.size
        data = np.zeros(end, np.uint8)
        for start, part in parts:
            data[start : start + part.size] = part
        return data, columns


def encode_value(kind: FieldType, value: Any) -> tuple[NDArray[np.uint8], Shape]:
    """Return the bytes of a value of a field, and its shape.

    Raises:
        UsageError: the value is not of the type.
    """
    if kind.kind == "text":
        if not isinstance(value, str):
            raise UsageError(f"expected text, got {show_value(value)}")
        try:
            return np.frombuffer(value.encode(), np.uint8), ()
        except UnicodeEncodeError as error:
            raise UsageError(f"expected text that UTF-8 can write: {error}") from error
    if kind.kind == "bytes":
        if isinstance(value, str):
            raise UsageError(f"expected bytes, got {show_value(value)}")
        try:
            return as_bytes_array(value), ()
        except (TypeError, ValueError) as error:
            raise UsageError(f"expected bytes, got {show_value(value)}: {error}") from error
    array = _as_elements(kind, value)
    if not kind.fits(array.shape):
        raise UsageError(f"expected {kind}, got an array of shape {array.shape}")
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return array.reshape(-1).view(np.uint8), array.shape


def _as_elements(kind: FieldType, value: Any) -> NDArray[Any]:
    """Return a value as an array of the type's elements.

    An array must have them, in either byte order. Plain numbers and lists are converted.
    """
    if isinstance(value, str | bytes | bytearray | memoryview) and kind.dtype.kind not in "SU":
        raise UsageError(f"expected {kind}, got {type(value).__name__}")
    array = as_array(value)
    wanted = kind.dtype
    if kind.element == BFLOAT16 and array.dtype.name == BFLOAT16:
        return array.view(wanted)
    if array.dtype == wanted:
        return array
    if array.dtype.newbyteorder("=") == wanted.newbyteorder("="):
        return array.astype(wanted)
    given = hasattr(value, "__array__")
    ranks = _RANKS.get(array.dtype.kind), _RANKS.get(wanted.kind)
    if given or kind.element == BFLOAT16 or None in ranks or ranks[0] > ranks[1]:  # type: ignore[operator]
        raise UsageError(f"expected {kind}, got {array.dtype} of shape {array.shape}")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    if wanted.kind in "biu" and not _is_equal(converted, array):
        raise UsageError(f"expected {kind}, got {show_value(value)}, which it cannot represent")
    return converted


def _is_equal(converted: NDArray[Any], array: NDArray[Any]) -> bool:
    """Return True if integers were converted without a change."""
    return bool(np.all((converted == array) & ((converted < 0) == (array < 0))))
