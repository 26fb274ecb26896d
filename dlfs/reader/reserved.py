"""Checks the reserved columns of samples that are being written.

``dlfs:dtype`` and ``dlfs:shape`` describe arrays, ``dlfs:fields`` and ``dlfs:field:...`` fields.
What these columns say of a sample must fit its bytes, since a dataset whose columns do not could be
written, but not read. ``AttributesBuilder`` checks their names and types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes.builder import FIELD_PREFIX
from dlfs.errors import FormatError, NotFoundError, UsageError
from dlfs.fields import FIELDS_COLUMN, fields_of_json, place_fields
from dlfs.fields.arrays import DTYPE_COLUMN, SHAPE_COLUMN, ArrayForm
from dlfs.format.constants import RESERVED_PREFIX
from dlfs.format.paths import display


def has_reserved(attributes: Mapping[str, Any]) -> bool:
    """Return True if attributes have a reserved name."""
    return any(name.startswith(RESERVED_PREFIX) for name in attributes)


def check_no_reserved(attributes: Mapping[str, Any], path: bytes) -> None:
    """Check that no attribute of a sample with fields has a reserved name.

    Raises:
        UsageError: one has.
    """
    if has_reserved(attributes):
        raise UsageError(
            f"add the sample {display(path)!r}: expected no attributes with reserved names next to "
            f"fields, got {', '.join(attributes)}"
        )


def check_reserved(
    attributes: Mapping[str, ArrayLike], lengths: NDArray[np.int64], dataset: str
) -> None:
    """Check that the reserved columns of samples fit their bytes.

    Args:
        attributes: ``[n]`` values of each column.
        lengths: length of each sample in bytes, ``int64[n]``.
        dataset: name of the dataset, for errors.

    Raises:
        UsageError: they do not; the message names the first sample by its number in ``lengths``.
    """
    columns = _GivenColumns(
        {
            name: np.asarray(values)
            for name, values in attributes.items()
            if name.startswith(RESERVED_PREFIX)
        }
    )
    if not columns or not len(lengths):
        return
    try:
        _check_arrays(columns, lengths)
        _check_fields(columns, lengths, dataset)
    except (FormatError, UsageError) as error:
        raise UsageError(f"add attributes of reserved names: {error}") from error


def _check_arrays(columns: _GivenColumns, lengths: NDArray[np.int64]) -> None:
    given = [name for name in (DTYPE_COLUMN, SHAPE_COLUMN) if name in columns]
    if len(given) == 1:
        raise UsageError(f"expected {DTYPE_COLUMN!r} and {SHAPE_COLUMN!r}, got only {given[0]!r}")
    if not given:
        return
    pairs = [tuple(map(str, pair)) for pair in zip(*(columns[name] for name in given), strict=True)]
    wanted = {pair: _length_of(*pair) for pair in dict.fromkeys(pairs)}
    for i, (pair, length) in enumerate(zip(pairs, lengths.tolist(), strict=True)):
        if wanted[pair] not in (None, length):
            raise UsageError(
                f"sample {i}: expected {wanted[pair]} bytes of an array "
                f"{pair[0]!r} of shape {pair[1]!r}, got {length}"
            )


def _length_of(dtype: str, shape: str) -> int | None:
    """Return the length of an array in bytes; None for a sample that is none."""
    return ArrayForm.parse(dtype, shape).length_bytes if dtype else None


def _check_fields(columns: _GivenColumns, lengths: NDArray[np.int64], dataset: str) -> None:
    others = [name for name in columns if name.startswith(FIELD_PREFIX)]
    if others and FIELDS_COLUMN not in columns:
        raise UsageError(f"expected {FIELDS_COLUMN!r} with {min(others)!r}, got no such column")
    if FIELDS_COLUMN not in columns:
        return
    texts, codes = columns.distinct(FIELDS_COLUMN, np.arange(len(lengths)))
    for number, text in enumerate(texts):
        if text:
            samples = np.flatnonzero(codes == number)
            fields = fields_of_json(text)
            place_fields(columns, fields, samples, lengths[samples], dataset)


class _GivenColumns(dict[str, "NDArray[Any]"]):
    """The columns that a caller gives, as ``FieldColumns``."""

    def column(self, name: str, indices: ArrayLike) -> NDArray[Any]:
        if name not in self:
            raise NotFoundError(f"expected the column {name!r}, got none")
        found: NDArray[Any] = self[name][np.asarray(indices, np.int64)]
        return found

    def distinct(self, name: str, indices: ArrayLike) -> tuple[list[str], NDArray[np.intp]]:
        numbers: dict[str, int] = {}
        values = map(str, self.column(name, indices).tolist())
        codes = [numbers.setdefault(value, len(numbers)) for value in values]
        return list(numbers), np.array(codes, np.intp)

    def parsed(
        self, name: str, indices: ArrayLike, parse: Callable[[list[str]], NDArray[Any]]
    ) -> NDArray[Any]:
        texts, codes = self.distinct(name, indices)
        return parse(texts)[codes]
