"""Decodes the columns of MDS samples by their encodings.

As a field, a number is a scalar, and text and JSON are text. An array (``ndarray``) names the type
of its elements, its shape, both or neither in its encoding; the bytes begin with what is missing.
Images and pickled objects (``jpeg``, ``png``, ``pil``, ``pkl``) and all others are bytes, as
stored. Nothing is unpickled.

Source: https://docs.mosaicml.com/projects/streaming, "Dataset format" (version 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dlfs.base.wording import quote
from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.records import Value
from dlfs.ingest.source import array_attributes

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


def field_value(encoding: str, data: bytes) -> Any:
    """Return the value of a field: a number, text, an array or bytes.

    Raises:
        ValueError: the bytes are no such value.
        OverflowError: a whole number has more than 64 bits.
    """
    if encoding in NUMBERS:
        return np.frombuffer(data, NUMBERS[encoding]).reshape(())
    if encoding == JSON or TEXTS.get(encoding) is str:
        return data.decode()
    if encoding in TEXTS:
        value = TEXTS[encoding](data.decode())
        return np.array(value, np.int64 if isinstance(value, int) else np.float64)
    return _array(encoding, data) if encoding.partition(":")[0] == "ndarray" else data


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
