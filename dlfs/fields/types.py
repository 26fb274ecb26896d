"""The types of fields, and the text by which they are declared and stored.

A type is ``bytes``, ``text``, or ``DTYPE[dimensions]``: the name of the elements as numpy's array
interface writes it, and the length of each dimension, ``?`` for one that varies. ``<f4[?,128,3]``
is an array of three dimensions, and ``<i8[]`` is a scalar. ``bfloat16``, which numpy lacks, is the
name of its own; numpy arrays of such a field have the elements' 16 bits as ``<u2``.

The text of types comes from media, too. It is checked before numpy parses it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.base.wording import show_value
from dlfs.errors import UsageError
from dlfs.format.constants import SAMPLE_BYTES_MAX

FIELDS_COLUMN = "dlfs:fields"
"""Name of the column with the names and types of a sample's fields, as JSON."""

FIELDS_MAX = 256
"""Most fields of a sample."""

NAME_BYTES_MAX = 200
"""Longest name of a field in UTF-8, in bytes: the names of its columns fit in 255."""

ALIGNMENT_MAX = 16
"""Largest alignment of a field, in bytes."""

KINDS = "biufcmMSU"
"""Kinds of numpy dtypes that arrays can have."""

DIMENSIONS_MAX = 32
"""Most dimensions of an array; numpy before 2 had no more."""

BFLOAT16 = "bfloat16"

VARIES = "?"

