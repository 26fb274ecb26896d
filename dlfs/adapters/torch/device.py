"""``DeviceMemory``: batches on a GPU, copied ahead on a stream of their own.

Where the sample memory of the reader is page-locked (``page_locks``), samples go from it to the GPU
without a copy by the processor. Large samples are copied one by one by the GPU's copy engines.
Small ones are gathered by a program on the GPU, because to start a copy takes the processor longer
than to copy a small sample. The batch stays pinned in the reader until an event behind the copy has
passed. Other samples are first copied to page-locked memory by the processor: those of views, those
that the sample memory had no room for, and all of them where it cannot be locked.

The copies of ``COPIES_AHEAD`` batches begin before the batches are requested. When a batch is
given, the caller's stream is made to wait for the event behind its copy; no thread waits for it.

Threads: one at a time; a reader may be closed by another one meanwhile.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Batch
from dlfs.adapters.torch.cuda import Cuda, PageLockError
from dlfs.adapters.torch.lookahead import take_ahead
from dlfs.adapters.torch.memory import HostMemory, PinnedMemory
from dlfs.adapters.torch.page_locks import Copies, PageLock
from dlfs.adapters.torch.tensors import TensorBatch, view_memory
from dlfs.base.units import KIB
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs._native.sample_memory import SampleMemory

COPIES_AHEAD = 2
"""Batches whose copies begin before they are requested."""

COPIES_MAX = COPIES_AHEAD + 2
"""Most batches whose copies are under way: those ahead, one that is being given, and one before."""

COPY_BYTES_MIN = 64 * KIB
"""Mean length of samples from which each is copied by a call of its own, in bytes. A call takes the
processor about 10 us, in which it copies about as many bytes itself."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Types as which bytes are gathered, by their size: the largest that all samples are aligned to."""


def check_device(device: str | int | torch.device | None) -> torch.device | None:
    """Return the GPU that a caller names; None for the memory of this machine.

    Raises:
        UsageError: it is neither a GPU of CUDA nor ``cpu``.
    """
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"make a loader: expected a device such as 'cuda' or 'cuda:1', got {device!r}"
        ) from error
    if found is not None and found.type not in ("cpu", "cuda"):
        raise UsageError(
            f"make a loader: expected a device of type cuda or cpu, got {device!r}; leave device= "
            "out and move batches with batch.to"
        )
    return None if found is None or found.type == "cpu" else found


def has_accelerator() -> bool:
    """Return True if memory can be pinned for an accelerator; warn if not."""
    if torch.accelerator.is_available():
        return True
    warnings.warn(
        "pin_memory: there is no accelerator, batches stay in ordinary memory", stacklevel=3
    )
    return False


def open_memory(opened: HostMemory | None, device: torch.device | None, *, pin: bool) -> HostMemory:
    """Return the memory in which a loader makes batches.

    Args:
        opened: memory that was opened before; returned if it belongs to this process.
        device: the GPU; None for the memory of this machine.
        pin: True for page-locked memory; for a GPU, that of the reader is locked.

    Raises:
        UsageError: PyTorch finds no such GPU.
    """
    if opened is not None and opened.owner.is_current():
        return opened
    if device is not None:
        return DeviceMemory(Cuda(device), lock=pin)
    return PinnedMemory() if pin else HostMemory()


