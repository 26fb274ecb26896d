"""The samples of a batch as tensors: ``TensorBatch``, ``Jagged``, ``SampleViews`` and collation.

Tensors over the memory of a batch are not copies. They pin memory of the reader, which other
batches may use as well. Treat them as read-only: PyTorch has no read-only tensors, and a sample
that is changed in place is changed for later batches, too. ``Jagged`` and stacked samples are
copies that belong to the caller.

DataLoader's workers send batches to another process. A batch is packed for that: one tensor with
its bytes, instead of the reader's whole memory or one tensor for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from dlfs import Batch
from dlfs.errors import UsageError

SAMPLES = "samples"
"""Key of a batch's samples, unless they are a dictionary with other keys."""

LABELS = "labels"
"""Key of a batch's labels."""


class _WritableView:
    """Array interface of a numpy array without its read-only mark.

    PyTorch warns of every read-only array. The array made of this object keeps it and its memory
    alive.
    """

    def __init__(self, memory: npt.NDArray[Any]) -> None:
        self._memory = memory
        interface = dict(memory.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def view_memory(batch: Batch) -> torch.Tensor:
    """Return the memory of a batch's samples as ``uint8[...]``, without a copy.

    Raises:
        ClosedError: the batch was released.
    """
    if len(batch) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_WritableView(batch.data)))


class SampleViews(list[Any]):
    """The samples of a batch one by one, as a list.

    Raw samples are ``uint8[length]`` views, without a copy, and read-only by convention. Tensors
    that differ only in their first dimension are pickled as one tensor, and are views of it after
    loading.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if _fit_together(self):
            return _split, _join(self)
        return SampleViews, (list(self),)

    def __copy__(self) -> SampleViews:
        return SampleViews(self)


def _join(samples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    values = torch.cat(list(samples)) if samples else torch.empty(0, dtype=torch.uint8)
    return values, [len(sample) for sample in samples]


def _split(values: torch.Tensor, lengths: list[int]) -> SampleViews:
    return SampleViews(torch.split(values, lengths) if lengths else [])


def view_samples(batch: Batch) -> SampleViews:
    """Return each sample of a batch as a tensor over its memory.

    Raises:
        ClosedError: the batch was released.
    """
    memory = view_memory(batch)
    ranges = zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True)
    return SampleViews(memory[offset : offset + length] for offset, length in ranges)


def view_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array over a batch's memory as a tensor; only unaligned elements are copied.

    Raises:
        TypeError: PyTorch has no such type.
    """
    if not array.size or not array.flags.aligned:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(np.asarray(_WritableView(array)))


