"""Finds the fields in the bytes of samples by the reserved columns of a dataset.

The fields of a sample lie one after the other in their order. Each begins at a multiple of its
alignment; zeroes fill the gap before it. The columns give what the types leave open: the length of
bytes and text, and the shape of an array with dimensions that vary. All of it comes from media and
is checked here: a value that disagrees with the type or with the sample's length is a FormatError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.errors import ClosedError, FormatError, NotFoundError, UsageError
from dlfs.fields.types import FIELDS_COLUMN, Fields, FieldType, Shape, fields_of_json
from dlfs.format.constants import SAMPLE_BYTES_MAX


def bytes_column(name: str) -> str:
    """Return the name of the column with a field's lengths in bytes."""
    return f"dlfs:field:{name}:bytes"


def shape_column(name: str) -> str:
    """Return the name of the column with a field's shapes."""
    return f"dlfs:field:{name}:shape"


def crc_column(name: str) -> str:
    """Return the name of the column with the CRC32C of a field's bytes."""
    return f"dlfs:field:{name}:crc32c"


FieldSpan = tuple[str, ...]
"""Names of consecutive fields in their order; empty for all fields."""


class FieldColumns(Protocol):
    """The columns of a dataset or view, as far as fields need them."""

    def __contains__(self, name: object) -> bool:
        """Return True if there is a column of this name."""

    def column(self, name: str, indices: ArrayLike) -> NDArray[Any]:
        """Return the values of some samples."""

    def distinct(self, name: str, indices: ArrayLike) -> tuple[list[str], NDArray[np.intp]]:
        """Return the distinct strings among some values of a column, and each sample's number."""

    def parsed(
        self, name: str, indices: ArrayLike, parse: Callable[[list[str]], NDArray[Any]]
    ) -> NDArray[Any]:
        """Return what a function makes of the strings of some samples, a row for each."""


@dataclass(frozen=True, slots=True, eq=False)
class FieldPlaces:
    """The places of one field in some samples.

    Attributes:
        type: type of the field.
        starts: offset of the field in each sample, in bytes, ``int64[n]``.
        lengths: length of the field in bytes, ``int64[n]``.
        shapes: shape of each array with dimensions that vary, ``int64[n, dimensions]``; else None.
    """

    type: FieldType
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shapes: NDArray[np.int64] | None = None

    def shape(self, position: int) -> Shape:
        """Return the shape of one sample's array; empty for other types."""
        return () if self.shapes is None else tuple(self.shapes[position].tolist())


def find_fields(columns: FieldColumns, indices: NDArray[Any], dataset: str) -> Fields:
    """Return the fields that some samples have; empty for samples without fields.

    Args:
        columns: columns of the dataset.
        indices: indices of the samples.
        dataset: name of the dataset, for errors.

    Raises:
        FormatError: the column is malformed.
        ClosedError: the dataset was closed before the column was loaded.
        UsageError: the samples have different fields, as those of different datasets.
    """
    if FIELDS_COLUMN not in columns:
        return {}
    try:
        texts, codes = columns.distinct(FIELDS_COLUMN, indices if len(indices) else [0])
    except ClosedError:
        raise
    except UsageError as error:
        if not len(indices):  # a dataset without samples
            return {}
        raise FormatError(f"dataset {dataset!r}: read {FIELDS_COLUMN}: {error}") from error
    if len(texts) > 1:
        other = int(np.argmax(codes != codes[0]))
        raise UsageError(
            f"dataset {dataset!r}: read fields: expected the same ones in all samples, got "
            f"{texts[codes[0]]!r} in sample {int(indices[0])} and {texts[codes[other]]!r} in "
            f"sample {int(indices[other])}"
        )
    try:
        return fields_of_json(texts[0]) if texts[0] else {}
    except UsageError as error:
        raise FormatError(f"dataset {dataset!r}: read {FIELDS_COLUMN}: {error}") from error


def place_fields(
    columns: FieldColumns,
    fields: Fields,
    indices: NDArray[Any],
    lengths: NDArray[np.int64],
    dataset: str,
    span: FieldSpan = (),
) -> dict[str, FieldPlaces]:
    """Find the fields in the bytes of some samples.

    Args:
        columns: columns of the dataset.
        fields: fields of the samples.
        indices: indices of the samples, ``[n]``.
        lengths: length of each sample in bytes, ``int64[n]``; with ``span`` that of its part.
        dataset: name of the dataset, for errors.
        span: names of consecutive fields if only the part of each sample with these was read;
            places count from the beginning of the part.

    Raises:
        FormatError: a column is missing or malformed, or the fields do not fit a sample; the
            message names the sample and the field.
    """
    if not fields:
        return {}
    places = place_each(columns, fields, indices, dataset, last=span[-1] if span else None)
    if span:
        first = places[span[0]].starts
        places = {name: replace(places[name], starts=places[name].starts - first) for name in span}
    *_, last = places.values()
    if not np.array_equal(last.starts + last.lengths, lengths):
        raise misfit(places, lengths, indices, dataset)
    return places


