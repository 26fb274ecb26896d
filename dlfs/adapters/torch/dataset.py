"""``SampleDataset``: a map-style dataset for DataLoader, which reads a whole batch by one call."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from dlfs import Batch, Dataset, DatasetView
from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.forms import ElementType
from dlfs.adapters.torch.labels import Labels, bind_labels
from dlfs.adapters.torch.samples import THREADS, Recipe, Transform, TransformPool
from dlfs.adapters.torch.tensors import SampleViews, jagged_of
from dlfs.adapters.torch.worker_memory import WorkerMemory
from dlfs.base.forks import OwnerProcess
from dlfs.errors import UsageError

_NO_COUNT = -1
"""Value of the count of samples without an epoch, after ``set_epoch`` or the warning."""


class EpochIndex(int):
    """Index of a sample that a sampler took in an epoch.

    Attributes:
        epoch: the epoch.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        """Make the index."""
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochIndex, (int(self), self.epoch)


_with_context: weakref.WeakSet[SampleDataset] = weakref.WeakSet()
"""Datasets of this process whose transforms need the epoch of each sample."""


def with_epoch(indices: list[int], epoch: int) -> list[int]:
    """Return the indices with their epoch, if a ``SampleDataset`` of this process needs it."""
    if not _with_context:
        return indices
    return [EpochIndex(index, epoch) for index in indices]


class SampleDataset(TorchDataset[Any]):
    """Samples of a dataset by index: as tensors, or as the results of a transform.

    DataLoader requests a whole batch at a time. Samples of different lengths need
    ``collate_fn=collate_list`` or ``collate_jagged``. Samples with fields are dictionaries, which
    DataLoader collates by the types of the fields.

    This class does not know the order of an epoch. The context of a transform has the epoch of the
    sampler, if that is a ``DistributedSampler`` or ``DistributedBatchSampler`` of this package: its
    indices bring it along. With other samplers it has that of the last ``set_epoch``, 0 before: a
    warning says so once more samples were taken than there are. The context has no position. A
    sample that a sampler draws twice in an epoch therefore has the same seed both times.

    Args:
        dataset: dataset to read from, or a view of several.
        transform: called with the bytes of each sample, a read-only ``memoryview``, with its tensor
            if it is an array, or with a dictionary of its fields; in ``threads`` threads at once.
        with_context: True to call ``transform(sample, context)``, with a ``SampleContext``.
        seed: seed of the contexts.
        labels: maps indices to labels: ``FolderLabels(dataset)``, ``ColumnLabels(dataset, name)``.
            Labels of a dataset follow its samples into a view; labels of other samples are refused.
            Items are then (sample, label) pairs.
        dtype: element type of every sample, of numpy or PyTorch, such as ``torch.bfloat16``;
            ``uint8`` by default.
        shape: shape of every sample; -1 for a first dimension that varies. One dimension by
            default.
        arrays: True if the dataset describes the array of each sample; instead of ``dtype``.
        threads: threads that run the transform, in each process.

    Raises:
        UsageError: an argument is out of range.

    Threads: one at a time. It may be used in forked and spawned processes.
    """

    def __init__(
        self,
        dataset: Dataset | DatasetView,
        *,
        transform: Transform | None = None,
        with_context: bool = False,
        seed: int = 0,
        labels: Labels | None = None,
        dtype: ElementType | None = None,
        shape: tuple[int, ...] | None = None,
        arrays: bool = False,
        threads: int = THREADS,
    ) -> None:
        self.dataset = dataset
        self._recipe = Recipe(
            transform=transform,
            with_context=with_context,
            labels=bind_labels(labels, dataset),
            dtype=dtype,
            shape=shape,
            arrays=arrays,
            fields=bool(dataset.fields),
            threads=threads,
        )
        self._seed = seed
        self._epoch = WorkerMemory(2)  # the epoch, and samples that were taken without one
        self._pool: TransformPool | None = None
        self._owner = OwnerProcess()
        if with_context:
            _with_context.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        if self._recipe.with_context:
            _with_context.add(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of contexts, also in worker processes that are running.

        Call it before each iteration of the DataLoader, as for samplers.

        Raises:
            UsageError: it is negative.
        """
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        self._epoch.words[:] = epoch, _NO_COUNT

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            TransformError: the transform raised.
            DlfsError: it cannot be read.
        """
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count} in dataset {self.dataset.name!r}")
        return self.__getitems__([index if index >= 0 else index + count])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several indices 0..N-1, read by one call.

        Raises:
            TransformError: the transform raised.
            DlfsError: a sample cannot be read.
        """
        batch = self.dataset.read(np.asarray(indices, np.int64))
        if self._recipe.has_work:
            pool = self._opened_pool()
            samples = pool.finish(pool.start(batch, self._contexts(batch, indices)))
        elif self._recipe.is_raw:
            # A copy: a worker that sends a view sends the whole memory behind it.
            samples = SampleViews(jagged_of(batch))
        else:
            samples = list(self._recipe.items(batch, own=True))
        labels = self._recipe.label(batch)
        if isinstance(labels, torch.Tensor):
            is_class = labels.dim() == 1 and labels.dtype in (torch.int64, torch.bool)
            # Tensors keep the width of floats, and vectors together, when they are collated.
            labels = labels.tolist() if is_class else list(labels)
        return samples if labels is None else list(zip(samples, labels, strict=True))

    def _contexts(self, batch: Batch, indices: Sequence[int]) -> list[SampleContext] | None:
        if not self._recipe.with_context:
            return None
        epoch = int(self._epoch.words[0])
        self._count_without_epoch(sum(not isinstance(asked, EpochIndex) for asked in indices))
        return [
            SampleContext(
                seed=self._seed,
                epoch=getattr(asked, "epoch", epoch),
                index=index,
                position=None,
            )
            for index, asked in zip(batch.indices.tolist(), indices, strict=True)
        ]

    def _count_without_epoch(self, count: int) -> None:
        """Count samples that were taken without an epoch; warn once some must have come again."""
        words = self._epoch.words
        if not count or words[1] == _NO_COUNT:
            return
        words[1] += count
        if words[1] > len(self):
            words[1] = _NO_COUNT
            warnings.warn(
                "a SampleDataset with_context gives samples the same random numbers in every "
                "epoch, because no epoch was set: call its set_epoch(epoch) before each epoch, or "
                "use a DistributedSampler or DistributedBatchSampler of dlfs.adapters.torch",
                stacklevel=2,
            )

    def _opened_pool(self) -> TransformPool:
        if self._pool is None or not self._owner.is_current():
            self._pool = TransformPool(self._recipe, self.dataset)  # a fork has no threads
            self._owner = OwnerProcess()
        return self._pool

    def close(self) -> None:
        """End the threads of the transform; the dataset stays open. Idempotent."""
        if self._pool is not None and self._owner.is_current():
            self._pool.close()
        self._pool = None
