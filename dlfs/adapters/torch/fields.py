"""The fields of a batch's samples as tensors, for datasets whose samples have named fields.

A batch is a dictionary with a value for each field, by its type: arrays of a fixed shape are one
tensor, arrays that vary a list of tensors or a ``Jagged``, bytes a list of ``uint8`` tensors, and
text a list of ``str``. Elements that PyTorch has not, such as times and strings of a fixed length,
stay numpy arrays. ``SampleDataset`` gives a ``FieldSample`` for each sample; PyTorch's own
``default_collate`` makes the same dictionary of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from dlfs import Batch
from dlfs.adapters.torch.memory import HostMemory, PinnedMemory
from dlfs.adapters.torch.tensors import (
    Jagged,
    SampleViews,
    make_jagged,
    view_array,
    view_samples,
)
from dlfs.base.units import KIB
from dlfs.fields import FieldType

_BFLOAT16 = "bfloat16["

FIELD_BYTES_MIN = 4 * KIB
"""Length of a field's arrays from which they go to a GPU by themselves, in bytes. The processor
stacks smaller ones, such as labels, first."""


class FieldSample(dict[str, Any]):
    """The fields of one sample, which ``default_collate`` joins by their types.

    Args:
        values: value of each field by name.
        types: type of each field by name, as ``Dataset.fields`` gives it.
    """

    def __init__(self, values: Mapping[str, Any], types: Mapping[str, str]) -> None:
        super().__init__(values)
        self.types = types

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldSample, (dict(self), dict(self.types))


def gather_fields(batch: Batch, collate: object, memory: HostMemory) -> dict[str, Any]:
    """Return the fields of a batch as tensors and lists by name, for a batch without a transform.

    Args:
        batch: batch with the samples.
        collate: ``jagged`` to join arrays that differ in the first dimension, ``stack`` to stack
            those that vary, which must be of one shape; else they are a list.
        memory: memory of the fields that are bytes, and of large arrays of a fixed shape.

    Raises:
        UsageError: arrays are to be joined and differ in another dimension.
        RuntimeError: arrays are to be stacked and differ; PyTorch's error.
    """
    found: dict[str, Any] = {}
    for name, kind in batch.fields.items():
        if kind == "bytes":
            found[name] = memory.views(batch[name])
        elif kind == "text":
            found[name] = batch[name]
        elif not FieldType.parse(kind).varies:
            found[name] = _stack_field(batch, name, kind, memory)
        elif collate == "jagged" and is_ragged(kind):
            values, offsets = batch.ragged(name)
            found[name] = Jagged(as_tensor(values, kind), torch.from_numpy(offsets))
        else:
            own = get_worker_info() is not None
            items = [view_field(array, kind, own=own) for array in batch[name]]
            found[name] = join_arrays(items, collate)
    return found


def _stack_field(batch: Batch, name: str, kind: str, memory: HostMemory) -> Any:
    """Return the arrays of a field of a fixed shape as one tensor."""
    form = FieldType.parse(kind)
    shape = [length or 0 for length in form.shape]
    small = math.prod(shape) * form.dtype.itemsize < FIELD_BYTES_MIN
    foreign = form.dtype.kind in "SUmM" or not form.dtype.isnative
    if small or foreign or not isinstance(memory, PinnedMemory):
        return as_tensor(batch[name], kind)
    element = as_tensor(np.empty(0, form.dtype), kind).dtype
    return memory.pack(batch.field_bytes(name)).view(element).view(len(batch), *shape)


def field_samples(batch: Batch, *, for_transform: bool) -> list[Any]:
    """Return the fields of each sample by name: arrays as tensors that belong to the caller.

    Args:
        batch: batch with the samples.
        for_transform: True for plain dictionaries with bytes as read-only ``memoryview``; False for
            ``FieldSample`` objects with bytes as ``uint8`` tensors.
    """
    types = batch.fields
    columns: dict[str, Sequence[Any]] = {}
    for name, kind in types.items():
        values = batch[name]
        if kind == "bytes" and not for_transform:
            columns[name] = [view.clone() for view in view_samples(values)]
        elif kind in ("bytes", "text"):
            columns[name] = list(values)
        else:
            columns[name] = [view_field(array, kind, own=True) for array in _each(values)]
    rows = zip(*columns.values(), strict=True)
    made = (dict(zip(columns, row, strict=True)) for row in rows)
    return list(made) if for_transform else [FieldSample(one, types) for one in made]


def collate_fields(samples: list[FieldSample], **_options: Any) -> dict[str, Any]:
    """Join the samples of a map-style dataset, as ``default_collate`` calls it.

    Raises:
        RuntimeError: arrays of a fixed shape differ after a change; PyTorch's error.
    """
    found: dict[str, Any] = {}
    for name, kind in samples[0].types.items():
        values = [sample[name] for sample in samples]
        fixed = not FieldType.parse(kind).varies
        if fixed and isinstance(values[0], torch.Tensor):
            found[name] = torch.stack(values)
        elif kind == "text" or not isinstance(values[0], torch.Tensor):
            found[name] = values
        else:
            found[name] = SampleViews(values)
    return found


default_collate_fn_map[FieldSample] = collate_fields


def _each(values: Any) -> Sequence[npt.NDArray[Any]]:
    """Return the array of each sample; those of scalars have no dimension."""
    if isinstance(values, list):
        return values
    return [values[at, ...] for at in range(len(values))]


def is_ragged(kind: str) -> bool:
    """Return True if only the first dimension of an array type varies."""
    shape = FieldType.parse(kind).shape
    return shape[:1] == (None,) and None not in shape[1:]


def join_arrays(items: list[Any], collate: object) -> Any:
    """Join arrays that vary: ``stack``, ``jagged``, else a list."""
    if collate == "stack" and items:
        return torch.stack(items)
    return make_jagged(items) if collate == "jagged" else SampleViews(items)


def as_tensor(array: npt.NDArray[Any], kind: str) -> Any:
    """Return an array that belongs to the caller as a tensor; numpy's own types stay arrays."""
    if array.dtype.kind in "SUmM":
        return array
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    made = torch.from_numpy(native)
    return made.view(torch.bfloat16) if kind.startswith(_BFLOAT16) else made


def view_field(array: npt.NDArray[Any], kind: str, *, own: bool) -> Any:
    """Return an array of one sample as a tensor.

    Args:
        array: array over a batch's memory.
        kind: type of the field.
        own: True to copy it. A view that a worker sends takes the whole memory behind it along.
    """
    if own or array.dtype.kind in "SUmM" or not array.dtype.isnative:
        return as_tensor(np.array(array), kind)
    made = view_array(array)
    return made.view(torch.bfloat16) if kind.startswith(_BFLOAT16) else made