def place_each(
    columns: FieldColumns,
    fields: Fields,
    indices: NDArray[Any],
    dataset: str,
    *,
    last: str | None = None,
) -> dict[str, FieldPlaces]:
    """Find the fields of some samples up to the last one, or up to another one.

    The caller compares the places with the lengths of the samples.

    Raises:
        FormatError: a column is missing or malformed.
    """
    ends: NDArray[np.int64] = np.zeros(len(indices), np.int64)
    places = {}
    for name, kind in fields.items():
        alignment = kind.alignment_bytes
        starts = ends if alignment == 1 else -(-ends // alignment) * alignment
        sizes, shapes = measure_field(columns, name, kind, indices, dataset)
        ends = starts + sizes
        places[name] = FieldPlaces(kind, starts, sizes, shapes)
        if name == last:
            break
    return places


def measure_field(
    columns: FieldColumns, name: str, kind: FieldType, indices: NDArray[Any], dataset: str
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the length of a field of some samples in bytes, and the shapes of varying arrays.

    Raises:
        FormatError: a column is missing or malformed.
    """
    where = f"dataset {dataset!r}: read field {name!r}"
    if not kind.varies:
        return np.full(len(indices), kind.length_bytes, np.int64), None
    if kind.kind == "array":
        shapes = _shapes(columns, name, kind, indices, where)
        return shapes.prod(axis=1) * kind.dtype.itemsize, shapes
    return _sizes(columns, name, indices, where), None


def misfit(
    places: dict[str, FieldPlaces],
    lengths: NDArray[np.int64],
    indices: NDArray[Any],
    dataset: str,
) -> FormatError:
    """Return the error for fields that do not end where a sample ends; ends never fall."""
    for name, place in places.items():
        ends = place.starts + place.lengths
        outside = np.flatnonzero(ends > lengths)
        if len(outside):
            at = int(outside[0])
            return FormatError(
                f"dataset {dataset!r}: read field {name!r}: sample {int(indices[at])}: expected an "
                f"end in {int(lengths[at])} bytes, got byte {int(ends[at])}"
            )
    at = int(np.argmax(ends != lengths))
    return FormatError(
        f"dataset {dataset!r}: read fields: sample {int(indices[at])}: expected {int(ends[at])} "
        f"bytes up to the end of field {name!r}, got {int(lengths[at])}"
    )


def _sizes(
    columns: FieldColumns, name: str, indices: NDArray[Any], where: str
) -> NDArray[np.int64]:
    """Return the lengths of a field of bytes or text."""
    try:
        values = columns.column(bytes_column(name), indices)
    except NotFoundError as error:
        raise FormatError(f"{where}: {error}") from error
    if values.dtype.kind not in "iu":
        raise FormatError(f"{where}: expected integers in {bytes_column(name)}, got {values.dtype}")
    low, high = values.min(initial=0), values.max(initial=0)
    if low < 0 or high > SAMPLE_BYTES_MAX:
        at = int(np.argmax((values < 0) | (values > SAMPLE_BYTES_MAX)))
        raise FormatError(
            f"{where}: sample {int(indices[at])}: expected a length of 0 to {SAMPLE_BYTES_MAX} "
            f"bytes, got {int(values[at])}"
        )
    return values.astype(np.int64, copy=False)


def _shapes(
    columns: FieldColumns, name: str, kind: FieldType, indices: NDArray[Any], where: str
) -> NDArray[np.int64]:
    """Return the shape of each sample's array, ``int64[n, dimensions]``."""
    column = shape_column(name)
    try:
        return columns.parsed(column, indices, kind.parse_shapes)
    except NotFoundError as error:
        raise FormatError(f"{where}: {error}") from error
    except UsageError as error:
        return _parse_each(columns.column(column, indices), kind, indices, where, error)


def _parse_each(
    texts: NDArray[Any], kind: FieldType, indices: NDArray[Any], where: str, cause: UsageError
) -> NDArray[np.int64]:
    """Parse shapes of which some in the column are wrong; the error names the sample.

    The wrong ones may be those of other samples.
    """
    for at, text in enumerate(texts.tolist()):
        if not isinstance(text, str):
            raise FormatError(f"{where}: {cause}") from cause
        try:
            kind.parse_shape(text)
        except UsageError as error:
            raise FormatError(f"{where}: sample {int(indices[at])}: {error}") from error
    return kind.parse_shapes(texts.tolist())
