"""Finds the part of each sample that has some of its fields, and the CRC32C of the part.

A *span* is the smallest range of consecutive fields with the chosen ones. The reserved columns have
the CRC32C of each field. Those of a span are combined, with the zeroes in the gaps between fields,
so that a reader verifies the part without the rest of the sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import combine_crc32c, crc32c
from dlfs.errors import FormatError
from dlfs.fields.layout import FieldColumns, FieldSpan, crc_column, misfit, place_each
from dlfs.fields.types import ALIGNMENT_MAX, Fields

_ZERO_CRCS = np.array([crc32c(bytes(size)) for size in range(ALIGNMENT_MAX)], np.uint32)
"""CRC32C of the zeroes in a gap between two fields, by their number."""


def find_span(fields: Fields, chosen: Iterable[str]) -> FieldSpan:
    """Return the smallest range of consecutive fields that has the chosen ones; at least one."""
    names = list(fields)
    numbers = [names.index(name) for name in chosen]
    return tuple(names[min(numbers) : max(numbers) + 1])


def has_checksums(columns: FieldColumns, span: FieldSpan) -> bool:
    """Return True if the CRC32C of each field of a span is stored."""
    return all(crc_column(name) in columns for name in span)


def locate_span(
    columns: FieldColumns,
    fields: Fields,
    span: FieldSpan,
    lengths: NDArray[np.int64],
    dataset: str,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """Find the part of every sample of a dataset that has some consecutive fields.

    Args:
        columns: columns of the dataset.
        fields: fields of the samples.
        span: names of the consecutive fields.
        lengths: length of each sample in bytes, ``int64[n_samples]``.
        dataset: name of the dataset, for errors.

    Returns:
        For each sample the offset of the part, its length in bytes, ``int64[n_samples]``, and its
        CRC32C, ``uint32[n_samples]``.

    Raises:
        FormatError: a column is missing or malformed, or the fields do not fit a sample.
    """
    indices = np.arange(len(lengths), dtype=np.uint64)
    places = place_each(columns, fields, indices, dataset, last=span[-1])
    first, last = places[span[0]], places[span[-1]]
    ends = last.starts + last.lengths
    if np.any(ends > lengths):
        raise misfit(places, lengths, indices, dataset)
    crcs = _checksums(columns, span[0], indices, dataset)
    end = first.starts + first.lengths
    for name in span[1:]:
        place = places[name]
        gaps = place.starts - end
        if gaps.any():
            crcs = combine_crc32c(crcs, _ZERO_CRCS[gaps], gaps)
        crcs = combine_crc32c(crcs, _checksums(columns, name, indices, dataset), place.lengths)
        end = place.starts + place.lengths
    return first.starts, ends - first.starts, crcs


def _checksums(
    columns: FieldColumns, name: str, indices: NDArray[Any], dataset: str
) -> NDArray[np.uint32]:
    """Return the CRC32C of a field of each sample."""
    found = columns.column(crc_column(name), indices)
    if found.dtype != np.uint32:
        raise FormatError(
            f"dataset {dataset!r}: read field {name!r}: expected uint32 in {crc_column(name)}, "
            f"got {found.dtype}"
        )
    return found
