"""``Batch``: the samples of one read, in the memory into which they were read.

A batch is one buffer with the offset and length of each sample. The buffer belongs to the reader,
which does not change it while the batch or a view of it is alive. The memory returns to the reader
with the last of them. The reader cannot use the memory of retained batches for reading ahead;
``pack`` copies a batch out of it.

If samples have fields, ``batch["name"]`` has those of one name. A batch of chosen fields may have
a part of each sample alone: the bytes from the first of these fields to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

from dlfs._native.sample_memory import SampleMemory
from dlfs.base.units import format_bytes, format_count
from dlfs.errors import ClosedError, UsageError
from dlfs.fields import FieldColumns, FieldPlaces, Fields, FieldSpan, find_fields, place_fields
from dlfs.fields.arrays import ArrayForm, forms_of
from dlfs.fields.batch_fields import (
    PartMemory,
    decode_part,
    decode_value,
    join_ragged,
    name_types,
    no_field,
    pick_fields,
)
from dlfs.reader.arrow import binary_views
from dlfs.reader.failures import SampleFailure

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

    _chosen: tuple[str, ...] | None = None
    _places: tuple[Fields, dict[str, FieldPlaces]] | None = None

    def __init__(
        self,
        native: BatchMemory,
        readable: npt.NDArray[np.bool_] | None = None,
        failures: tuple[SampleFailure, ...] = (),
        attributes: Callable[[], FieldColumns] | None = None,
        *,
        dataset: str = "",
        span: FieldSpan = (),
        arena: Callable[[], SampleMemory] | None = None,
    ) -> None:
        self._arena = arena
        self._dataset = dataset
        self._span = span
        self._attributes = attributes
        self._native: BatchMemory | None = native
        self._memory: memoryview | None = memoryview(native.memory).cast("B").toreadonly()
        self.indices, self.offsets, self.lengths = native.indices, native.offsets, native.lengths
        if readable is not None:
            self.indices = self.indices[readable]
            self.offsets = self.offsets[readable]
            self.lengths = self.lengths[readable]
        self.failures = failures

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The whole buffer, ``uint8[...]``, read-only; samples lie in it by offset and length."""
        return np.frombuffer(self._open(), np.uint8)

    @property
    def sample_memory(self) -> SampleMemory | None:
        """Memory of the reader that ``data`` is; None if the samples have memory of their own."""
        if self._arena is None:
            return None
        try:
            memory = self._arena()
        except ClosedError:
            return None
        return memory if memory.contains(self.data.__array_interface__["data"][0]) else None

    def __repr__(self) -> str:
        size = format_bytes(int(np.maximum(self.lengths, 0).sum()))
        words = [f"{format_count(len(self), 'sample')}, {size}"]
        words += [f"{len(self.failures)} failed"] if self.failures else []
        words += ["released"] if self._memory is None else []
        return f"<Batch of dataset {self._dataset!r}: {', '.join(words)}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: thumbnails and attributes of some samples."""
        from dlfs.notebook import show_batch

        return show_batch(self, self._attributes)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, position: int) -> memoryview: ...

    @overload
    def __getitem__(self, position: str) -> Any: ...

    def __getitem__(self, position: int | str) -> Any:
        """Return the bytes of the sample at a position of the batch, or a field of all samples.

        Args:
            position: position of a sample, whose bytes are returned read-only and without a copy;
                or the name of a field.

        Returns:
            For a field of ``bytes`` a ``Batch`` over the same memory, without a copy; for ``text``
            a list of ``str``; for arrays of a fixed shape one array ``dtype[n, *shape]``; for
            arrays with dimensions that vary a list of read-only views.

        Raises:
            IndexError: there is no such position.
            UsageError: there is no such field.
            FormatError: the columns of the fields, or a text, are malformed; the message names
                sample and field.
            DlfsError: the columns cannot be read.
        """
        if isinstance(position, str):
            places = self._place(position)
            part = self._part(places)
            if places.type.kind == "bytes":
                return Batch(part, failures=self.failures, dataset=self._dataset, arena=self._arena)
            return decode_part(part, position, places, self._dataset)
        offset = int(self.offsets[position])
        return self._open()[offset : offset + max(0, int(self.lengths[position]))]

    def __iter__(self) -> Iterator[memoryview]:
        memory = self._open()
        ends = self.offsets + np.maximum(self.lengths, 0)
        for offset, end in zip(self.offsets.tolist(), ends.tolist(), strict=True):
            yield memory[offset:end]

    # ---- fields ----------------------------------------------------------------------------------

    @property
    def fields(self) -> dict[str, str]:
        """Type of each field of the samples by name; empty if they have none.

        Raises:
            FormatError: the columns of the fields are malformed.
            DlfsError: they cannot be read.
        """
        fields, _ = self._placed()
        return name_types(fields if self._chosen is None else {n: fields[n] for n in self._chosen})

    def field_bytes(self, name: str) -> Batch:
        """Return the bytes of one field of each sample, of any type, over the same memory.

        Raises:
            UsageError: there is no such field.
            FormatError: as ``batch[name]``.
        """
        return Batch(self._part(self._place(name)), dataset=self._dataset, arena=self._arena)

    def ragged(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Copy the arrays of a field that differ in the first dimension one after the other.

        Args:
            name: name of the field.

        Returns:
            The elements, ``dtype[sum of lengths, ...]``, and the ``int64[n + 1]`` offsets in the
            first dimension: sample i is ``values[offsets[i]:offsets[i + 1]]``.

        Raises:
            UsageError: there is no such field, or its arrays differ in another dimension.
            FormatError: as ``batch[name]``.
        """
        places = self._place(name)
        return join_ragged(self._part(places), name, places, self._dataset)

    def sample(self, position: int) -> dict[str, Any]:
        """Return the fields of one sample: ``memoryview``, ``str`` or array by name.

        Bytes and arrays are read-only and lie in the memory of the batch.

        Raises:
            IndexError: there is no such position.
            UsageError: the samples have no fields.
            FormatError: as ``batch[name]``.
        """
        view = self[position]
        position %= len(self)
        names = self.fields
        if not names:
            raise no_field("", names, self._dataset)
        found = {}
        for name in names:
            places = self._place(name)
            start = int(places.starts[position])
            piece = view[start : start + int(places.lengths[position])]
            where = (self._dataset, name, self.indices)
            found[name] = decode_value(piece, places, position, where)
        return found

    def with_fields(self, names: Iterable[str] | None) -> Batch:
        """Return a batch over the same memory that has only some of the fields.

        Args:
            names: names of the fields, in their new order; None for all of them.

        Raises:
            UsageError: there is no such field, or a name occurs twice.
            FormatError: the columns of the fields are malformed.
        """
        if names is None:
            return self
        made = copy(self)
        made._chosen = pick_fields(self.fields, names, self._dataset) if len(self) else tuple(names)
        return made

    def _place(self, name: str) -> FieldPlaces:
        """Return the places of a field."""
        _, places = self._placed()
        if name not in places or (self._chosen is not None and name not in self._chosen):
            raise no_field(name, self.fields, self._dataset)
        return places[name]

    def _placed(self) -> tuple[Fields, dict[str, FieldPlaces]]:
        """Return the fields and their places, found on the first call."""
        if self._places is None:
            if self._attributes is None:
                return {}, {}
            columns = self._attributes()
            fields = find_fields(columns, self.indices, self._dataset)
            places = place_fields(
                columns, fields, self.indices, self.lengths, self._dataset, self._span
            )
            read = {name: fields[name] for name in self._span} if self._span else fields
            self._places = read, places
        return self._places

    def _part(self, places: FieldPlaces) -> PartMemory:
        """Return one field's bytes of each sample, in the memory of the batch."""
        starts = self.offsets + places.starts
        return PartMemory(self._open(), starts, places.lengths, self.indices)

    # ---- copies ----------------------------------------------------------------------------------

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
        shape = self.stacked_shape(dtype, shape)
        packed, _ = self.pack()
        return packed.view(dtype).reshape(shape)

    def stacked_shape(
        self, dtype: npt.DTypeLike = np.uint8, shape: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """Return the shape of the array that ``stack`` makes: ``(n, *shape)``.

        Raises:
            UsageError: as ``stack``.
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
        return len(self), *shape

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
        if stack:
            return self.stack(*self.array_form())
        forms, chosen = self._checked_forms()
        return [
            np.frombuffer(view, forms[form].dtype).reshape(forms[form].shape)
            for view, form in zip(self, chosen.tolist(), strict=True)
        ]

    def array_form(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of the arrays that the samples are.

        Raises:
            UsageError: as ``arrays`` that are to be stacked.
            DlfsError: the columns cannot be read.
        """
        forms, chosen = self._checked_forms()
        if len(forms) > 1:
            first, other = (
                f"{forms[chosen[at]]} of sample {int(self.indices[at])}"
                for at in (0, int(np.argmax(chosen != chosen[0])))
            )
            raise UsageError(
                f"stack arrays: expected all of one form, got {first} and {other}; "
                f"stack=False gives a list"
            )
        return forms[0].dtype, forms[0].shape

    def _checked_forms(self) -> tuple[list[ArrayForm], npt.NDArray[np.intp]]:
        """Return the forms of the arrays, after a check that each sample is as long as its."""
        forms, chosen = self._forms()
        needed = np.array([form.length_bytes for form in forms], object)[chosen]
        wrong = np.flatnonzero(needed != self.lengths)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"read arrays: sample {int(self.indices[at])}: expected {needed[at]} bytes, "
                f"{forms[chosen[at]]}, got {int(self.lengths[at])}"
            )
        return forms, chosen

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
        self._native = self._memory = None

    def _open(self) -> memoryview:
        if self._memory is None:
            raise ClosedError("use a batch: it was released")
        return self._memory
