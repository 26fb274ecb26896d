"""The array that a sample contains, as the columns ``dlfs:dtype`` and ``dlfs:shape`` describe it.

The strings of these columns come from media. They are checked before numpy parses them: no Python
objects, no structures, plain numbers as sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlfs.base.distinct import number_distinct
from dlfs.errors import FormatError, UsageError
from dlfs.fields.layout import FieldColumns
from dlfs.fields.types import DIMENSIONS_MAX, KINDS
from dlfs.format.constants import SAMPLE_BYTES_MAX

DTYPE_COLUMN = "dlfs:dtype"
SHAPE_COLUMN = "dlfs:shape"

_TEXT_MAX = 1024


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Dtype and shape of a sample's array, whose elements are in row-major order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"

    @property
    def length_bytes(self) -> int:
        """Length of the sample in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def texts(self) -> tuple[str, str]:
        """Dtype and shape as the two columns have them."""
        return self.dtype.str, ",".join(map(str, self.shape))

    @classmethod
    def of(cls, dtype: DTypeLike, shape: tuple[int, ...]) -> ArrayForm:
        """Return the form of arrays with a dtype and a shape.

        Raises:
            UsageError: there are no such arrays, or their dtype cannot be stored.
        """
        try:
            element = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError) as error:  # numpy evaluates some texts
            raise UsageError(f"describe arrays: expected a numpy dtype, got {dtype!r}") from error
        if not is_element(element):
            raise UsageError(
                f"describe arrays: expected a dtype of bool, numbers, times, or strings or bytes "
                f"of a fixed length, got {element}"
            )
        if len(shape) > DIMENSIONS_MAX or any(length < 0 for length in shape):
            raise UsageError(
                f"describe arrays: expected at most {DIMENSIONS_MAX} dimensions of 0 or more "
                f"elements, got {shape}"
            )
        # Too long for a sample unless a dimension is 0, and numpy refuses it even then.
        others = math.prod(length for length in shape if length)
        if 0 in shape and others * element.itemsize > SAMPLE_BYTES_MAX:
            raise UsageError(
                f"describe arrays: expected no elements in dimensions of at most "
                f"{SAMPLE_BYTES_MAX} bytes, got {element} of shape {shape}"
            )
        return cls(element, tuple(shape))

    @classmethod
    def parse(cls, dtype: str, shape: str) -> ArrayForm:
        """Parse the values of the two columns, as ``texts`` gives them.

        Raises:
            UsageError: they describe no array.
        """
        lengths = shape.split(",") if shape else []
        if len(dtype) > _TEXT_MAX or len(shape) > _TEXT_MAX:
            raise UsageError("describe arrays: expected a short dtype and shape, got long text")
        if not all(length.isascii() and length.isdigit() for length in lengths):
            raise UsageError(f"describe arrays: expected lengths with commas, got {shape!r}")
        return cls.of(dtype, tuple(map(int, lengths)))


def is_element(dtype: np.dtype[Any]) -> bool:
    """Return True if arrays of samples can have elements of a dtype.

    Elements of a type that numpy lacks, such as bfloat16 in an NPY file, are bytes of a fixed
    number (``|V2``), as numpy reads them; ``array.view(ml_dtypes.bfloat16)`` gives them a type.
    """
    is_opaque = dtype.type is np.void and dtype.names is None and dtype.subdtype is None
    return (dtype.kind in KINDS or is_opaque) and dtype.itemsize > 0


def forms_of(
    table: FieldColumns, indices: NDArray[Any]
) -> tuple[list[ArrayForm], NDArray[np.intp]]:
    """Return the forms of some samples' arrays.

    Args:
        table: columns of the dataset.
        indices: indices of the samples, ``[n]``, at least one.

    Returns:
        The different forms, and the position of each sample's form among them, ``intp[n]``.

    Raises:
        UsageError: a sample is no array; the message names it.
        FormatError: the columns have invalid values.
    """
    if DTYPE_COLUMN not in table or SHAPE_COLUMN not in table:
        raise UsageError(
            f"read arrays: expected the columns {DTYPE_COLUMN} and {SHAPE_COLUMN}, which say what "
            f"arrays samples are, got none in the dataset"
        )
    dtypes, dtype_codes = table.distinct(DTYPE_COLUMN, indices)
    shapes, shape_codes = table.distinct(SHAPE_COLUMN, indices)
    pairs, chosen = number_distinct(dtype_codes * len(shapes) + shape_codes)
    forms = []
    for number, pair in enumerate(pairs.tolist()):
        dtype, shape = dtypes[pair // len(shapes)], shapes[pair % len(shapes)]
        if not dtype:
            at = int(np.argmax(chosen == number))
            raise UsageError(f"read arrays: expected arrays, got sample {int(indices[at])}: bytes")
        try:
            forms.append(ArrayForm.parse(dtype, shape))
        except UsageError as error:
            raise FormatError(f"read arrays: {error}") from error
    return forms, chosen
