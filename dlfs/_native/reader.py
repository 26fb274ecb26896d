"""The native reader, its sequences and streams as Python objects.

A reader's memory is unmapped only after its last batch was released (``dlfs._native.batch``).

Source: ``dlfs/reader.h`` and ``dlfs/stream.h``.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.batch import NativeBatch, NativeFailure, batch_owner
from dlfs._native.handle import Handle, process_number
from dlfs._native.library import check, error_for, library
from dlfs._native.parts import SamplePart, copy_part, copy_sample
from dlfs._native.sample_memory import SampleMemory
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.errors import ClosedError, DlfsError

if TYPE_CHECKING:
    from dlfs._native.arena import NativeArena
    from dlfs._native.device import NativeDevice
    from dlfs._native.directory import NativeDirectory

WAIT_MS = 100
"""Longest native wait for a batch, in milliseconds: Python runs signal handlers in between."""

ORDERS = {
    "storage": abi.ORDER_STORAGE,
    "global": abi.ORDER_GLOBAL,
    "chunk": abi.ORDER_CHUNK,
}
CHOICES = {
    "list": abi.ORDER_LIST,
    "selected": abi.ORDER_SELECTED,
    "weighted": abi.ORDER_WEIGHTED,
}
PLANS = {
    "auto": abi.PLAN_AUTO,
    "direct": abi.PLAN_DIRECT,
    "chunks": abi.PLAN_CHUNKS,
    "chunk_copy": abi.PLAN_CHUNK_COPY,
}


_Start = c_uint8 * 0


def start_of(array: npt.NDArray[Any]) -> ctypes.Array[Any]:
    """Return a contiguous, writable array as a call's argument; ``array.ctypes`` takes longer."""
    return _Start.from_buffer(array)  # type: ignore[arg-type] # for Python 3.11, numpy tells no types


def member_counters(stats: abi.MemberStats) -> dict[str, int | list[int]]:
    """Return the fields of a ``dlfs_member_stats`` by name."""
    return {**abi.counters(stats), "latency": list(stats.latency)}


