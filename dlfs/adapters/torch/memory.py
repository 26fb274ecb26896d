"""The memory that the tensors of a ``Loader``'s batches are made in.

``HostMemory`` is ordinary memory, ``PinnedMemory`` is page-locked. ``DeviceMemory``
(``dlfs.adapters.torch.device``) is that of a GPU. A ``Recipe`` makes batches without a transform by
``pack`` and ``views``. ``give`` copies the other tensors, such as those that a transform made.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dlfs import Batch
from dlfs.adapters.torch.tensors import SampleViews, TensorBatch, map_tensors, view_samples
from dlfs.base.forks import OwnerProcess


class HostMemory:
    """Ordinary memory: tensors stay where they were made.

    Attributes:
        owner: process that made this object.
    """

    def __init__(self) -> None:
        self.owner = OwnerProcess()

    def pack(self, batch: Batch) -> torch.Tensor:
        """Copy the samples of a batch one after the other: ``uint8[sum of lengths]``.

        Raises:
            ClosedError: the batch was released.
        """
        values, _ = batch.pack()
        # An empty array becomes a tensor with stride 0, which has no views of other types.
        return torch.from_numpy(values) if len(values) else torch.empty(0, dtype=torch.uint8)

    def views(self, batch: Batch) -> SampleViews:
        """Return the samples of a batch one by one, without a copy where that is possible.

        Raises:
            ClosedError: the batch was released.
        """
        return view_samples(batch)

    def give(self, batches: Iterator[TensorBatch]) -> Iterator[TensorBatch]:
        """Yield batches with all of their tensors in this memory, each when it may be used."""
        return batches

    def close(self) -> None:
        """Release what is locked for this memory. Idempotent."""


class PinnedMemory(HostMemory):
    """Page-locked memory, from which accelerators copy asynchronously."""

    def pack(self, batch: Batch) -> torch.Tensor:
        """Copy the samples of a batch one after the other, by the processor."""
        lengths = np.maximum(batch.lengths, 0)
        ends = np.cumsum(lengths)
        values = self._staging(int(ends[-1]) if len(batch) else 0)
        batch.gather(values.numpy(), ends - lengths)
        return values

    def views(self, batch: Batch) -> SampleViews:
        """Return the samples of a batch as views of one packed tensor."""
        values, lengths = self.pack(batch), np.maximum(batch.lengths, 0).tolist()
        return SampleViews(torch.split(values, lengths) if lengths else [])

    def give(self, batches: Iterator[TensorBatch]) -> Iterator[TensorBatch]:
        """Yield batches with all of their tensors in this memory."""
        return map(self._place, batches)

    def _place(self, batch: TensorBatch) -> TensorBatch:
        return batch.map_values(self._place_value)

    def _place_value(self, value: Any) -> Any:
        """Copy tensors that lie elsewhere; samples of a list one after the other."""
        if isinstance(value, SampleViews) and all(map(self._is_placed, value)):
            return value
        return map_tensors(value, self._place_one)

    def _staging(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def _is_placed(self, value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or value.is_pinned()

    def _place_one(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()