@dataclass(eq=False)
class Jagged:
    """Samples of different lengths, one after the other.

    Attributes:
        values: elements of all samples, ``[sum of lengths, ...]``.
        offsets: ``int64[n + 1]``: sample i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> torch.Tensor:
        """Return one sample as a view.

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
        """Return a nested tensor of PyTorch with the jagged layout, without a copy."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def padded(self, value: float = 0) -> torch.Tensor:
        """Return a copy with every sample as long as the longest: ``[n, longest, ...]``."""
        if len(self) == 0:
            return self.values.new_empty((0, 0, *self.values.shape[1:]))
        return torch.nn.utils.rnn.pad_sequence(list(self), batch_first=True, padding_value=value)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Jagged:
        """Apply a function to values and offsets, such as one that moves them."""
        return Jagged(function(self.values), function(self.offsets))

    def to(self, device: Any, *, non_blocking: bool = False) -> Jagged:
        """Return a copy on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        """Return a copy in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())


class TensorBatch(dict[str, Any]):
    """The batch that a ``Loader`` gives at each step: a dictionary of model arguments.

    Its keys are ``samples``, and ``labels`` if the loader has labels. If ``collate`` makes a
    dictionary of the samples, such as one with ``pixel_values``, its keys replace ``samples``.
    Samples that stay a list (``SampleViews``) have no key, because frameworks slice every tensor of
    a list as if it were a batch. ``model(**batch)`` passes the keys and nothing else. Iteration
    gives the keys, as for any dictionary, but ``len(batch)`` is the number of samples. ``samples,
    labels = batch`` therefore does not unpack a batch: read its attributes, or make the loader with
    ``as_pairs=True``.

    Frameworks move, convert and slice the values, and make a new batch of the results. Such a batch
    has only the attributes that its keys give, and its ``failures`` are empty. Those that ``to``,
    ``pin_memory`` and ``copy.copy`` return have all attributes.

    Args:
        fields: values by key; instead of ``samples`` and ``labels``.
        samples: result of ``collate``.
        labels: labels of the samples, ``[n]``, or None.
        indices: indices of the samples, ``int64[n]``.
        state: state of the epoch behind this batch.
        failures: samples that were skipped or replaced.

    Attributes:
        indices: indices of the samples, ``int64[n]``.
        state: state of the epoch behind this batch, for ``Loader.load_state_dict``.
        failures: samples that were skipped or replaced; empty unless ``on_error`` allows failures.

    Raises:
        UsageError: ``collate`` made a dictionary with ``labels``, and the loader has labels, too.
    """

    indices: torch.Tensor
    state: dict[str, Any]
    failures: tuple[Any, ...]

    def __init__(
        self,
        fields: Mapping[str, Any] | None = None,
        /,
        *,
        samples: Any = None,
        labels: torch.Tensor | list[Any] | None = None,
        indices: torch.Tensor | None = None,
        state: dict[str, Any] | None = None,
        failures: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(_name_fields(samples, labels) if fields is None else fields)
        if isinstance(samples, SampleViews):
            self._list: list[Any] = samples
        if indices is not None:
            self.indices = indices
        if state is not None:
            self.state = state
        self.failures = failures

    # Comparing tensors gives tensors, which are neither true nor false.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    @property
    def samples(self) -> Any:
        """Result of ``collate``; a dictionary of samples is without its labels."""
        if "_list" in self.__dict__:
            return self._list
        others = {key: value for key, value in self.items() if key != LABELS}
        if not others:
            raise AttributeError(name="samples", obj=self)  # __getattr__ raises the full message
        return others[SAMPLES] if others.keys() == {SAMPLES} else others

    @property
    def labels(self) -> Any:
        """Labels of the samples, ``[n]``; None without labels."""
        return self.get(LABELS)

    def __len__(self) -> int:
        if "indices" in self.__dict__:
            return len(self.indices)
        return next((_count(value) for value in self.values()), 0)

    def __repr__(self) -> str:
        return f"TensorBatch({len(self)} samples, keys {list(self)})"

    def __getattr__(self, name: str) -> Any:
        if name in ("indices", "state", "samples"):
            raise AttributeError(
                f"read {name} of a batch: expected a batch as the loader gave it, got one that a "
                "framework made of its values; read it before, or take the state from the loader"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __missing__(self, key: object) -> Any:
        hint = ""
        if key == SAMPLES:
            hint = "; a list of samples has no key, read batch.samples"
        elif isinstance(key, int):
            hint = "; Loader(as_pairs=True) gives (samples, labels)"
        raise KeyError(f"read {key!r} of a batch: expected one of {list(self)}{hint}")

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TensorBatch:
        """Return a copy with a function applied to every tensor."""
        return self.map_values(lambda value: map_tensors(value, function))

    def map_values(self, function: Callable[[Any], Any]) -> TensorBatch:
        """Return a copy with a function applied to the indices and the value of every key."""
        made = copy(self)
        made.update({key: function(value) for key, value in self.items()})
        if "indices" in self.__dict__:
            made.indices = function(self.indices)
        if "_list" in self.__dict__:
            made._list = function(self._list)
        return made

    def to(self, device: Any, *, non_blocking: bool = False) -> TensorBatch:
        """Return a copy with all tensors on a device.

        Raises:
            UsageError: the argument is a dtype; indices and labels must not be converted.
        """
        if isinstance(device, torch.dtype):
            raise UsageError(
                f"move a batch: expected a device, got {device}; convert samples in the transform "
                "or with batch.samples.to"
            )
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TensorBatch:
        """Return a copy in page-locked memory, from which accelerators copy asynchronously."""
        return self.map(lambda tensor: tensor.pin_memory())


class RankBatch(TensorBatch):
    """A batch of a loader that takes the share of one rank among several.

    Accelerate reads a ``DataLoader`` over an iterable dataset with rank 0's loader, and splits each
    batch between the ranks. The shares of the other ranks would never be read. This type refuses
    that: before each batch, Accelerate sends a batch with ``TensorInformation`` values.

    Args:
        fields: values by key, as for ``TensorBatch``.
        given: keyword arguments of ``TensorBatch``.

    Raises:
        UsageError: the batch is to be split between ranks; or as ``TensorBatch``.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **given: Any) -> None:
        super().__init__(fields, **given)
        _refuse_split(self.values())


class Pair(tuple[Any, Any]):
    """The batch ``(samples, labels)`` of a loader with ``as_pairs``."""

    __slots__ = ()


