"""Compares two datasets by their directories and attributes, without reading samples.

Two samples of one path count as the same if their lengths and stored CRC32Cs are equal. Attributes
are compared by value, where the datasets have columns of one name and type; two NaNs are equal. The
order of packing, chunks and replicas do not count.

Paths are looked up in the native directory of the other dataset, a page at a time. Memory, in
addition to directories and columns: 8 bytes for each sample, and a page.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.dataset.dataset import Dataset
from dlfs.store.info import DatasetInfo

PAGE_SAMPLES = 1 << 16
"""Number of samples that are compared at a time."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DatasetDiff:
    """The differences of dataset ``b`` from dataset ``a``, all in the order of paths.

    Attributes:
        a: the first dataset.
        b: the second dataset.
        added: indices in ``b`` of the samples whose paths ``a`` does not have, ``int64[n]``.
        removed: indices in ``a`` of the samples whose paths ``b`` does not have, ``int64[n]``.
        changed: indices in ``a`` of the samples whose length or CRC32C differs, ``int64[n]``.
        attributes_changed: indices in ``a`` of samples of equal bytes with differing attributes.
        same_count: number of samples without any difference.
        columns_added: dtypes of the columns that only ``b`` has, by name.
        columns_removed: dtypes of the columns that only ``a`` has, by name.
        columns_retyped: dtypes in ``a`` and ``b`` of the columns whose types differ, by name.
        columns_changed: number of samples of both datasets whose values in a column differ, by the
            names of the columns that have any.
    """

    a: DatasetInfo
    b: DatasetInfo
    added: Indices
    removed: Indices
    changed: Indices
    attributes_changed: Indices
    same_count: int
    columns_added: dict[str, np.dtype[Any]]
    columns_removed: dict[str, np.dtype[Any]]
    columns_retyped: dict[str, tuple[np.dtype[Any], np.dtype[Any]]]
    columns_changed: dict[str, int]

    def __bool__(self) -> bool:
        """Return True if the datasets differ."""
        samples = (self.added, self.removed, self.changed, self.attributes_changed)
        columns = (self.columns_added, self.columns_removed, self.columns_retyped)
        return any(len(indices) for indices in samples) or any(columns)


def diff(a: Dataset, b: Dataset) -> DatasetDiff:
    """Compare two datasets or versions, of one volume or of two, without reading samples.

    Samples are the same if their paths, lengths and stored CRC32Cs are equal.

    Args:
        a: the first dataset, such as the older version.
        b: the second dataset.

    Raises:
        FormatError: a directory or a column is damaged.
        StaleError: a dataset was removed.
        DeviceError: a device failed.
    """
    return _Comparison(a, b).run()


class _Comparison:
    """One comparison of two datasets."""

    def __init__(self, a: Dataset, b: Dataset) -> None:
        self._a, self._b = a, b
        mine, yours = a.columns, b.columns
        types = {name: (mine[name], yours[name]) for name in mine if name in yours}
        self._columns = [name for name, (here, there) in types.items() if here == there]
        self._retyped = {name: both for name, both in types.items() if both[0] != both[1]}
        self._added = {name: dtype for name, dtype in yours.items() if name not in mine}
        self._removed = {name: dtype for name, dtype in mine.items() if name not in yours}
        self._counts = dict.fromkeys(self._columns, 0)

    def run(self) -> DatasetDiff:
        """Compare all samples."""
        match = np.full(len(self._a), -1, np.int64)
        is_new = np.ones(len(self._b), np.bool_)
        changed, only_attributes = [], []
        for first, paths in _pages(self._a):
            found = self._b.index_of(paths)
            match[first : first + len(paths)] = found
            both = np.flatnonzero(found >= 0)
            mine, yours = both + first, found[both]
            is_new[yours] = False
            differs = self._bytes_differ(mine, yours)
            changed.append(mine[differs])
            others_differ = self._attributes_differ(mine, yours)
            only_attributes.append(mine[others_differ & ~differs])
        removed = np.flatnonzero(match < 0)
        differing = sum(map(len, (removed, *changed, *only_attributes)))
        return DatasetDiff(
            a=self._a.info,
            b=self._b.info,
            added=np.flatnonzero(is_new),
            removed=removed,
            changed=_join(changed),
            attributes_changed=_join(only_attributes),
            same_count=len(match) - differing,
            columns_added=self._added,
            columns_removed=self._removed,
            columns_retyped=self._retyped,
            columns_changed={name: count for name, count in self._counts.items() if count},
        )

    def _bytes_differ(self, mine: Indices, yours: Indices) -> NDArray[np.bool_]:
        """Return True for each pair of samples whose lengths or checksums differ, ``bool[n]``."""
        a, b = self._a.directory, self._b.directory
        differs: NDArray[np.bool_] = a.lengths(mine) != b.lengths(yours)
        differs |= a.crcs(mine) != b.crcs(yours)
        return differs

    def _attributes_differ(self, mine: Indices, yours: Indices) -> NDArray[np.bool_]:
        """Return True for each pair of samples with a differing attribute, and count them."""
        any_differs = np.zeros(len(mine), np.bool_)
        for name in self._columns:
            ours, theirs = self._a.column(name, mine), self._b.column(name, yours)
            differs: NDArray[np.bool_] = np.asarray(ours != theirs, np.bool_)
            if ours.dtype.kind == "f":
                differs &= ~(np.isnan(ours) & np.isnan(theirs))
            if differs.ndim == 2:  # vectors
                differs = np.any(differs, axis=1)
            self._counts[name] += int(differs.sum())
            any_differs |= differs
        return any_differs


def _pages(dataset: Dataset) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the paths of a dataset in pages, with the index of the first."""
    for first in range(0, len(dataset), PAGE_SAMPLES):
        yield first, dataset.paths(first, min(PAGE_SAMPLES, len(dataset) - first))


def _join(pages: list[Indices]) -> Indices:
    return np.concatenate(pages) if pages else np.empty(0, np.int64)
