"""A batch's samples as tensors.

Tensors over a batch's memory are not copies: they keep the memory, which the reader shares between
batches, lent to them. Treat them as read-only, as everything that DLFS gives is: PyTorch has no
such tensors, and a sample changed in place would be changed for later batches too. ``Jagged`` and
stacked samples are copies, and the caller's own.

What is sent to another process, as DataLoader's workers do, is packed first: one tensor for a
batch's bytes, not the whole of the reader's memory, nor one for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Batch
from dlfs.errors import UsageError


class _Lent:
    """Memory as numpy's array interface tells it, without the read-only mark.

    PyTorch warns of every array with that mark, and has no read-only tensors. The array made of
    this object keeps it, and with it the memory.
    """

    def __init__(self, memory: npt.NDArray[Any]) -> None:
        self._memory = memory
        interface = dict(memory.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def view_memory(batch: Batch) -> torch.Tensor:
    """The memory that a batch's samples lie in, ``uint8[...]``, without a copy.

    Raises:
        ClosedError: the batch was released.
    """
    if len(batch) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Lent(batch.data)))


class SampleViews(list[torch.Tensor]):
    """The samples of a batch, ``uint8[length]`` each, without a copy; read-only by convention.

    Pickled, it becomes one tensor, and views of it again where it is loaded.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _split, _join(self)


def _join(samples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    values = torch.cat(list(samples)) if samples else torch.empty(0, dtype=torch.uint8)
    return values, [len(sample) for sample in samples]


def _split(values: torch.Tensor, lengths: list[int]) -> SampleViews:
    return SampleViews(torch.split(values, lengths) if lengths else [])


def view_samples(batch: Batch) -> SampleViews:
    """Each sample of a batch as a tensor over its memory.

    Raises:
        ClosedError: the batch was released.
    """
    memory = view_memory(batch)
    spans = zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True)
    return SampleViews(memory[offset : offset + length] for offset, length in spans)


def view_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array over a batch's memory as a tensor; a copy only where its elements are not aligned.

    Raises:
        TypeError: PyTorch has no such type.
    """
    if not array.size or not array.flags.aligned:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_Lent(array)))


@dataclass(frozen=True, eq=False)
class Jagged:
    """Samples of different lengths, one behind the other.

    Attributes:
        values: ``[sum of lengths, ...]``.
        offsets: ``int64[n + 1]``: sample i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> torch.Tensor:
        """One sample, a view.

        Raises:
            IndexError: there is no such position.
        """
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        position %= len(self)
        return self.values[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        lengths = self.offsets.diff().tolist()
        return iter(torch.split(self.values, lengths) if lengths else ())

    def nested(self) -> torch.Tensor:
        """The same as one of PyTorch's nested tensors, of the jagged layout, without a copy."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def padded(self, value: float = 0) -> torch.Tensor:
        """A copy with every sample as long as the longest: ``[n, longest, ...]``."""
        if len(self) == 0:
            return self.values.new_empty((0, 0, *self.values.shape[1:]))
        return torch.nn.utils.rnn.pad_sequence(list(self), batch_first=True, padding_value=value)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Jagged:
        """Apply a function to values and offsets, such as one that moves them."""
        return Jagged(function(self.values), function(self.offsets))


@dataclass(frozen=True, eq=False)
class TensorBatch:
    """What a ``Loader`` gives at each step.

    Attributes:
        indices: ``int64[n]``, of the samples.
        samples: as ``collate`` made them.
        labels: ``[n]``, or None.
        state: where the epoch stands behind this batch: what ``Loader.load_state_dict`` takes.
        failures: samples that were skipped or replaced; empty unless ``on_error`` lets them pass.
    """

    indices: torch.Tensor
    samples: Any
    labels: torch.Tensor | None
    state: dict[str, Any]
    failures: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TensorBatch:
        """Apply a function to every tensor in it."""
        return replace(
            self,
            indices=function(self.indices),
            samples=_map(self.samples, function),
            labels=None if self.labels is None else function(self.labels),
        )

    def to(self, device: Any, *, non_blocking: bool = False) -> TensorBatch:
        """The same with all tensors on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TensorBatch:
        """The same in page-locked memory, from which an accelerator copies by itself."""
        return self.map(lambda tensor: tensor.pin_memory())


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors in a value of the usual containers; leave all else."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, SampleViews):
        values, lengths = _join(value)
        return list(_split(function(values), lengths))
    if isinstance(value, Jagged):
        return value.map(function)
    if isinstance(value, dict):
        return {key: _map(one, function) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(one, function) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(one, function) for one in value)
    return value


def jagged_of(batch: Batch) -> Jagged:
    """Copy a batch's samples one behind the other.

    Raises:
        ClosedError: the batch was released.
    """
    values, offsets = batch.pack()
    return Jagged(torch.from_numpy(values), torch.from_numpy(offsets))


def collate_list(items: Sequence[Any]) -> Any:
    """A collate function for DataLoader: samples of any lengths stay a list.

    Args:
        items: samples, or (sample, label) pairs.

    Returns:
        The list of samples, or it and the labels as ``int64[n]``.
    """
    return _collate(items, list)


def collate_jagged(items: Sequence[Any]) -> Any:
    """A collate function for DataLoader: samples of any lengths as one ``Jagged``.

    Args:
        items: samples, tensors of one or more dimensions, or (sample, label) pairs.

    Returns:
        The samples, or they and the labels as ``int64[n]``.

    Raises:
        UsageError: the samples are no tensors that can stand one behind the other.
    """
    return _collate(items, make_jagged)


def _collate(items: Sequence[Any], make: Callable[[Sequence[Any]], Any]) -> Any:
    if items and isinstance(items[0], tuple):
        samples, labels = zip(*items, strict=True)
        return make(samples), torch.as_tensor(labels)
    return make(items)


def make_jagged(samples: Sequence[torch.Tensor]) -> Jagged:
    """Copy tensors one behind the other.

    Raises:
        UsageError: they are no tensors, or not of the same dimensions but for the first.
    """
    for position, sample in enumerate(samples):
        if not _fits(sample, samples[0]):
            raise UsageError(
                "collate samples as jagged: expected tensors that differ in the first dimension "
                f"only, got {_describe(sample)} at position {position} behind "
                f"{_describe(samples[0])}"
            )
    values, lengths = _join(samples)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    return Jagged(values, offsets)


def view_together(samples: Sequence[Any]) -> list[Any]:
    """Samples as a list: one that is sent as one tensor, where they can stand in one."""
    if samples and all(_fits(sample, samples[0]) for sample in samples):
        return SampleViews(samples)
    return list(samples)


def _fits(sample: object, first: object) -> bool:
    """Whether it is a tensor that can stand behind the first."""
    return (
        isinstance(sample, torch.Tensor)
        and isinstance(first, torch.Tensor)
        and sample.dim() > 0
        and (sample.dtype, sample.shape[1:]) == (first.dtype, first.shape[1:])
    )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__