class RankPair(Pair):
    """The batch ``(samples, labels)`` of one rank among several; refuses as ``RankBatch`` does.

    Raises:
        UsageError: the batch is to be split between ranks.
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[Any]) -> RankPair:
        """Make the pair; see the class."""
        made = super().__new__(cls, values)
        _refuse_split(made)
        return made


def pair_of(batch: TensorBatch) -> Pair:
    """Return samples and labels of a batch."""
    kind = RankPair if isinstance(batch, RankBatch) else Pair
    return kind((batch.samples, batch.labels))


def _refuse_split(values: Iterable[Any]) -> None:
    """Refuse values that Accelerate sends to describe a batch, before it splits the batch.

    Raises:
        UsageError: they are such values, and there are several ranks.
    """
    firsts = (value[0] if isinstance(value, list) and value else value for value in values)
    kinds = {type(first).__name__ for first in firsts}
    if "TensorInformation" not in kinds or not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size() > 1:
        raise UsageError(
            "split batches with Accelerate: expected a loader of all samples, got one rank's, "
            "so that the samples of the other ranks would never be read; give prepare the "
            "Loader itself, or make it with rank=0, world_size=1"
        )


def _refuse_collation(_batches: list[TensorBatch | Pair], **_options: Any) -> None:
    """Refuse to make one batch of several, which would get the indices and state of the first.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "collate samples: expected samples, got batches of a Loader, which need no collating; "
        "make the DataLoader over it with batch_size=None"
    )


default_collate_fn_map[TensorBatch] = _refuse_collation
default_collate_fn_map[Pair] = _refuse_collation
default_collate_fn_map[RankPair] = _refuse_collation


def _name_fields(samples: Any, labels: Any) -> dict[str, Any]:
    """Return the values of a batch by key; labels first, whose length frameworks use."""
    fields = {} if labels is None else {LABELS: labels}
    if isinstance(samples, SampleViews):
        return fields
    if not isinstance(samples, Mapping):
        return {**fields, SAMPLES: samples}
    if LABELS in samples and labels is not None:
        raise UsageError(
            "make a batch: expected labels from the loader or from collate's dictionary, got both; "
            f"leave labels= out, or {LABELS!r} of the keys {list(samples)}"
        )
    return {**fields, **samples}


def _count(value: Any) -> int:
    """Return the number of samples in a value of a batch: its first dimension."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 0
    return len(value) if isinstance(value, Sized) else 0


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors in a value of the usual containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, SampleViews) and _fit_together(value):
        values, lengths = _join(value)
        return _split(function(values), lengths)
    if isinstance(value, Jagged):
        return value.map(function)
    if isinstance(value, dict):
        return {key: map_tensors(one, function) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(one, function) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(one, function) for one in value)
    return value


def jagged_of(batch: Batch) -> Jagged:
    """Copy the samples of a batch one after the other.

    Raises:
        ClosedError: the batch was released.
    """
    values, offsets = batch.pack()
    return Jagged(torch.from_numpy(values), torch.from_numpy(offsets))


def collate_list(items: Sequence[Any]) -> Any:
    """Collate samples of any lengths to a list, as DataLoader's ``collate_fn``.

    Args:
        items: samples, or (sample, label) pairs.

    Returns:
        The list of samples; for pairs also the labels, as ``default_collate`` joins them.
    """
    return _collate(items, list)


def collate_jagged(items: Sequence[Any]) -> Any:
    """Collate samples of any lengths to one ``Jagged``, as DataLoader's ``collate_fn``.

    Args:
        items: samples, tensors of one or more dimensions, or (sample, label) pairs.

    Returns:
        The samples; for pairs also the labels, as ``default_collate`` joins them.

    Raises:
        UsageError: the samples are no tensors, or differ in more than the first dimension.
    """
    return _collate(items, make_jagged)


def _collate(items: Sequence[Any], make: Callable[[Sequence[Any]], Any]) -> Any:
    if items and isinstance(items[0], tuple):
        samples, labels = zip(*items, strict=True)
        return make(samples), default_collate(list(labels))
    return make(items)


def make_jagged(samples: Sequence[torch.Tensor]) -> Jagged:
    """Copy tensors one after the other.

    Raises:
        UsageError: they are no tensors, or differ in more than the first dimension.
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


def _fit_together(samples: Sequence[Any]) -> bool:
    """Return True if all samples are tensors that differ only in the first dimension."""
    return all(_fits(sample, samples[0]) for sample in samples)


def _fits(sample: object, first: object) -> bool:
    """Return True if a sample is a tensor that differs from the first in its length only."""
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