_JSON_CHARACTERS_MAX = 1 << 18
_TYPE_CHARACTERS_MAX = 512
_ARRAY = re.compile(r"([<>=|]?[A-Za-z][A-Za-z0-9]{0,15}(?:\[[0-9A-Za-z]{1,16}\])?)\[([0-9?,]*)\]")
_EXAMPLES = "'bytes', 'text', or an array as '<f4[?,128,3]' or '<i8[]'"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field.

    Attributes:
        kind: ``bytes``, ``text`` or ``array``.
        element: name of an array's elements, as numpy's array interface writes it, or ``bfloat16``.
        shape: length of each dimension of an array; None for one that varies.
    """

    kind: str
    element: str = ""
    shape: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        if self.kind != "array":
            return self.kind
        lengths = (VARIES if length is None else str(length) for length in self.shape)
        return f"{self.element}[{','.join(lengths)}]"

    @classmethod
    def parse(cls, text: object) -> FieldType:
        """Parse the text of a type.

        Raises:
            UsageError: the text describes no type.
        """
        if text in ("bytes", "text"):
            return cls(str(text))
        known = isinstance(text, str) and len(text) <= _TYPE_CHARACTERS_MAX
        match = _ARRAY.fullmatch(str(text)) if known else None
        if match is None:
            raise UsageError(f"expected a type of field, {_EXAMPLES}, got {show_value(text)}")
        lengths = match[2].split(",") if match[2] else []
        if not all(length == VARIES or length.isdigit() for length in lengths):
            raise UsageError(f"expected lengths of dimensions with commas, got {match[2]!r}")
        shape = tuple(None if length == VARIES else int(length) for length in lengths)
        return cls.array(_element_name(match[1]), shape)

    @classmethod
    def array(cls, element: str, shape: Sequence[int | None]) -> FieldType:
        """Return the type of arrays of an element and a shape.

        Raises:
            UsageError: there are too many dimensions, or the arrays are too long for a sample.
        """
        if len(shape) > DIMENSIONS_MAX:
            raise UsageError(f"expected at most {DIMENSIONS_MAX} dimensions, got {len(shape)}")
        made = cls("array", element, tuple(shape))
        size = made.dtype.itemsize * math.prod(length for length in shape if length)
        if size > SAMPLE_BYTES_MAX:
            raise UsageError(f"expected arrays of at most {SAMPLE_BYTES_MAX} bytes, got {made}")
        return made

    @classmethod
    def of_value(cls, value: object) -> FieldType:
        """Return the type of a value: bytes, text, or an array whose dimensions vary.

        Raises:
            UsageError: no field can have the value.
        """
        if isinstance(value, str):
            return cls("text")
        if isinstance(value, bytes | bytearray | memoryview):
            return cls("bytes")
        array = as_array(value)
        dtype = BFLOAT16 if array.dtype.name == BFLOAT16 else array.dtype.str
        return cls.array(dtype, (None,) * array.ndim)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of numpy arrays with the elements; ``uint8`` for bytes and text."""
        if self.kind != "array":
            return np.dtype(np.uint8)
        return np.dtype("<u2" if self.element == BFLOAT16 else self.element)

    @property
    def alignment_bytes(self) -> int:
        """Alignment of the field in a sample: the largest power of two in the item size, to 16."""
        size = self.dtype.itemsize
        return min(size & -size, ALIGNMENT_MAX)

    @property
    def varies(self) -> bool:
        """True if the length of the field differs from sample to sample."""
        return self.kind != "array" or None in self.shape

    @property
    def length_bytes(self) -> int:
        """Length of the field in bytes, if it does not vary."""
        return math.prod(length or 0 for length in self.shape) * self.dtype.itemsize

    def fits(self, shape: Shape) -> bool:
        """Return True if an array of this type can have a shape."""
        return len(shape) == len(self.shape) and all(
            expected in (None, length) for expected, length in zip(self.shape, shape, strict=True)
        )

    def decode(self, data: memoryview, shape: Shape = ()) -> Any:
        """Return the value that some bytes are: themselves, a str, or a read-only array over them.

        Args:
            data: bytes of the field.
            shape: shape of an array with dimensions that vary.

        Raises:
            UnicodeDecodeError: the bytes of a text are not UTF-8.
        """
        if self.kind == "bytes":
            return data
        if self.kind == "text":
            return str(data, "utf-8")
        made: NDArray[Any] = np.frombuffer(data, self.dtype).reshape(
            shape if self.varies else self.shape  # type: ignore[arg-type]
        )
        return made

    def parse_shape(self, text: str) -> Shape:
        """Parse the shape of one array: decimal lengths with commas.

        Raises:
            UsageError: it is no shape, or none of this type.
        """
        lengths = text.split(",") if text else []
        if len(text) > _TYPE_CHARACTERS_MAX or not all(
            length.isascii() and length.isdigit() for length in lengths
        ):
            raise UsageError(f"expected lengths with commas, got {show_value(text)}")
        shape = tuple(map(int, lengths))
        # numpy refuses an array without elements whose other dimensions are too long.
        size = math.prod(length for length in shape if length) * self.dtype.itemsize
        if not self.fits(shape) or size > SAMPLE_BYTES_MAX:
            raise UsageError(f"expected the shape of {self}, got {shape}")
        return shape

    def parse_shapes(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Parse the shapes of many arrays at once.

        Returns:
            ``int64[n, dimensions]``.

        Raises:
            UsageError: one of them is no shape, or none of this type.
        """
        if not texts:
            return np.empty((0, len(self.shape)), np.int64)
        joined = ";".join(texts)
        if not _shapes_pattern(self.shape).fullmatch(joined) or joined.count(";") != len(texts) - 1:
            raise UsageError(f"expected shapes of {self}")
        numbers = list(map(int, joined.replace(";", ",").split(",")))
        shapes = np.array(numbers, np.int64).reshape(len(texts), len(self.shape))
        sizes = np.maximum(shapes, 1).prod(axis=1, dtype=np.float64) * self.dtype.itemsize
        if np.any(sizes > SAMPLE_BYTES_MAX):
            raise UsageError(f"expected shapes of {self} of at most {SAMPLE_BYTES_MAX} bytes")
        return shapes


@lru_cache(256)
def _shapes_pattern(shape: tuple[int | None, ...]) -> re.Pattern[str]:
    """Return the pattern of the texts of arrays' shapes with ``;`` between; lengths < 10^13."""
    lengths = ("[0-9]{1,13}" if length is None else f"0{{0,9}}{length}" for length in shape)
    one = ",".join(lengths)
    return re.compile(f"{one}(?:;{one})*")


Fields = dict[str, FieldType]
"""Types of the fields of a sample by name, in the order in which they lie in it."""


def parse_fields(types: Mapping[str, object] | Iterable[tuple[str, object]]) -> Fields:
    """Parse the names and types of fields.

    Args:
        types: text of each type by name, or pairs of both.

    Raises:
        UsageError: a name or a type is malformed, occurs twice, or there are none or too many.
    """
    pairs = list(types.items() if isinstance(types, Mapping) else types)
    if not 1 <= len(pairs) <= FIELDS_MAX:
        raise UsageError(f"expected 1 to {FIELDS_MAX} fields, got {len(pairs)}")
    fields: Fields = {}
    for name, text in pairs:
        check_name(name)
        if name in fields:
            raise UsageError(f"field {name!r}: expected fields of different names, got it twice")
        try:
            fields[name] = FieldType.parse(str(text) if isinstance(text, FieldType) else text)
        except UsageError as error:
            raise UsageError(f"field {name!r}: {error}") from error
    return fields


def check_name(name: object) -> None:
    """Raise UsageError unless a field can have this name."""
    try:
        size = len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= NAME_BYTES_MAX or "\0" in str(name):
        raise UsageError(
            f"expected names of fields of 1 to {NAME_BYTES_MAX} bytes of UTF-8 without NUL, got "
            f"{show_value(name)}"
        )


def fields_to_json(fields: Fields) -> str:
    """Return the text of ``dlfs:fields``."""
    types = {name: str(kind) for name, kind in fields.items()}
    return json.dumps(types, ensure_ascii=False, separators=(",", ":"))


@lru_cache(64)
def fields_of_json(text: str) -> Fields:
    """Parse the text of ``dlfs:fields``.

    Raises:
        UsageError: it is no JSON object, or as ``parse_fields``.
    """
    if len(text) > _JSON_CHARACTERS_MAX:
        raise UsageError(f"expected at most {_JSON_CHARACTERS_MAX} characters, got {len(text)}")
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"expected a JSON object of fields: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise UsageError(f"expected a JSON object of fields, got {show_value(text)}")
    return parse_fields(pairs)


class _Pairs(list[tuple[str, object]]):
    """The pairs of a JSON object, with names that occur twice."""


def as_array(value: object) -> NDArray[Any]:
    """Return a value as an array of elements that fields can have.

    Raises:
        UsageError: it is none.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"expected bytes, text or an array, got {show_value(value)}: {error}"
        ) from error
    plain = array.dtype.kind in KINDS and array.dtype.itemsize > 0
    if not plain and array.dtype.name != BFLOAT16:
        raise UsageError(
            f"expected bytes, text, or an array of bool, numbers, times or strings of a fixed "
            f"length, got {type(value).__name__} of {array.dtype}"
        )
    return array


def _element_name(text: str) -> str:
    if text == BFLOAT16:
        return text
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"expected elements as numpy names them, got {text!r}") from error
    if dtype.kind not in KINDS or not 0 < dtype.itemsize <= SAMPLE_BYTES_MAX:
        raise UsageError(
            f"expected elements of bool, numbers, times or strings of a fixed length, got {text!r}"
        )
    return dtype.str