class NativeReader:
    """A ``dlfs_reader``.

    Args:
        devices: members' devices in member order, None for a missing one.
        extents: ``(first_chunk, chunk_count)`` of each run of chunks of the dataset.
        directory: directory of the dataset.
        config: the numbers of the configuration, which ``dlfs/reader.h`` describes; the reader sets
            the other fields.
        arena: memory that it shares with other readers; None for memory of its own.
        groups: ``(first_chunk, band_rows, first_member, member_count)`` of each group of members;
            none: all members are one group without replicas.

    Attributes:
        closing: True once ``close`` was called.
        process: number of the process that made the reader.
        timeout_ms: bound on a read, as given.

    Raises:
        UsageError: the geometry is invalid.
        LimitError: the memory is smaller than four chunks.

    Threads: any at once.
    """

    def __init__(
        self,
        devices: Sequence[NativeDevice | None],
        extents: Sequence[tuple[int, int]],
        directory: NativeDirectory,
        config: abi.ReaderConfig,
        *,
        arena: NativeArena | None = None,
        groups: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        self.timeout_ms = config.timeout_ms
        self.process = process_number()
        owners = [None if device is None else device.handle for device in devices]
        handles = (c_void_p * len(devices))(
            *(None if owner is None else owner.value for owner in owners)
        )
        directory_owner = directory.handle
        runs = (abi.Extent * max(1, len(extents)))(*(abi.Extent(*run) for run in extents))
        group_array = (abi.ChunkGroup * max(1, len(groups)))(*(abi.ChunkGroup(*g) for g in groups))
        config.devices = ctypes.cast(handles, POINTER(c_void_p))
        config.member_count = len(devices)
        config.extents = ctypes.cast(runs, POINTER(abi.Extent))
        config.extent_count = len(extents)
        config.directory = directory_owner
        config.arena = None if arena is None else arena.handle
        config.groups = ctypes.cast(group_array, POINTER(abi.ChunkGroup))
        config.group_count = len(groups)
        message = (
            f"make a reader with {config.memory_bytes} bytes of memory for chunks of "
            f"{config.chunk_bytes}"
        )
        self._owner = OwnerProcess()
        self.closing = False
        self._scratch = threading.local()
        self._memory: SampleMemory | None = None
        self._memory_lock = Lock()
        self._handle: Handle | None = Handle(
            library().dlfs_reader_destroy, *owners, directory_owner, arena, process=self.process
        )
        check(library().dlfs_reader_create(byref(config), byref(self._handle)), message)

    @property
    def handle(self) -> Handle:
        """The owner of the ``dlfs_reader``; objects that use the reader keep it.

        Raises:
            ClosedError: the reader is closed, or belongs to another process.
        """
        handle = self._handle
        if not self._owner.is_current():
            raise ClosedError(f"use a reader: it belongs to process {self._owner.pid}")
        if handle is None:
            raise ClosedError("use a reader: it is closed")
        return handle

    def read(self, indices: npt.NDArray[np.uint64]) -> NativeBatch:
        """Read samples as one batch.

        Args:
            indices: ``uint64[n]``, contiguous and writable.

        Raises:
            UsageError: an index is out of range.
            DlfsError: the read failed as a whole. Failures of single samples are in the batch.
        """
        batch = batch_owner()
        code = library().dlfs_reader_read(
            self.handle, start_of(indices), len(indices), byref(batch)
        )
        if code < 0:
            raise error_for(code, f"read {len(indices)} samples")
        return NativeBatch(batch)

    def get(self, index: int, *, flags: int = 0) -> bytes | None:
        """Copy one sample.

        Args:
            index: 0..N-1; not checked here.
            flags: ``abi.GET_CACHED``: only if it is in memory.

        Returns:
            The bytes; None if the sample is not there as the flags require, larger than
            ``SCRATCH_BYTES_MAX``, or failed: then ``read`` returns the sample or its failure.
        """
        return copy_sample(library().dlfs_reader_get, self.handle, index, flags, self._scratch)[0]

    def read_part(self, part: SamplePart, buffer: memoryview) -> NativeFailure:
        """Copy a part of a sample, verified.

        Args:
            part: sample and first byte.
            buffer: ``uint8[n]``, contiguous and writable; gets the n bytes of the part.

        Returns:
            Code 0; or the failure, and then the content of the buffer is undefined.

        Raises:
            UsageError: the sample has no such part.
            DeviceError: not enough memory.
        """
        read = library().dlfs_reader_read_part
        code, failure = copy_part(partial(read, self.handle), part, buffer)
        if failure.code == 0:
            check(code, f"read a part of sample {part.index}")
        return failure

    def memory(self) -> SampleMemory:
        """Return the mapping of the sample memory, in which the samples of most batches lie.

        Raises:
            ClosedError: the reader is closed, or belongs to another process.
            DeviceError: the memory could not be allocated.
        """
        owner = self.handle
        with self._memory_lock:
            if self._memory is None:
                base, size_bytes = c_void_p(), c_uint64()
                code = library().dlfs_reader_memory(owner, byref(base), byref(size_bytes))
                check(code, "map the sample memory")
                self._memory = SampleMemory(owner, base.value or 0, size_bytes.value, writable=True)
            return self._memory

    def arena(self) -> tuple[int, int]:
        """Return the descriptor and the length in bytes of the shared sample memory.

        The descriptor stays the arena's.

        Raises:
            UsageError: the reader has no arena that was created with ``shared=True``.
            DeviceError: the memory could not be allocated.
        """
        descriptor, size_bytes = c_int(), c_uint64()
        code = library().dlfs_reader_arena(self.handle, byref(descriptor), byref(size_bytes))
        check(code, "share the sample memory")
        return descriptor.value, size_bytes.value

    def stats(self) -> dict[str, int]:
        """Return the fields of ``dlfs_reader_stats`` by name."""
        stats = abi.ReaderStats()
        library().dlfs_reader_get_stats(self.handle, byref(stats))
        return abi.counters(stats)

    def member_stats(self, member: int) -> dict[str, int | list[int]]:
        """Return the fields of a member's ``dlfs_member_stats`` by name; ``latency`` is a list.

        Raises:
            UsageError: there is no such member.
        """
        stats = abi.MemberStats()
        code = library().dlfs_reader_get_member_stats(self.handle, member, byref(stats))
        check(code, f"get statistics of member {member}")
        return member_counters(stats)

    def stream(self, sequence: NativeSequence, options: StreamOptions) -> NativeStream:
        """Start to read a part of a sequence ahead; see ``NativeStream``."""
        return NativeStream(self, sequence, options)

    def lost_members(self) -> int:
        """Return the members that are lost now, as bits."""
        lost: int = library().dlfs_reader_lost_members(self.handle)
        return lost

    def member_code(self, member: int) -> int:
        """Return the code for which a member was last lost; 0 if it never was."""
        code: int = library().dlfs_reader_member_code(self.handle, member)
        return code

    def close(self) -> None:
        """Close the reader. Idempotent; batches stay valid.

        It is freed now, or with the last call, stream or channel that uses it, and keeps its
        devices and the directory until then.
        """
        self.closing = True
        self._handle = None
        with self._memory_lock:
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


class NativeSequence:
    """A ``dlfs_sequence``: the order of one epoch.

    Args:
        directory: directory of the dataset.
        chunk_bytes: size of a chunk.
        order: ``storage``, ``global`` or ``chunk``.
        seed: 0..2^64-1.
        epoch: 0..2^64-1.
        window_chunks: chunks whose samples the order ``chunk`` mixes.

    Attributes:
        is_chosen: True if the order is over chosen samples, so that the arguments above do not
            describe it.

    Threads: any at once.
    """

    is_chosen = False

    def __init__(
        self,
        directory: NativeDirectory,
        *,
        chunk_bytes: int,
        order: str,
        seed: int,
        epoch: int,
        window_chunks: int,
    ) -> None:
        owner = directory.handle
        self.handle = Handle(library().dlfs_sequence_destroy, owner)
        code = library().dlfs_sequence_create(
            owner, chunk_bytes, ORDERS[order], seed, epoch, window_chunks, byref(self.handle)
        )
        check(code, f"make a {order} sequence")

    @classmethod
    def choose(
        cls,
        directory: NativeDirectory,
        *,
        kind: str,
        indices: npt.NDArray[np.uint64],
        weights: npt.NDArray[np.float64] | None = None,
        draws: int = 0,
        seed: int = 0,
        epoch: int = 0,
    ) -> Self:
        """Create an order over chosen samples.

        Args:
            directory: directory of the dataset.
            kind: ``list`` for the indices as they are, ``selected`` for a permutation of them,
                ``weighted`` for draws with replacement.
            indices: ``uint64[n]``, contiguous; used without a copy, so it must not change.
            weights: ``float64[n]``, contiguous; for ``weighted``.
            draws: number of draws; for ``weighted``.
            seed: 0..2^64-1.
            epoch: 0..2^64-1.

        Raises:
            UsageError: an index is out of range, a weight is negative or not finite, or none is
                positive.
            DeviceError: not enough memory.
        """
        choice = abi.Choice(
            kind=CHOICES[kind],
            seed=seed,
            epoch=epoch,
            indices=indices.ctypes.data,
            weights=None if weights is None else weights.ctypes.data,
            count=len(indices),
            draws=draws,
        )
        owner = directory.handle
        handle = Handle(library().dlfs_sequence_destroy, owner, indices, weights)
        code = library().dlfs_sequence_choose(owner, byref(choice), byref(handle))
        check(code, f"make a {kind} sequence of {len(indices)} samples")
        sequence = cls.__new__(cls)
        sequence.is_chosen = True
        sequence.handle = handle
        return sequence

    def fill(self, first: int, count: int, stride: int) -> npt.NDArray[np.uint64]:
        """Compute the indices at positions ``first``, ``first + stride``, ...: ``uint64[count]``.

        Raises:
            UsageError: a position is past the end.
        """
        out = np.empty(count, np.uint64)
        code = library().dlfs_sequence_fill(self.handle, first, stride, count, out.ctypes.data)
        check(code, f"take {count} positions from {first} on, each {stride}")
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The positions of a sequence that one consumer reads, and how they are read ahead.

    Attributes:
        first: position of the first sample.
        stride: distance between two samples, in positions.
        count: number of samples.
        group: samples of a group; 0 if all samples are one group.
        group_stride: distance between the first samples of two groups, in positions.
        plan: how samples are read ahead: ``auto``, ``direct``, ``chunks`` or ``chunk_copy``.
    """

    first: int
    stride: int
    count: int
    group: int = 0
    group_stride: int = 0
    plan: str = "auto"

    def positions(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.int64]:
        """Return the positions of some of the samples, ``int64[count]``.

        Args:
            first: number of the first sample, counted from 0.
            count: number of samples; by default all that follow.
        """
        count = self.count - first if count is None else count
        numbers = np.arange(first, first + count, dtype=np.int64)
        groups, within = np.divmod(numbers, self.group or max(1, self.count))
        positions: npt.NDArray[np.int64] = groups * self.group_stride + within * self.stride
        return positions + self.first

    def config(self, sequence: NativeSequence) -> abi.StreamConfig:
        """Return the ``dlfs_stream_config`` of a sequence, which must outlive the stream."""
        return abi.StreamConfig(
            sequence=sequence.handle,
            first=self.first,
            stride=self.stride,
            count=self.count,
            group=self.group,
            group_stride=self.group_stride,
            plan=PLANS[self.plan],
        )


class Stream:
    """A consumer's part of an epoch, read ahead by this process or by a service.

    Args:
        take: function of libdlfs that returns the next batch of a handle.
        handle: owner of the handle.

    Threads: one at a time.
    """

    def __init__(self, take: Callable[..., int], handle: Handle) -> None:
        self._owner = OwnerProcess()
        self._take = take
        self._handle: Handle | None = handle

    def next(self, count: int) -> NativeBatch | None:
        """Return the next ``count`` samples, fewer at the end; None if none are left.

        If it raises, the next call with the same count returns the same samples.

        Raises:
            LimitError: see ``ClientReader.read``.
            DlfsError: the reading ahead failed, or the service is lost (ServiceLostError).
        """
        batch = batch_owner()
        code = -errno.EAGAIN
        while code == -errno.EAGAIN:  # a signal handler (Ctrl-C) runs between two waits
            code = self._take(self._open_handle(), count, WAIT_MS, byref(batch))
        if code == abi.E_END:
            return None
        if code < 0:
            raise self._error(code, count)
        return NativeBatch(batch)

    def _error(self, code: int, count: int) -> DlfsError:
        """Return the error of a failed ``next``."""
        return error_for(code, f"take the next {count} samples")

    def _open_handle(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise ClosedError("take the next batch: the epoch is closed")
        if not self._owner.is_current():
            raise ClosedError(
                f"take the next batch: the epoch belongs to process {self._owner.pid}"
            )
        return handle


class NativeStream(Stream):
    """A ``dlfs_stream``: a consumer's part of an epoch, read ahead by a native thread.

    Args:
        reader: reader of the dataset.
        sequence: order of the epoch.
        options: positions of the consumer.

    Threads: one at a time.
    """

    def __init__(
        self,
        reader: NativeReader,
        sequence: NativeSequence,
        options: StreamOptions,
    ) -> None:
        config = options.config(sequence)
        owner = reader.handle
        handle = Handle(
            library().dlfs_stream_destroy, owner, sequence.handle, process=reader.process
        )
        super().__init__(library().dlfs_stream_next, handle)
        code = library().dlfs_stream_create(owner, byref(config), byref(handle))
        check(code, f"read ahead {options.count} samples")

    @property
    def plan(self) -> str:
        """Plan in use: ``direct``, ``chunks`` or ``chunk_copy``."""
        number = library().dlfs_stream_plan(self._open_handle())
        return next(name for name, value in PLANS.items() if value == number)

    def close(self) -> None:
        """End the thread that reads ahead. Idempotent; returned batches stay valid."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.free()
