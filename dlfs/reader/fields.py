"""The fields of the samples of a batch: each one over the batch's memory, or as values.

``FieldParts`` has the places of the fields, and ``PartMemory`` is the memory of one field's bytes,
from which ``Batch`` makes a batch of that field. ``decode_part`` makes values of such a batch.

Threads: any; all objects are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldPlaces, Fields, FieldType
from dlfs.wording import list_names, quote

_SMALL_BYTES = 256
"""Longest parts of equal length that one indexing operation copies, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PartMemory:
    """A part of each sample of a batch, in the memory of the batch.

    Attributes:
        memory: memory of the batch.
        offsets: offset of each part in the memory, in bytes, ``int64[n]``.
        lengths: length of each part in bytes, ``int64[n]``.
        indices: index of each sample, ``uint64[n]``.
    """

    memory: memoryview
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    indices: NDArray[np.uint64]

    def gather(self, destination: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> None:
        """Copy every part to its offset in ``destination``."""
        source = np.frombuffer(self.memory, np.uint8)
        length = int(self.lengths[0]) if len(self.lengths) else 0
        if length <= _SMALL_BYTES and not np.any(self.lengths != length):
            run = np.arange(length)
            to = offsets.astype(np.int64)[:, None] + run
            destination[to] = source[self.offsets[:, None] + run]
            return
        ranges = zip(self.offsets.tolist(), self.lengths.tolist(), offsets.tolist(), strict=True)
        for start, size, to in ranges:
            destination[to : to + size] = source[start : start + size]


class PartBatch(Protocol):
    """A batch of one field, as far as decoding needs it."""

    @property
    def indices(self) -> NDArray[np.uint64]:
        """Index of each sample, ``uint64[n]``."""

    def __iter__(self) -> Iterator[memoryview]:
        """Iterate over the field's bytes of each sample."""

    def stack(self, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Copy samples of equal length to one array."""

    def pack(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Copy the samples to one array, one after the other."""


def pick_fields(fields: Mapping[str, Any], chosen: Iterable[str], dataset: str) -> tuple[str, ...]:
    """Return names of fields after a check.

    Raises:
        UsageError: there is no such field, no name, or a name occurs twice.
    """
    names = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for name in names:
        if name not in fields:
            raise no_field(name, fields, dataset)
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"read fields of dataset {quote(dataset)}: expected one field or more, each once, got "
            f"{', '.join(map(str, names)) or 'none'}"
        )
    return names


def no_field(name: object, fields: Mapping[str, Any], dataset: str) -> UsageError:
    """Return the error for a field that samples do not have."""
    there = list_names(fields, wanted=str(name)) if fields else "none: samples are bytes"
    return UsageError(
        f"read field {str(name)!r} of dataset {quote(dataset)}: no such field; there are: {there}"
    )


def decode_part(part: PartBatch, name: str, places: FieldPlaces, dataset: str) -> Any:
    """Return the values of one field: a list of str, one array, or a list of read-only arrays.

    Args:
        part: the field's bytes of each sample.
        name: name of the field, for errors.
        places: places of the field.
        dataset: name of the dataset, for errors.

    Raises:
        FormatError: a text is not UTF-8.
    """
    kind = places.type
    if kind.kind == "array" and not kind.varies:
        return part.stack(kind.dtype, tuple(length or 0 for length in kind.shape))
    return [
        decode_value(kind, view, places, at, (dataset, name, part.indices))
        for at, view in enumerate(part)
    ]


def decode_value(
    kind: FieldType,
    view: memoryview,
    places: FieldPlaces,
    position: int,
    where: tuple[str, str, NDArray[np.uint64]],
) -> Any:
    """Return the value of a field of one sample.

    Args:
        kind: type of the field.
        view: bytes of the field.
        places: places of the field in the samples of the batch.
        position: position of the sample in the batch.
        where: names of dataset and field, and the indices of the samples, for errors.

    Raises:
        FormatError: a text is not UTF-8.
    """
    try:
        return kind.decode(view, places.shape(position))
    except UnicodeDecodeError as error:
        dataset, name, indices = where
        raise FormatError(
            f"dataset {quote(dataset)}: read field {name!r}: sample {int(indices[position])}: "
            f"{error}"
        ) from error


def join_ragged(
    part: PartBatch, name: str, places: FieldPlaces, dataset: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Copy arrays that differ in the first dimension one after the other.

    Returns:
        The elements, ``dtype[sum of lengths, ...]``, and the offsets, ``int64[n + 1]``.

    Raises:
        UsageError: the arrays have no dimension, or another one varies.
    """
    kind = places.type
    if kind.kind != "array" or not kind.shape or None in kind.shape[1:]:
        varying = len({shape[1:] for shape in places.shapes}) > 1
        if kind.kind != "array" or not kind.shape or varying:
            raise UsageError(
                f"join field {name!r} of dataset {quote(dataset)}: expected arrays that differ in "
                f"the first dimension only, got {kind}"
            )
    row = tuple(length or 0 for length in kind.shape[1:])
    if places.shapes:
        row = places.shapes[0][1:]
    packed, _ = part.pack()
    offsets = np.zeros(len(part.indices) + 1, np.int64)
    np.cumsum(_first_lengths(places, len(part.indices)), out=offsets[1:])
    count = int(offsets[-1]) if math.prod(row) else 0
    values = packed.view(kind.dtype).reshape((count, *row)) if math.prod(row) else None
    if values is None:  # no elements: numpy cannot infer the number of rows
        values = np.empty((int(offsets[-1]), *row), kind.dtype)
    return values, offsets


def _first_lengths(places: FieldPlaces, count: int) -> NDArray[np.int64]:
    """Return the length of the first dimension of each sample's array."""
    if places.codes is None:
        return np.full(count, places.type.shape[0], np.int64)
    firsts = np.array([shape[0] for shape in places.shapes], np.int64)
    return firsts[places.codes]


def name_types(fields: Fields) -> dict[str, str]:
    """Return the text of each field's type by name."""
    return {name: str(kind) for name, kind in fields.items()}
