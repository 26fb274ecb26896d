"""A dataset as a data source of Grain, for JAX and whatever else Grain feeds.

``Source`` is a ``RandomAccessDataSource``: a length, and elements by position, which are the
samples' bytes or what ``decode`` makes of them::

    source = Source(dataset, decode=lambda index, sample: np.frombuffer(sample, np.uint8))
    data = grain.MapDataset.source(source).seed(7).shuffle().batch(256, batch_fn=np.stack)

Grain mostly asks for one element at a time. A batch is one read of the dataset where its indices
are batched, and then read::

    indices = grain.MapDataset.range(len(source)).seed(7).shuffle().batch(256)
    data = indices.map(source.__getitems__)

Grain pickles a source for its worker processes: each opens the dataset for itself and shares the
sample directory. Its checkpoints compare sources by ``repr``, which names the dataset's UUID: a
checkpoint of other samples is refused, wherever the volume is mounted.

Nothing here needs Grain itself. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar

import dlfs

T = TypeVar("T")


def as_bytes(_index: int, sample: memoryview) -> bytes:
    """The element that a sample is when nothing else is asked for: its bytes."""
    return bytes(sample)


class Source(Generic[T]):
    """The samples of a dataset by index.

    Args:
        dataset: that is read; it is not closed.
        decode: makes an element of an index and the bytes of its sample, which it must not keep:
            they are lent. Picklable where Grain has worker processes.

    Raises of what reads:
        IndexError: there is no such sample.
        DlfsError: as ``Dataset.read``.
    """

    def __init__(
        self, dataset: dlfs.Dataset, decode: Callable[[int, memoryview], T] | None = None
    ) -> None:
        self.dataset = dataset
        self._decode: Callable[[int, memoryview], Any] = decode or as_bytes

    def __repr__(self) -> str:
        dataset = self.dataset
        return f"Source({dataset.name!r} version {dataset.version}, {dataset.uuid})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: SupportsIndex) -> T:
        position = index.__index__()
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"sample {position} of {count} in {self!r}")
        position %= count
        element: T = self._decode(position, memoryview(self.dataset[position]))
        return element

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[T]:
        """Elements of one read, in the order asked for."""
        wanted = [index.__index__() for index in indices]
        batch = self.dataset[wanted]
        found = batch.indices.tolist()
        return [self._decode(at, view) for at, view in zip(found, batch, strict=True)]

    _getitems = __getitems__  # what Grain calls it
