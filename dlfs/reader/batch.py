"""``Batch``: the samples of one read, in the memory into which they were read.

A batch is one buffer with the offset and length of each sample. The buffer belongs to the reader,
which does not change it while the batch or a view of it is alive. The memory returns to the reader
with the last of them. The reader cannot use the memory of retained batches for reading ahead;
``pack`` copies a batch out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

from dlfs.errors import ClosedError, UsageError
from dlfs.reader.arrays import ArrayForm, FormColumns, forms_of
from dlfs.reader.arrow import binary_views
from dlfs.reader.failures import SampleFailure
from dlfs.units import format_bytes, format_count

if TYPE_CHECKING:
    import pyarrow


class BatchMemory(Protocol):
    """The samples of a batch in memory: a ``NativeBatch``, or a copy of several."""

    @property
    def memory(self) -> Any:
        """Contiguous buffer with the samples."""

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Offset of each sample in the memory, in bytes, ``int64[n]``."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of each sample in bytes, ``int64[n]``; -1 for one that failed."""

    @property
    def indices(self) -> npt.NDArray[np.uint64]:
        """Index of each sample, ``uint64[n]``."""

    def gather(self, destination: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint64]) -> None:
        """Copy every sample that did not fail to its offset in ``destination``."""


class Batch:
    """Samples in the order of the indices that were read.

    Attributes:
        indices: index of each sample, ``uint64[n]``.
        offsets: offset of each sample in ``data``, ``int64[n]``.
        lengths: length of each sample in bytes, ``int64[n]``; -1 for one that failed.
        failures: samples that could not be read; empty unless ``on_error`` allows failures.

    Threads: any at once; ``release`` by one.
    """

    def __init__(
        self,
        native: BatchMemory,
        readable: npt.NDArray[np.bool_] | None = None,
        failures: tuple[SampleFailure, ...] = (),
        attributes: Callable[[], FormColumns] | None = None,
        *,
        dataset: str = "",
    ) -> None:
        self._dataset = dataset
        self._attributes = attributes
        self._native: BatchMemory | None = native
        self._memory: memoryview | None = memoryview(native.memory).cast("B").toreadonly()
        self.indices = native.indices if readable is None else native.indices[readable]
        self.offsets = native.offsets if readable is None else native.offsets[readable]
        self.lengths = native.lengths if readable is None else native.lengths[readable]
        self.failures = failures

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The whole buffer, ``uint8[...]``, read-only; samples lie in it by offset and length."""
        return np.frombuffer(self._open(), np.uint8)

    def __repr__(self) -> str:
        size = format_bytes(int(np.maximum(self.lengths, 0).sum()))
        words = [f"{format_count(len(self), 'sample')}, {size}"]
        words += [f"{len(self.failures)} failed"] if self.failures else []
        words += ["released"] if self._memory is None else []
        return f"<Batch of dataset {self._dataset!r}: {', '.join(words)}>"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> memoryview:
        """Return the bytes of the sample at a position of the batch, read-only and without a copy.

        Raises:
            IndexError: there is no such position.
        """
        offset = int(self.offsets[position])
        return self._open()[offset : offset + max(0, int(self.lengths[position]))]

    def __iter__(self) -> Iterator[memoryview]:
        memory = self._open()
        ends = self.offsets + np.maximum(self.lengths, 0)
        for offset, end in zip(self.offsets.tolist(), ends.tolist(), strict=True):
            yield memory[offset:end]

    def tobytes(self, position: int) -> bytes:
        """Return a copy of one sample."""
        return bytes(self[position])

    def to_list(self) -> list[bytes]:
        """Return a copy of every sample."""
        return [bytes(view) for view in self]

    def pack(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Copy the samples to one array, one after the other.

        Returns:
            The bytes, ``uint8[sum of lengths]``, and the ``int64[n + 1]`` offsets around the
            samples: the layout of an Arrow binary array.
        """
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.maximum(self.lengths, 0), out=offsets[1:])
        packed = np.empty(int(offsets[-1]), np.uint8)
        self.gather(packed, offsets[:-1])
        return packed, offsets

    def stack(
        self, dtype: npt.DTypeLike = np.uint8, shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        """Copy samples of equal length to one array.

        Args:
            dtype: dtype of the elements.
            shape: shape of one sample; one dimension by default.

        Returns:
            ``dtype[n, *shape]``, contiguous.

        Raises:
            UsageError: the lengths differ, or do not fit dtype and shape.
        """
        element = np.dtype(dtype)
        length = int(self.lengths[0]) if len(self) else 0
        shape = (length // element.itemsize,) if shape is None else tuple(shape)
        expected = int(np.prod(shape, dtype=np.int64)) * element.itemsize
        wrong = np.flatnonzero(self.lengths != expected)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"stack a batch: expected samples of {expected} bytes ({element} {shape}), got "
                f"{int(self.lengths[at])} bytes at position {at} (index {int(self.indices[at])})"
            )
        stacked = np.empty((len(self), *shape), element)
        offsets = np.arange(len(self), dtype=np.int64) * expected
        self.gather(stacked.reshape(-1).view(np.uint8), offsets)
        return stacked

    @overload
    def arrays(self, *, stack: Literal[True] = True) -> npt.NDArray[Any]: ...

    @overload
    def arrays(self, *, stack: Literal[False]) -> list[npt.NDArray[Any]]: ...

    def arrays(self, *, stack: bool = True) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """Return the samples as the arrays that ``dlfs:dtype`` and ``dlfs:shape`` describe.

        Args:
            stack: True to copy them to one array, which requires one dtype and shape; False for a
                list of views of the batch's memory.

        Returns:
            ``dtype[n, *shape]``, contiguous; or with ``stack=False`` a list of read-only views.

        Raises:
            UsageError: a sample is no array, has failed or has a wrong length, or the forms differ
                and are to be stacked; the message names the sample.
            DlfsError: the columns cannot be read.
        """
        forms, chosen = self._forms()
        needed = np.array([form.length_bytes for form in forms], object)[chosen]
        wrong = np.flatnonzero(needed != self.lengths)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"read arrays: sample {int(self.indices[at])}: expected {needed[at]} bytes, "
                f"{forms[chosen[at]]}, got {int(self.lengths[at])}"
            )
        if stack and len(forms) > 1:
            first, other = (
                f"{forms[chosen[at]]} of sample {int(self.indices[at])}"
                for at in (0, int(np.argmax(chosen != chosen[0])))
            )
            raise UsageError(
                f"stack arrays: expected all of one form, got {first} and {other}; "
                f"stack=False gives a list"
            )
        if stack:
            return self.stack(forms[0].dtype, forms[0].shape)
        return [
            np.frombuffer(view, forms[form].dtype).reshape(forms[form].shape)
            for view, form in zip(self, chosen.tolist(), strict=True)
        ]

    def _forms(self) -> tuple[list[ArrayForm], npt.NDArray[np.intp]]:
        """Return the different forms of the arrays, and the form number of each sample."""
        if self._attributes is None:
            raise UsageError("read arrays: expected a dataset's batch, got one of a bare reader")
        if not len(self):
            return [ArrayForm.of(np.uint8, (0,))], np.empty(0, np.intp)
        return forms_of(self._attributes(), self.indices)

    def pad(self, length_bytes: int | None = None, fill: int = 0) -> npt.NDArray[np.uint8]:
        """Copy samples of any lengths to the rows of one array.

        Args:
            length_bytes: length of a row; by default that of the longest sample.
            fill: value of the bytes behind a shorter sample, and of a failed sample's row, 0..255.

        Returns:
            ``uint8[n, length_bytes]``, contiguous; ``lengths`` has the end of each sample.

        Raises:
            UsageError: a sample is longer than a row, or ``fill`` is no byte.
        """
        longest = int(self.lengths.max(initial=0))
        row_bytes = longest if length_bytes is None else length_bytes
        if row_bytes < longest or not 0 <= fill <= 255:
            raise UsageError(
                f"pad a batch: expected rows of {longest} bytes or more and a byte to fill them "
                f"with, got {row_bytes} bytes and {fill}"
            )
        padded = np.full((len(self), row_bytes), fill, np.uint8)
        self.gather(padded.reshape(-1), np.arange(len(self), dtype=np.int64) * row_bytes)
        return padded

    def gather(self, destination: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        """Copy every sample to its offset in ``destination``; one that failed is left out.

        Args:
            destination: contiguous memory with room for each sample, ``uint8[...]``.
            offsets: offset of each sample, ``int64[n]``.

        Raises:
            ClosedError: the batch was released.
        """
        if self._native is None:
            raise ClosedError("use a batch: it was released")
        if len(self) == len(self._native.indices):
            self._native.gather(destination, offsets.astype(np.uint64))
            return
        for view, offset in zip(self, offsets.tolist(), strict=True):
            destination[offset : offset + len(view)] = view

    def to_arrow(self) -> pyarrow.Array[Any]:
        """Return the samples as an Arrow array, without a copy.

        The array keeps the batch's memory, even after ``release``. For Arrow functions that do not
        support views yet, ``cast(pyarrow.large_binary())`` makes a copy.

        Returns:
            ``binary_view[n]``; null for a sample that failed.

        Raises:
            UsageError: pyarrow is not installed.
            LimitError: a sample is longer than 2 GiB - 1.
        """
        return binary_views(self._open(), self.offsets, self.lengths)

    def release(self) -> None:
        """Release the batch's memory now; views of it stay valid. Idempotent."""
        self._native = None
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def _open(self) -> memoryview:
        if self._memory is None:
            raise ClosedError("use a batch: it was released")
        return self._memory
