"""A dataset as a data source of Grain, for JAX and other users of Grain.

``Source`` is a ``RandomAccessDataSource``: it has a length and elements by position. An element is
the bytes of a sample, or the value that ``decode`` makes of them::

    source = Source(dataset, decode=lambda index, sample: np.frombuffer(sample, np.uint8))
    data = grain.MapDataset.source(source).seed(7).shuffle().batch(256, batch_fn=np.stack)

Grain usually asks for one element at a time. One read for each batch is faster. To get it, batch
the indices and then read them::

    indices = grain.MapDataset.range(len(source)).seed(7).shuffle().batch(256)
    data = indices.map(source.__getitems__)

``where``, ``weights`` and ``order`` choose samples as in ``Dataset.batches``. A weighted source has
the draws of one epoch, in their order; the next epoch is another source::

    source = Source(dataset, weights="weight", draws=10_000, seed=7, epoch=0)

Grain pickles a source for its worker processes. Each process opens the dataset for itself and
shares the sample directory. Grain's checkpoints compare sources by ``repr``, which names the
content digest of the dataset and the chosen samples. A checkpoint of other samples is therefore
refused, and one of a copy is taken, whatever the path of the volume. Grain itself divides positions
between shards and resumes them.

This module does not import Grain. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

import dlfs
from dlfs.epoch.options import EpochOptions, SelectionKeywords, make_options

T = TypeVar("T")


def as_bytes(_index: int, sample: memoryview) -> bytes:
    """Return the bytes of a sample: an element without ``decode``."""
    return bytes(sample)


class Source(Generic[T]):
    """The samples of a dataset by position: all of them by index, or the chosen ones.

    Args:
        dataset: dataset to read from, or a view; it is not closed. ``decode`` gets its indices.
        decode: makes an element from the index and the bytes of a sample. It must not keep the
            bytes, whose memory is reused. It must be picklable if Grain has worker processes.
        seed: seed of the draws.
        epoch: epoch of the draws.
        choice: ``where``, ``weights``, ``draws`` and ``order``, as ``Dataset.batches`` takes them;
            the samples of ``where`` are in index order.

    Raises:
        UsageError: an argument is out of range, or excludes another one.
        IndexError: ``__getitem__``: there is no such position.
        DlfsError: as ``Dataset.read``.
    """

    def __init__(
        self,
        dataset: dlfs.Dataset | dlfs.DatasetView,
        decode: Callable[[int, memoryview], T] | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
        **choice: Unpack[SelectionKeywords],
    ) -> None:
        self.dataset = dataset
        self._decode: Callable[[int, memoryview], Any] = decode or as_bytes
        self._order: NDArray[np.uint64] | None = None
        self._selection_text = ""
        options = make_options(Source, SelectionKeywords, choice, seed=seed, epoch=epoch)
        if options.has_choice:
            chosen = dataset.order_epoch(options).indices()
            in_index_order = options.order is None and options.weights is None
            self._order = np.sort(chosen) if in_index_order else chosen
            state = dataset.start_epoch(EpochOptions(order=self._order)).state()
            self._selection_text = f", selection {state['selection']}"

    def __repr__(self) -> str:
        dataset = self.dataset
        return f"Source({dataset.name!r}, {dataset.digests.content}{self._selection_text})"

    def __len__(self) -> int:
        return len(self.dataset) if self._order is None else len(self._order)

    def _index(self, position: SupportsIndex) -> int:
        """Return the sample index of an element; negative positions count from the end."""
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
        """Read several elements by one call, in the order of the argument."""
        batch = self.dataset.read([self._index(index) for index in indices])
        found = batch.indices.tolist()
        return [self._decode(at, view) for at, view in zip(found, batch, strict=True)]

    _getitems = __getitems__  # the name by which Grain calls it
