"""The fields of the samples of a batch: each one over the batch's memory, or as values.

``FieldParts`` has the places of the fields, and ``PartMemory`` is the memory of one field's bytes,
from which ``Batch`` makes a batch of that field. ``decode_part`` makes values of such a batch.

Threads: any; all objects are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.base.wording import list_names, quote
from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldPlaces, Fields

_SMALL_BYTES = 256
"""Longest parts that one indexing operation copies to an array, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PartMemory:
    """A part of each sample of a batch, or the whole samples, with what ``Batch`` uses of them.

    Attributes:
        memory: memory of the parts.
        offsets: offset of each part in the memory, in bytes, ``int64[n]``.
        lengths: length of each part in bytes, ``int64[n]``; -1 for one that failed.
        indices: index of each sample, ``uint64[n]``.
    """

    memory: memoryview
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    indices: NDArray[np.uint64]

    def gather(self, destination: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> None:
        """Copy every part to its offset in ``destination``."""
        source = np.frombuffer(self.memory, np.uint8)
        ranges = zip(self.offsets.tolist(), self.lengths.tolist(), offsets.tolist(), strict=True)
        for start, size, to in ranges:
            if size > 0:
                destination[to : to + size] = source[start : start + size]

    def stack(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Copy parts of equal length to one array, ``dtype[n, *shape]``."""
        count, length = len(self.offsets), math.prod(shape) * dtype.itemsize
        if length <= _SMALL_BYTES:
            source = np.frombuffer(self.memory, np.uint8)
            packed = source[self.offsets[:, None] + np.arange(length)]
        else:
            packed = np.empty((count, length), np.uint8)
            self.gather(packed.reshape(-1), np.arange(count, dtype=np.uint64) * np.uint64(length))
        stacked: NDArray[Any] = packed.reshape(-1).view(dtype).reshape((count, *shape))
        return stacked

    def pack(self) -> NDArray[np.uint8]:
        """Copy the parts to one array, one after the other."""
        ends = np.cumsum(self.lengths)
        packed = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        self.gather(packed, (ends - self.lengths).view(np.uint64))
        return packed


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


def decode_part(part: PartMemory, name: str, places: FieldPlaces, dataset: str) -> Any:
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
    if places.shapes is not None:
        dtype, memory = kind.dtype, part.memory
        shapes = zip(places.shapes.tolist(), part.offsets.tolist(), strict=True)
        return [np.ndarray(shape, dtype, memory, start) for shape, start in shapes]
    ends = part.offsets + part.lengths
    ranges = list(zip(part.offsets.tolist(), ends.tolist(), strict=True))
    try:
        return [str(part.memory[start:end], "utf-8") for start, end in ranges]
    except UnicodeDecodeError:  # find the sample
        where = dataset, name, part.indices
        views = (part.memory[start:end] for start, end in ranges)
        return [decode_value(view, places, at, where) for at, view in enumerate(views)]


def decode_value(
    view: memoryview,
    places: FieldPlaces,
    position: int,
    where: tuple[str, str, NDArray[np.uint64]],
) -> Any:
    """Return the value of a field of one sample.

    Args:
        view: bytes of the field.
        places: places of the field in the samples of the batch.
        position: position of the sample in the batch.
        where: names of dataset and field, and the indices of the samples, for errors.

    Raises:
        FormatError: a text is not UTF-8.
    """
    try:
        return places.type.decode(view, places.shape(position))
    except UnicodeDecodeError as error:
        dataset, name, indices = where
        raise FormatError(
            f"dataset {quote(dataset)}: read field {name!r}: sample {int(indices[position])}: "
            f"{error}"
        ) from error


def join_ragged(
    part: PartMemory, name: str, places: FieldPlaces, dataset: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Copy arrays that differ in the first dimension one after the other.

    Returns:
        The elements, ``dtype[sum of lengths, ...]``, and the offsets, ``int64[n + 1]``.

    Raises:
        UsageError: the arrays have no dimension, or another one varies.
    """
    kind = places.type
    firsts, row = _rows(places, len(part.indices))
    if firsts is None:
        raise UsageError(
            f"join field {name!r} of dataset {quote(dataset)}: expected arrays that differ in the "
            f"first dimension only, got {kind}"
        )
    offsets = np.zeros(len(part.indices) + 1, np.int64)
    np.cumsum(firsts, out=offsets[1:])
    return part.pack().view(kind.dtype).reshape((int(offsets[-1]), *row)), offsets


def _rows(places: FieldPlaces, count: int) -> tuple[NDArray[np.int64] | None, tuple[int, ...]]:
    """Return the length of each array's first dimension, and the lengths of the others.

    The first is None if arrays differ in another dimension, or have none.
    """
    kind = places.type
    if kind.kind != "array" or not kind.shape:
        return None, ()
    if places.shapes is None:
        return np.full(count, kind.shape[0], np.int64), tuple(n or 0 for n in kind.shape[1:])
    if not count:
        return np.empty(0, np.int64), tuple(length or 0 for length in kind.shape[1:])
    row = places.shapes[0, 1:]
    if np.any(places.shapes[:, 1:] != row):
        return None, ()
    return places.shapes[:, 0], tuple(row.tolist())


def name_types(fields: Fields) -> dict[str, str]:
    """Return the text of each field's type by name."""
    return {name: str(kind) for name, kind in fields.items()}
