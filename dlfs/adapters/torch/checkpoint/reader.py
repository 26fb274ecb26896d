"""``StorageReader``: loads the checkpoints of ``torch.distributed.checkpoint`` from a volume.

Each rank reads the pieces that it needs, at any number of ranks. A piece is verified as a whole. A
tensor that is needed as a whole and lies in memory as it is stored is read in place; all others are
read to a buffer and copied.

Threads: ``READ_THREADS`` of each rank read at once.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

import dlfs
from dlfs.adapters.grouping import group_by_bytes
from dlfs.adapters.torch.checkpoint.layout import (
    Checkpoint,
    HasCheckpointId,
    check_id,
    check_part,
    check_stored,
    find_checkpoint,
    list_checkpoints,
    no_source,
    open_source,
    open_volume,
    read_metadata,
)
from dlfs.adapters.torch.checkpoint.metadata import Piece
from dlfs.adapters.torch.checkpoint.objects import load_restricted
from dlfs.base.threads import ThreadPool
from dlfs.base.units import MIB
from dlfs.errors import FormatError, UsageError

READ_THREADS = 4
"""Threads of each rank that read large pieces."""

SMALL_BYTES = 1 * MIB
"""Pieces below this length are read in batches, in bytes."""

BATCH_BYTES = 32 * MIB
"""Most bytes of small pieces in one batch, in bytes."""

BUFFERS_BYTES_MAX = 256 * MIB
"""Total length of buffers at which reads are completed before more are allocated, in bytes."""

LOADS_MAX = 4096
"""Number of items at which reads are completed before more are prepared."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Read:
    """One piece, or a part of it, to read.

    Attributes:
        piece: the stored bytes.
        target: memory for the bytes from ``skipped_bytes`` on, ``uint8[n_bytes]``.
        skipped_bytes: bytes of the piece that are not needed, at its beginning.
    """

    piece: Piece
    target: Bytes
    skipped_bytes: int


@dataclass(frozen=True, slots=True)
class _Load:
    """An item of a load plan: its reads, and what to do after them."""

    reads: list[_Read]
    complete: Callable[[], None]
    buffer_bytes: int


