"""Reads the samples of one dataset as verified batches.

A ``SampleReader`` calls a ``ReaderBackend`` (``native/src/reader/``, ``native/src/stream/``). It
raises the failures of the backend as typed errors, or leaves failed samples out or replaces them.
The CRC32C of every sample is verified before the caller gets its bytes.

Threads: any at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.batch import NativeBatch, NativeFailure
from dlfs._native.device import NativeDevice
from dlfs._native.library import describe, error_for
from dlfs._native.reader import NativeReader, StreamOptions
from dlfs.attributes import AttributeTable
from dlfs.base.arguments import OnError, check_on_error
from dlfs.base.closing import Closing
from dlfs.base.deadlines import CALL_TIMEOUT_MS, call_timeout_ms, limit_call
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice
from dlfs.directory import FrozenDirectory, as_indices, find_outside
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.order import Sequence as EpochSequence
from dlfs.epoch.selection import Selection
from dlfs.errors import DlfsError, LimitError, UsageError
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.reader import parts
from dlfs.reader.backend import ReaderBackend, StreamBackend
from dlfs.reader.batch import Batch
from dlfs.reader.budget import MEMORY_CHUNKS_MIN, MemoryBudget
from dlfs.reader.failures import SampleFailure, Where, describe_failures
from dlfs.reader.following import Placement

MEMORY_CHUNKS_MAX = (1 << 31) - 1
"""Largest sample memory, in chunks: libdlfs numbers them with 31 bits."""

DEPTH_MAX = 4096
"""Most operations in flight per member and thread (``DLFS_DEPTH_MAX``)."""

REPLACEMENTS_MAX = 16
"""Most rounds of replacing failed samples before the read fails."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a reader.

    Attributes:
        memory: sample memory that it shares with other readers: samples that are cached, read
            ahead and pinned by batches. None for memory of its own.
        memory_bytes: size of memory of its own, in bytes; at least four chunks are used.
        depth: operations in flight per member and thread, 1..4096.
        gap_bytes: largest gap between two samples that one request reads, in bytes: about the bytes
            that a device transfers in the time of one more request.
        retry_count: retries of a read that failed or returned a wrong checksum.
        timeout_ms: timeout of one read, or of one batch of an epoch, with all its retries, in
            milliseconds. With replicas, another copy is read after a sixteenth of it. Each MiB that
            has arrived adds 4 s. See ``base.deadlines``.
        parts: True if the directory has parts of samples; whole chunks are then not kept in memory.
    """

    memory: MemoryBudget | None = None
    memory_bytes: int = 256 * MIB
    depth: int = 128
    gap_bytes: int = 16 * KIB
    retry_count: int = 2
    timeout_ms: int = CALL_TIMEOUT_MS
    parts: bool = False


def read_timeout_ms(devices: Sequence[BlockDevice]) -> int:
    """Return the timeout of a read from some devices, in milliseconds: see ``base.deadlines``."""
    return call_timeout_ms([device.operation_timeout_ms for device in devices])


def make_native_reader(
    devices: Sequence[NativeDevice | None],
    geometry: Geometry,
    runs: Sequence[ChunkRun],
    directory: FrozenDirectory,
    options: ReaderOptions,
) -> NativeReader:
    """Make the native reader of a dataset.

    Args:
        devices: devices of the members, in order; None for a missing member.
        geometry: geometry of the volume.
        runs: chunk runs of the dataset's data, in order.
        directory: sample directory of the dataset.
        options: options of the reader.

    Raises:
        UsageError: an option is out of range.
        LimitError: the sample memory is too large to address.
    """
    memory = options.memory
    memory_bytes = options.memory_bytes if memory is None else memory.size_bytes
    memory_bytes_max = MEMORY_CHUNKS_MAX * geometry.chunk_bytes
    if memory_bytes > memory_bytes_max:
        raise LimitError(
            f"make a reader: expected memory of at most {memory_bytes_max} bytes for chunks of "
            f"{geometry.chunk_bytes}, got {memory_bytes}"
        )
    return NativeReader(
        devices,
        [(run.first_chunk, run.chunk_count) for run in runs],
        directory,
        abi.ReaderConfig(
            chunk_bytes=geometry.chunk_bytes,
            block_bytes=geometry.block_bytes,
            data_offset_bytes=geometry.data_offset_bytes,
            memory_bytes=max(memory_bytes, MEMORY_CHUNKS_MIN * geometry.chunk_bytes),
            gap_bytes=options.gap_bytes,
            depth=options.depth,
            retry_count=options.retry_count,
            timeout_ms=options.timeout_ms,
            replicas=geometry.replicas,
            flags=abi.READER_PARTS if options.parts else 0,
        ),
        arena=None if memory is None else memory.arena(geometry.chunk_bytes),
        groups=[
            (group.first_chunk, group.band_rows, group.first_member, group.member_count)
            for group in geometry.groups
        ],
    )


class SampleReader(Closing):
    """Reads the samples of one dataset.

    Args:
        native: backend that reads, local or of a service; closed with this object.
        geometry: geometry of the volume.
        directory: sample directory of the dataset.
        where: names of the dataset and its members in errors.
        placement: the chunks of the dataset; None if they stay.
        on_member_change: called with the number of a member and the reason of its loss, or with
            None when it has returned.

    Attributes:
        native: backend that reads.
        directory: sample directory of the dataset.
        chunk_bytes: chunk size of the volume, in bytes.
        has_copies: True if every chunk lies on several members.
        span: names of the consecutive fields that it reads; empty for whole samples.
        attributes: returns the columns of the dataset, for batches of arrays; None without columns.

    Threads: any at once.
    """

    attributes: Callable[[], AttributeTable] | None = None

    def __init__(
        self,
        native: ReaderBackend,
        geometry: Geometry,
        directory: FrozenDirectory,
        where: Where,
        placement: Placement | None = None,
        on_member_change: Callable[[int, str | None], None] = lambda _number, _reason: None,
    ) -> None:
        self.directory = directory
        self.chunk_bytes = geometry.chunk_bytes
        self._where = where
        self.span = where.span
        self._placement = placement
        self._on_loss = on_member_change
        self._lost = 0
        self.has_copies = geometry.replicas > 1
        self.native = native

    def read(self, indices: npt.ArrayLike, *, on_error: OnError = "raise") -> Batch:
        """Read samples as one batch, in the order of the indices; see ``Dataset.read``."""
        if not isinstance(on_error, str) or on_error != "raise":
            check_on_error(on_error)
        wanted = as_indices(indices, option="indices", action="read samples")
        asked = time.monotonic()
        try:
            native = self.native.read(wanted)
        except UsageError as error:
            problem = find_outside(indices, 0, len(self.directory), option="indices")
            raise UsageError(f"read samples: {problem}") if problem else error from error
        if not native.failures:
            return self.build_batch(native, on_error)
        with limit_call(time.monotonic() - asked):  # what is left explains the failures
            return self.build_batch(native, on_error)

    def get(self, index: int) -> bytes:
        """Read one sample by its index, 0..N-1; raises the errors of ``read``."""
        if not 0 <= index < len(self.directory):
            raise UsageError(
                f"read a sample: expected an index 0..{len(self.directory) - 1}, got {index}"
            )
        asked = time.monotonic()
        found = self.native.get(index)
        if self.has_copies:
            self.watch_members()
        if found is not None:
            return found
        # A large or failed sample: this read has its error. It does not wait for a silent member.
        with limit_call(time.monotonic() - asked):
            return parts.read_bytes(self, index)

    def get_if_cached(self, index: int) -> bytes | None:
        """Return a sample of at most 1 MiB if it is cached; None if it must be read first."""
        return self.native.get(index, flags=abi.GET_CACHED)

    def stream(
        self, options: EpochOptions, selection: Selection | None, part: StreamOptions
    ) -> StreamBackend:
        """Start reading some positions of an epoch's order ahead."""
        sequence = EpochSequence(
            self.directory, options, chunk_bytes=self.chunk_bytes, selection=selection
        )
        return self.native.stream(sequence.native, part)

    def build_batch(self, native: NativeBatch, on_error: OnError) -> Batch:
        """Make a batch of what libdlfs read, and apply the policy to failed samples."""
        if native.lost_members != self._lost:
            self.watch_members()
        if not native.failures:
            return self._batch(native)
        diagnosis = self.diagnose()  # first, as a removed dataset may have lost its names, too
        if diagnosis is not None:
            try:
                raise diagnosis
            finally:
                del diagnosis  # or it would keep this reader through its traceback
        failures = describe_failures(native.failures, self.directory, self._where)
        if on_error == "raise":
            raise failures[0].error(others=len(failures) - 1)
        if on_error == "skip":
            return self._batch(native, native.lengths >= 0, failures)
        return self._replace(native, failures)

    def _batch(
        self,
        native: NativeBatch,
        readable: npt.NDArray[np.bool_] | None = None,
        failures: tuple[SampleFailure, ...] = (),
    ) -> Batch:
        return Batch(
            native,
            readable,
            failures,
            self.attributes,
            dataset=self._where.dataset,
            span=self.span,
            arena=self.native.memory,
        )

    def watch_members(self) -> None:
        """Report the members that were lost, or have returned, since the last call."""
        lost = self.native.lost_members()
        changed, self._lost = lost ^ self._lost, lost
        for number in range(changed.bit_length()):
            if changed >> number & 1:
                reason = describe(self.native.member_code(number)) if lost >> number & 1 else None
                self._on_loss(number, reason)

    @property
    def moved(self) -> bool:
        """True once another reader must be opened, since the samples were moved."""
        return self._placement is not None and self._placement.moved

    def diagnose(self) -> DlfsError | None:
        """Return the error that explains failed samples: StaleError after a removal, else None.

        MovedError if the samples are elsewhere now; then another reader must be opened.
        """
        return None if self._placement is None else self._placement.diagnose()

    def explain(self, failure: NativeFailure) -> DlfsError:
        """Return the error for a failed sample that libdlfs reported to another caller."""
        self.watch_members()
        return (
            self.diagnose() or describe_failures([failure], self.directory, self._where)[0].error()
        )

    def explain_code(self, code: int) -> DlfsError:
        """Return the error for an error code of a whole read, or of the directory."""
        self.watch_members()
        return self.diagnose() or error_for(code, f"read dataset {self._where.dataset!r}")

    def _replace(self, native: NativeBatch, failures: tuple[SampleFailure, ...]) -> Batch:
        """Read the batch again, with the next index in place of each failed one."""
        indices = native.indices.copy()
        bad = list(failures)
        for _ in range(REPLACEMENTS_MAX):
            for failure in native.failures:
                indices[failure.position] = (int(indices[failure.position]) + 1) % len(
                    self.directory
                )
            native = self.native.read(indices)
            if not native.failures:
                return self._batch(native, None, tuple(bad))
            bad += describe_failures(native.failures, self.directory, self._where)
        raise bad[-1].error()

    def stats(self) -> dict[str, int]:
        """Return the counters since the reader was opened, by their ``dlfs_reader_stats`` names."""
        return self.native.stats()

    def member_stats(self) -> list[dict[str, Any]]:
        """Return the counters of each member's reads since the reader was opened, by member number.

        Returns:
            For each member ``uri``, ``lost``, and the fields of ``dlfs_member_stats``: ``reads``,
            ``read_bytes``, ``errors``, ``latency_ns`` (the sum) and ``latency``, the numbers of
            reads that took less than 2, 4, 8, ... us.
        """
        lost = self.native.lost_members()
        return [
            {"uri": uri, "lost": bool(lost >> number & 1), **self.native.member_stats(number)}
            for number, uri in enumerate(self._where.members)
        ]

    @property
    def member_count(self) -> int:
        """Number of members of the volume."""
        return len(self._where.members)

    @property
    def closing(self) -> bool:
        """True once ``close`` has been called, or the samples were moved: open another reader."""
        return self.native.closing or self.moved

    def close(self) -> None:
        """Free memory and queue pairs with the last epoch, call or batch in use. Idempotent."""
        self.native.close()