class DeviceMemory(PinnedMemory):
    """Memory of a GPU.

    Args:
        cuda: the GPU.
        lock: True to page-lock the sample memory of readers.

    """

    def __init__(self, cuda: Cuda, *, lock: bool) -> None:
        super().__init__()
        self._cuda = cuda
        self._lock = lock
        self._copies = Copies(cuda)
        self._locks: dict[SampleMemory, PageLock | None] = {}
        self._made: list[torch.Tensor] = []
        """Tensors of the batch in progress that were allocated on the stream of copies."""
        self._finalize = weakref.finalize(self, _close, self._locks)
        self._finalize.atexit = False  # the system unlocks

    def pack(self, batch: Batch) -> torch.Tensor:
        """Copy the samples of a batch to the GPU one after the other."""
        lock = self._find_lock(batch)
        if lock is not None and batch.lengths.any():
            with self._copies.begin(batch):
                if not lock.closed:
                    values = self._copy(batch, lock)
                    self._made.append(values)
                    return values
        return self._move(super().pack(batch))

    def _copy(self, batch: Batch, lock: PageLock) -> torch.Tensor:
        """Begin the copy of a batch that lies in page-locked memory."""
        lengths = np.maximum(batch.lengths, 0)
        if lock.view is None or lengths.mean() >= COPY_BYTES_MIN:
            return self._copy_each(batch, lengths)
        first = batch.data.__array_interface__["data"][0] - lock.memory.address
        return gather_bytes(lock.view, batch.offsets + first, lengths, self._place_one)

    def _copy_each(self, batch: Batch, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        """Begin a copy of each sample, by the GPU's copy engines."""
        source = view_memory(batch)
        values = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=self._cuda.device)
        ranges = zip(batch.offsets.tolist(), lengths.tolist(), strict=True)
        parts = torch.split(values, lengths.tolist())
        for part, (start, length) in zip(parts, ranges, strict=True):
            part.copy_(source[start : start + length], non_blocking=True)
        return values

    def _find_lock(self, batch: Batch) -> PageLock | None:
        """Return the lock of the memory that a batch lies in, locked at its first batch."""
        memory = batch.sample_memory if self._lock else None
        if memory is None:
            return None
        if memory not in self._locks:
            for closed in [one for one in self._locks if one.closed]:
                del self._locks[closed]
            self._locks[memory] = self._make_lock(memory)
        return self._locks[memory]

    def _make_lock(self, memory: SampleMemory) -> PageLock | None:
        try:
            return PageLock(memory, self._cuda, self._copies)
        except PageLockError as error:
            warnings.warn(
                f"pin_memory: the sample memory is not page-locked: {error}; the processor copies "
                "each batch to page-locked memory before the GPU takes it",
                stacklevel=2,
            )
            return None

    # ---- other tensors ---------------------------------------------------------------------------

    def _staging(self, size_bytes: int) -> torch.Tensor:
        return self._cuda.staging(size_bytes)

    def _is_placed(self, value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or value.device == self._cuda.device

    def _place_one(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_placed(tensor) else self._move(self._cuda.pin(tensor))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self._cuda.device, non_blocking=True)
        self._made.append(moved)
        return moved

    # ---- batches ---------------------------------------------------------------------------------

    def give(self, batches: Iterator[TensorBatch]) -> Iterator[TensorBatch]:
        """Yield batches, each for the caller's present stream.

        Their copies begin ``COPIES_AHEAD`` batches before they are requested.
        """
        return map(self._give_one, take_ahead(self._begin_each(batches), COPIES_AHEAD))

    def _begin_each(
        self, batches: Iterator[TensorBatch]
    ) -> Iterator[tuple[TensorBatch, list[torch.Tensor], Any]]:
        begun: deque[Any] = deque()
        while True:
            if len(begun) == COPIES_MAX:
                begun.popleft().synchronize()
            self._copies.release_passed()
            with self._cuda.copying():
                self._made = []
                made = next(batches, None)
                if made is None:
                    return
                batch = self._place(made)
                del made
                event = self._cuda.record()
            begun.append(event)
            yield batch, self._made, event
            del batch

    def _give_one(self, begun: tuple[TensorBatch, list[torch.Tensor], Any]) -> TensorBatch:
        batch, made, event = begun
        self._cuda.give(made, event)
        return batch

    def close(self) -> None:
        """Wait for the copies, and unlock the sample memory. Idempotent."""
        if self.owner.is_current():
            self._copies.wait()
            _close(self._locks)


def _close(locks: dict[SampleMemory, PageLock | None]) -> None:
    for lock in list(locks.values()):
        if lock is not None:
            lock.close()
    locks.clear()


def gather_bytes(
    source: torch.Tensor,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    move: Any,
) -> torch.Tensor:
    """Copy ranges of bytes one after the other, by one program on the device.

    Args:
        source: memory with the ranges, ``uint8[...]``, that the device can read.
        starts: first byte of each range, ``int64[n]``.
        lengths: length of each range in bytes, ``int64[n]``.
        move: copies a tensor to the device.

    Returns:
        The bytes, ``uint8[sum of lengths]``.
    """
    bits = int(np.bitwise_or.reduce(starts | lengths)) | max(WORDS)
    size = bits & -bits
    words = source[: len(source) // size * size].view(WORDS[size])
    counts = lengths // size
    ends = np.cumsum(counts)
    shifts = starts // size - (ends - counts)  # from a word's place in the result to its source
    if (counts == counts[0]).all():
        moved = move(torch.from_numpy(shifts))
        index = moved.repeat_interleave(int(counts[0]), output_size=int(ends[-1]))
    else:
        moved = move(torch.from_numpy(np.stack([shifts, counts])))
        index = torch.repeat_interleave(moved[0], moved[1], output_size=int(ends[-1]))
    index += torch.arange(int(ends[-1]), device=index.device)
    return torch.take(words, index).view(torch.uint8)