class StorageReader(HasCheckpointId, TorchStorageReader):
    """Loads checkpoints from a volume, for ``torch.distributed.checkpoint.load``.

    Args:
        volume: URIs or paths of the volume's members, as for ``dlfs.open``, or ``unix:PATH`` of a
            node service.
        name: name of the run.
        weights_only: load objects that consist of tensors and plain values only, as ``torch.load``
            has it, and of classes that ``torch.serialization.add_safe_globals`` names. False runs
            whatever code the stored objects name: only for a volume whose writers you trust.

    Without a ``checkpoint_id``, the newest complete checkpoint is loaded.

    Raises:
        UsageError: the name is not allowed.
    """

    def __init__(
        self,
        volume: str | Sequence[str],
        name: str = "checkpoint",
        *,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self.volume = volume if isinstance(volume, str) else tuple(volume)
        self.name = check_part(name, "a name")
        self.weights_only = weights_only
        self._step: str | None = None
        self._checkpoint: Checkpoint | None = None
        self._metadata: Any = None

    def checkpoints(self) -> list[Checkpoint]:
        """List the complete checkpoints, the oldest first.

        Raises:
            DlfsError: as ``dlfs.open``.
        """
        with open_volume(self.volume) as volume:
            return list_checkpoints(volume, self.name)

    # ---- the steps of a load, in the order of torch's calls --------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a load.

        Args:
            checkpoint_id: name of the checkpoint within the run; None for the newest one.

        Raises:
            UsageError: the id has a colon, ``@``, ``/`` or space in it.
        """
        self._step = check_id(checkpoint_id)

    def read_metadata(self) -> Any:
        """Read the metadata of the checkpoint.

        Raises:
            NotFoundError: there is no such checkpoint.
            DlfsError: as ``dlfs.open``.
        """
        with open_volume(self.volume) as volume:
            self._checkpoint = find_checkpoint(volume, self.name, self._step)
            metadata = read_metadata(volume, self._checkpoint.dataset)
        meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta = replace(meta, load_id=str(uuid4()))
        return metadata

    def set_up_storage_reader(self, metadata: Any, _is_coordinator: bool) -> None:
        """Take the metadata that describes the stored items."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: Any) -> Any:
        """Note in the plan which checkpoint this rank loads."""
        assert self._checkpoint is not None
        return replace(plan, storage_data=self._checkpoint.dataset)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Check that all ranks load the same checkpoint.

        Raises:
            UsageError: they do not: a save completed while they looked for the newest one.
        """
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise UsageError(
                f"load the newest checkpoint of {self.name!r}: the ranks found {', '.join(found)}; "
                f"give a checkpoint_id, or load when no save is in progress"
            )
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read and verify the items of a plan, into the tensors of the planner.

        Returns:
            A completed future.

        Raises:
            ChecksumError: a piece is damaged; the message names the device and the offset.
            FormatError: the metadata does not describe the stored bytes.
            DlfsError: as ``Dataset.read``.
        """
        with open_volume(self.volume) as volume, ThreadPool(READ_THREADS) as pool:
            room = {info.uuid: info.sample_bytes for info in volume.datasets()}
            pending: list[_Load] = []
            buffers_bytes = 0
            for item in plan.items:
                pending.append(self._load(item, planner, room))
                buffers_bytes += pending[-1].buffer_bytes
                if buffers_bytes >= BUFFERS_BYTES_MAX or len(pending) >= LOADS_MAX:
                    _run(volume, pool, pending)
                    pending, buffers_bytes = [], 0
            _run(volume, pool, pending)
        done: Any = Future()
        done.set_result(None)
        return done

    # ---- items -----------------------------------------------------------------------------------

    def _load(self, item: Any, planner: Any, room: Mapping[UUID, int]) -> _Load:
        index = item.storage_index
        if index not in self._metadata.storage_data:
            raise FormatError(f"load {index.fqn!r}: the metadata has no bytes of {index}")
        pieces: tuple[Piece, ...] = self._metadata.storage_data[index]
        self._check_room(index.fqn, pieces, room)
        if item.type == LoadItemType.BYTE_IO:
            return self._load_object(item, planner, pieces)
        return self._load_tensor(item, planner, pieces)

    def _check_room(self, name: str, pieces: Sequence[Piece], room: Mapping[UUID, int]) -> None:
        """Check that the sources of an item are there, and have the bytes that it is to have."""
        sources = {piece.source for piece in pieces}
        for missing in sources - room.keys():
            raise no_source(f"load {name!r} of {self.name!r}", missing)
        needed = sum(piece.length_bytes for piece in pieces)
        stored = sum(room[source] for source in sources)
        if needed > stored:  # before memory for them is allocated
            raise FormatError(f"load {name!r}: expected at most {stored} bytes, got {needed}")

    def _load_object(self, item: Any, planner: Any, pieces: tuple[Piece, ...]) -> _Load:
        buffer = np.empty(sum(piece.length_bytes for piece in pieces), np.uint8)

        def load_bytes() -> None:
            content = io.BytesIO(buffer.data)
            if self.weights_only:
                content = _restrict(content, item.storage_index.fqn)
            planner.load_bytes(item, content)

        return _Load(_reads(pieces, 0, buffer), load_bytes, buffer.nbytes)

    def _load_tensor(self, item: Any, planner: Any, pieces: tuple[Piece, ...]) -> _Load:
        dtype, sizes = self._stored_form(item.storage_index)
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise FormatError(
                f"load {item.storage_index.fqn!r}: expected the shape {tuple(item.lengths)}, "
                f"got {tuple(target.size())}"
            )
        strides = torch.empty(sizes, device="meta").stride()
        first = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
        whole = item.lengths == sizes
        if whole and target.device.type == "cpu" and target.dtype == dtype and _is_plain(target):
            reads = _reads(pieces, 0, _memory(target))
            return _Load(reads, lambda: planner.commit_tensor(item, target), 0)
        last = sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
        count = last + 1 if item.lengths.numel() else 0
        buffer = torch.empty(count, dtype=dtype)

        def copy() -> None:
            if count:
                target.copy_(buffer.as_strided(item.lengths, strides))
            planner.commit_tensor(item, target)

        reads = _reads(pieces, first * dtype.itemsize, _memory(buffer))
        return _Load(reads, copy, count * dtype.itemsize)

    def _stored_form(self, index: Any) -> tuple[Any, Any]:
        """Return the type and the shape of a stored shard."""
        stored = self._metadata.state_dict_metadata[index.fqn]
        for chunk in stored.chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return stored.properties.dtype, chunk.sizes
        raise FormatError(f"load {index.fqn!r}: the metadata has no shard at {index.offset}")


def _restrict(content: io.BytesIO, name: str) -> io.BytesIO:
    """Return an object as torch stores it, without any code that the stored bytes name.

    torch's planners unpickle what they are given. So the object is loaded by torch's unpickler for
    tensors and plain values, and they are given what this process stores again.

    Raises:
        FormatError: the bytes name classes or functions beyond these, or are no stored object.
    """
    try:
        value = load_restricted(content)
    except FormatError as error:
        raise FormatError(
            f"load {name!r}: {error}; if you trust all writers of the volume, "
            "StorageReader(..., weights_only=False) loads any object"
        ) from error
    again = io.BytesIO()
    torch.save(value, again)
    again.seek(0)
    return again


def _is_plain(tensor: Any) -> bool:
    """Return True if a tensor's memory is its elements in row-major order."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _memory(tensor: Any) -> Bytes:
    """Return the memory of a contiguous tensor, ``uint8[n_bytes]``."""
    memory: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory


def _reads(pieces: Sequence[Piece], first: int, target: Bytes) -> list[_Read]:
    """Return the reads that fill a buffer.

    Args:
        pieces: the pieces of a shard, in order.
        first: offset of the needed bytes in the shard.
        target: memory for the needed bytes, ``uint8[n_bytes]``.
    """
    reads: list[_Read] = []
    start, end = 0, first + target.nbytes
    for piece in pieces:
        low, high = max(start, first), min(start + piece.length_bytes, end)
        if low < high:
            reads.append(_Read(piece, target[low - first : high - first], low - start))
        start += piece.length_bytes
    return reads


# ---- reading -------------------------------------------------------------------------------------


def _run(volume: dlfs.Volume, pool: ThreadPool, loads: Sequence[_Load]) -> None:
    """Read the pieces of some items in storage order, and complete the items."""
    reads = [read for load in loads for read in load.reads]
    reads.sort(key=lambda read: (read.piece.source, read.piece.sample))
    for source, group in groupby(reads, lambda read: read.piece.source):
        with open_source(volume, source) as dataset:
            _read_from(dataset, list(group), pool)
    for load in loads:
        load.complete()


def _read_from(dataset: dlfs.Dataset, reads: Sequence[_Read], pool: ThreadPool) -> None:
    check_stored(dataset, [read.piece for read in reads])
    large = [read for read in reads if read.piece.length_bytes >= SMALL_BYTES]
    started = [pool.submit(_read_large, dataset, read) for read in large]
    small = [read for read in reads if read.piece.length_bytes < SMALL_BYTES]
    lengths = [read.piece.length_bytes for read in small]
    for batch in group_by_bytes(small, lengths, BATCH_BYTES):
        views = dataset.read([read.piece.sample for read in batch])
        for read, view in zip(batch, views, strict=True):
            part = np.frombuffer(view, np.uint8)[read.skipped_bytes :]
            read.target[:] = part[: read.target.nbytes]
    for one in started:
        one.result()


def _read_large(dataset: dlfs.Dataset, read: _Read) -> None:
    if read.target.nbytes == read.piece.length_bytes:
        dataset.read_into(read.piece.sample, read.target.data)
        return
    whole = np.empty(read.piece.length_bytes, np.uint8)  # a checksum covers the whole piece
    dataset.read_into(read.piece.sample, whole.data)
    read.target[:] = whole[read.skipped_bytes : read.skipped_bytes + read.target.nbytes]
