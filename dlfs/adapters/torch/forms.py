"""The arrays that samples contain: elements of numpy's or PyTorch's types, and a shape.

numpy copies the bytes of a batch. It has no bfloat16 and no float8. Such elements are copied as
integers of their size, and the tensor is then viewed as PyTorch's type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Batch
from dlfs.adapters.torch.memory import HostMemory
from dlfs.adapters.torch.tensors import Jagged
from dlfs.errors import UsageError

ElementType: TypeAlias = npt.DTypeLike | torch.dtype
"""Type of elements: numpy's, or PyTorch's if numpy has none, such as ``torch.bfloat16``."""

VARIES = -1
"""First dimension of samples that differ in it."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """Type and shape of the array that every sample contains.

    Attributes:
        stored: numpy's type as which the bytes are copied.
        dtype: PyTorch's type of the tensors.
        shape: shape of a sample; its first dimension is ``VARIES`` if samples differ in it.
    """

    stored: np.dtype[Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: ElementType, shape: tuple[int, ...] | None) -> SampleForm:
        """Return the form of a type and a shape; without a shape, one dimension of any length.

        Raises:
            UsageError: tensors have no such type, or there is no such shape.
        """
        shape = (VARIES,) if shape is None else tuple(shape)
        fixed = shape[1:] if shape[:1] == (VARIES,) else shape
        if any(length < 0 for length in fixed) or (fixed != shape and 0 in fixed):
            raise UsageError(
                "make batches: expected a shape of 0 or more elements in each dimension, or "
                f"{VARIES} in the first and 1 or more in the others, got {shape}"
            )
        return cls(*_find_types(dtype), shape)

    @property
    def varies(self) -> bool:
        """True if samples may differ in the first dimension."""
        return self.shape[:1] == (VARIES,)

    @property
    def _row_bytes(self) -> int:
        """Bytes of a sample for each element of a first dimension that varies."""
        return math.prod(self.shape[1:]) * self.stored.itemsize

    def stack(self, batch: Batch, memory: HostMemory) -> torch.Tensor:
        """Copy the samples of a batch, of equal length, to one tensor: ``[n, *shape]``.

        Args:
            batch: batch with the samples.
            memory: memory of the tensor.

        Raises:
            UsageError: the lengths differ, or do not fit type and shape.
        """
        shape = self.shape
        if self.varies:
            length_bytes = int(batch.lengths[0]) if len(batch) else 0
            shape = (length_bytes // self._row_bytes, *shape[1:])
        stacked = batch.stacked_shape(self.stored, shape)
        return memory.pack(batch).view(self.dtype).view(stacked)

    def join(self, batch: Batch, memory: HostMemory) -> Jagged:
        """Copy the samples of a batch one after the other.

        Args:
            batch: batch with the samples.
            memory: memory of the tensors.

        Raises:
            UsageError: a length does not fit type and shape, or the shape has no dimension.
        """
        if not self.shape:
            raise UsageError(
                "join a batch: expected samples of one dimension or more, got shape ()"
            )
        if not self.varies:
            counts = torch.arange(len(batch) + 1)
            return Jagged(self.stack(batch, memory).flatten(0, 1), counts * self.shape[0])
        wrong = np.flatnonzero(batch.lengths % self._row_bytes)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"join a batch: expected samples of a multiple of {self._row_bytes} bytes "
                f"({self.dtype} {self.shape}), got {int(batch.lengths[at])} bytes at position {at} "
                f"(index {int(batch.indices[at])})"
            )
        values = memory.pack(batch).view(self.dtype)
        offsets = np.zeros(len(batch) + 1, np.int64)
        np.cumsum(np.maximum(batch.lengths, 0) // self._row_bytes, out=offsets[1:])
        return Jagged(values.reshape(self.shape), torch.from_numpy(offsets))


def _find_types(dtype: ElementType) -> tuple[np.dtype[Any], torch.dtype]:
    """Return numpy's type as which elements are copied, and PyTorch's as which they are viewed.

    Raises:
        UsageError: tensors have no such type.
    """
    try:
        stored = _find_stored(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype)
        copied = torch.from_numpy(np.empty(0, stored))
        return stored, copied.view(dtype if isinstance(dtype, torch.dtype) else copied.dtype).dtype
    except (TypeError, ValueError, SyntaxError, RuntimeError) as error:
        raise UsageError(
            "make batches: expected a dtype of numpy's that tensors can have, or of PyTorch's such "
            f"as torch.bfloat16, got {dtype!r}"
        ) from error


def _find_stored(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        stored: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
        return stored
    except TypeError:  # numpy has none
        return np.dtype(f"i{dtype.itemsize}")
