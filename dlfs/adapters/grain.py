"""A dataset as a data source of Grain, for JAX and whatever else Grain feeds.

``Source`` is a ``RandomAccessDataSource``: a length, and elements by position, which are the
samples' bytes or what ``decode`` makes of them::

    source = Source(dataset, decode=lambda index, sample: np.frombuffer(sample, np.uint8))
    data = grain.MapDataset.source(source).seed(7).shuffle().batch(256, batch_fn=np.stack)

Grain mostly asks for one element at a time. A batch is one read of the dataset where its indices
are batched, and then read::

    indices = grain.MapDataset.range(len(source)).seed(7).shuffle().batch(256)
    data = indices.map(source.__getitems__)

A source may be of some samples only, or of samples in an order that is given: ``where`` and
``order``. A weighted epoch is such an order, of as many draws as it has elements::

    draws = dataset.sequence(weights="weight", draws=10_000, seed=7, epoch=0).indices()
    data = grain.MapDataset.source(Source(dataset, order=draws))

Grain pickles a source for its worker processes: each opens the dataset for itself and shares the
sample directory. Its checkpoints compare sources by ``repr``, which names the dataset's UUID and
the samples chosen: a checkpoint of other samples is refused, wherever the volume is mounted.

Nothing here needs Grain itself. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import dlfs

T = TypeVar("T")


def as_bytes(_index: int, sample: memoryview) -> bytes:
    """The element that a sample is when nothing else is asked for: its bytes."""
    return bytes(sample)


class Source(Generic[T]):
    """The samples of a dataset by position: all of them by index, or those that were chosen.

    Args:
        dataset: that is read; it is not closed.
        decode: makes an element of an index in the dataset and the bytes of that sample, which it
            must not keep: they are lent. Picklable where Grain has worker processes.
        where: ``bool[n_samples]`` or indices: the samples to take, each once, in index order.
        order: indices, taken as they stand; one may stand in it more than once.

    Raises:
        UsageError: both are given, or they are out of range.

    Raises of what reads:
        IndexError: there is no such position.
        DlfsError: as ``Dataset.read``.
    """

    def __init__(
        self,
        dataset: dlfs.Dataset,
        decode: Callable[[int, memoryview], T] | None = None,
        *,
        where: ArrayLike | None = None,
        order: ArrayLike | None = None,
    ) -> None:
        self.dataset = dataset
        self._decode: Callable[[int, memoryview], Any] = decode or as_bytes
        self._order: NDArray[np.uint64] | None = None
        self._named = ""
        if where is not None or order is not None:
            chosen = dataset.sequence(shuffle=None, where=where, order=order).indices()
            self._order = np.sort(chosen) if order is None else chosen
            state = dataset.batches(1, order=self._order).state()
            self._named = f", selection {state['selection']}"

    def __repr__(self) -> str:
        dataset = self.dataset
        return f"Source({dataset.name!r} version {dataset.version}, {dataset.uuid}{self._named})"

    def __len__(self) -> int:
        return len(self.dataset) if self._order is None else len(self._order)

    def _index(self, position: SupportsIndex) -> int:
        """The index in the dataset of an element; negative positions count from the end."""
        number = position.__index__()
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count} in {self!r}")
        return number % count if self._order is None else int(self._order[number])

    def __getitem__(self, index: SupportsIndex) -> T:
        found = self._index(index)
        element: T = self._decode(found, memoryview(self.dataset[found]))
        return element

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[T]:
        """Elements of one read, in the order asked for."""
        batch = self.dataset[[self._index(index) for index in indices]]
        found = batch.indices.tolist()
        return [self._decode(at, view) for at, view in zip(found, batch, strict=True)]

    _getitems = __getitems__  # what Grain calls it
