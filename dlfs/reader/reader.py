"""Reads the samples of one dataset: verified batches, on demand or an epoch at a time.

Native code does the work (``native/src/reader/``, ``native/src/stream/``); here its failures
become typed errors or, where the caller wants it, samples that are left out or replaced. Every
sample's CRC32C is verified before its bytes are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dlfs._native.batch import NativeBatch, NativeFailure
from dlfs._native.device import NativeDevice
from dlfs._native.library import describe, error_for
from dlfs._native.reader import NativeReader, StreamOptions
from dlfs.arguments import OnError, check_on_error
from dlfs.attributes import AttributeTable
from dlfs.block import BlockDevice
from dlfs.directory import FrozenDirectory, as_indices, find_outside
from dlfs.errors import DlfsError, LimitError, UsageError
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.reader import parts
from dlfs.reader.backend import ReaderBackend, StreamBackend
from dlfs.reader.batch import Batch
from dlfs.reader.failures import SampleFailure, Where, describe_failures
from dlfs.sequence import Sequence as EpochSequence
from dlfs.units import KIB, MIB

MEMORY_CHUNKS_MIN = 4
"""libdlfs wants memory for at least this many chunks."""

MEMORY_CHUNKS_MAX = (1 << 31) - 1
"""libdlfs numbers the chunks of its memory with 31 bits."""

DEPTH_MAX = 4096
"""Most operations in flight per member and thread (``DLFS_DEPTH_MAX``)."""

TIMEOUT_MS = 30_000
"""For one read with all its retries, unless a device's own time-outs are longer."""

GRACE_MS = 1_000
"""Beyond a device's own time-outs."""

REPLACEMENTS_MAX = 16
"""Samples tried in place of a bad one before it is an error after all."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How a dataset is read.

    Attributes:
        memory_bytes: budget of this reader, which is one open dataset in one process, in bytes:
            samples that are cached, read ahead and lent to batches; at least four chunks are used.
        depth: operations in flight per member and thread, 1..4096.
        gap_bytes: two samples nearer than this are read by one request: about what a device moves
            in the time that one more request costs.
        retry_count: tries after the first of a read that failed or brought a wrong checksum.
        timeout_ms: for one read, or one batch of an epoch, with all its retries; where there are
            copies, another one is read when a member is silent for a sixteenth of it. A large read
            that comes bit by bit may take 4 s more for each MiB. See ``read_timeout_ms``.
        shared: the sample memory lies in a file without a name, for channels to other processes.
    """

    memory_bytes: int = 256 * MIB
    depth: int = 128
    gap_bytes: int = 16 * KIB
    retry_count: int = 2
    timeout_ms: int = TIMEOUT_MS
    shared: bool = False


def read_timeout_ms(devices: Sequence[BlockDevice]) -> int:
    """How long to wait for a read before it is reported: ``TIMEOUT_MS``, or more.

    A device that is told to look for its target for longer (``reconnect_ms`` of its URI) is given
    that time, and ``GRACE_MS`` to say itself what happened: its own error is the better one.
    """
    operation_timeout_ms = max((device.operation_timeout_ms for device in devices), default=0)
    return max(TIMEOUT_MS, operation_timeout_ms + GRACE_MS if operation_timeout_ms else 0)


def make_native_reader(
    devices: Sequence[NativeDevice | None],
    geometry: Geometry,
    runs: Sequence[ChunkRun],
    directory: FrozenDirectory,
    options: ReaderOptions,
) -> NativeReader:
    """Make the native reader of a dataset.

    Args:
        devices: the members' devices, in member order; None for one that cannot be had.
        geometry: of the volume.
        runs: of the dataset's data, in order.
        directory: of the dataset.
        options: how to read.

    Raises:
        UsageError: an option is out of range.
        LimitError: so much memory cannot be addressed.
    """
    memory_bytes_max = MEMORY_CHUNKS_MAX * geometry.chunk_bytes
    if options.memory_bytes > memory_bytes_max:
        raise LimitError(
            f"make a reader: expected memory of at most {memory_bytes_max} bytes for chunks of "
            f"{geometry.chunk_bytes}, got {options.memory_bytes}"
        )
    return NativeReader(
        devices,
        [(run.first_chunk, run.chunk_count) for run in runs],
        directory.native,
        chunk_bytes=geometry.chunk_bytes,
        block_bytes=geometry.block_bytes,
        data_offset_bytes=geometry.data_offset_bytes,
        memory_bytes=max(options.memory_bytes, MEMORY_CHUNKS_MIN * geometry.chunk_bytes),
        gap_bytes=options.gap_bytes,
        depth=options.depth,
        retry_count=options.retry_count,
        timeout_ms=options.timeout_ms,
        replicas=geometry.replicas,
        band_rows=geometry.band_rows,
        shared=options.shared,
    )


class SampleReader:
    """Reads one dataset.

    Args:
        native: what reads; closed with this object.
        geometry: of the volume.
        directory: of the dataset.
        where: what errors call dataset and members.
        diagnose: asked when samples failed; the error that explains it (StaleError), or None.
        on_loss: told the number of a member that was lost, with the reason, or that is back, with
            None.

    Attributes:
        native: as given.
        directory: as given.
        chunk_bytes: of the volume.
        has_copies: whether every chunk lies on more than one member.
        attributes: gives the dataset's columns, for batches of arrays; None: it has none.

    Threads: any at once.
    """

    attributes: Callable[[], AttributeTable] | None = None

    def __init__(
        self,
        native: ReaderBackend,
        geometry: Geometry,
        directory: FrozenDirectory,
        where: Where,
        diagnose: Callable[[], DlfsError | None] | None = None,
        on_loss: Callable[[int, str | None], None] = lambda _number, _reason: None,
    ) -> None:
        self.directory = directory
        self.chunk_bytes = geometry.chunk_bytes
        self._where = where
        self._diagnose = diagnose
        self._on_loss = on_loss
        self._lost = 0
        self.has_copies = geometry.replicas > 1
        self.native = native

    def read(self, indices: npt.ArrayLike, *, on_error: OnError = "raise") -> Batch:
        """Read samples as one batch, in the order asked for; an index may occur more than once.

        Args:
            indices: integers, ``[n]``, each 0..N-1.
            on_error: ``raise``; ``skip`` leaves bad samples out; ``replace`` reads the next good
                one in path order instead. What was skipped or replaced is in the batch's
                ``failures``.

        Raises:
            UsageError: an index is out of range, or there is no such policy.
            ChecksumError, DeviceError, FormatError: a sample cannot be read.
            StaleError: the dataset was removed.
        """
        check_on_error(on_error)
        wanted = as_indices(indices, option="indices", action="read samples")
        try:
            native = self.native.read(wanted)
        except UsageError as error:
            problem = find_outside(indices, 0, len(self.directory), option="indices")
            raise UsageError(f"read samples: {problem}") if problem else error from error
        return self.build_batch(native, on_error)

    def get(self, index: int) -> bytes:
        """Read one sample.

        Args:
            index: 0..N-1.

        Raises:
            UsageError: the index is out of range.
            ChecksumError, DeviceError, FormatError: the sample cannot be read.
            StaleError: the dataset was removed.
        """
        if not 0 <= index < len(self.directory):
            raise UsageError(
                f"read a sample: expected an index 0..{len(self.directory) - 1}, got {index}"
            )
        found = self.native.get(index)
        if self.has_copies:
            self.watch_members()
        if found is not None:
            return found
        if parts.is_large(self, index):
            return parts.read_bytes(self, index)
        with self.read([index]) as batch:  # it is large, or failed: once more, for the whole story
            return batch.tobytes(0)

    def get_kept(self, index: int) -> bytes | None:
        """One sample of at most 1 MiB if it is in memory; None if it would have to be waited for.

        Args:
            index: 0..N-1.
        """
        return self.native.get(index, cached_only=True)

    def stream(self, sequence: EpochSequence, options: StreamOptions) -> StreamBackend:
        """Start reading some positions of an epoch's order ahead."""
        return self.native.stream(sequence.native, options)

    def build_batch(self, native: NativeBatch, on_error: OnError) -> Batch:
        """Turn what libdlfs read into a batch, with the policy for samples that failed."""
        if native.lost_members != self._lost:
            self.watch_members()
        if not native.failures:
            return Batch(native, attributes=self.attributes, dataset=self._where.dataset)
        diagnosis = self.diagnose()  # first: a removed dataset may have lost its names too
        if diagnosis is not None:
            raise diagnosis
        failures = describe_failures(native.failures, self.directory, self._where)
        if on_error == "raise":
            raise failures[0].error(others=len(failures) - 1)
        if on_error == "skip":
            return self._batch(native, native.lengths >= 0, failures)
        return self._replace(native, failures)

    def _batch(
        self,
        native: NativeBatch,
        keep: npt.NDArray[np.bool_] | None = None,
        failures: tuple[SampleFailure, ...] = (),
    ) -> Batch:
        return Batch(native, keep, failures, self.attributes, dataset=self._where.dataset)

    def watch_members(self) -> None:
        """Tell of members that were lost since the last look, or are back."""
        lost = self.native.lost_members()
        changed, self._lost = lost ^ self._lost, lost
        for number in range(changed.bit_length()):
            if changed >> number & 1:
                reason = describe(self.native.member_code(number)) if lost >> number & 1 else None
                self._on_loss(number, reason)

    def diagnose(self) -> DlfsError | None:
        """What explains that samples fail: StaleError when the dataset was removed, else None."""
        return self._diagnose() if self._diagnose is not None else None

    def explain(self, failure: NativeFailure) -> DlfsError:
        """The error that tells of a failure which libdlfs reported to others than this object."""
        self.watch_members()
        return (
            self.diagnose() or describe_failures([failure], self.directory, self._where)[0].error()
        )

    def explain_code(self, code: int) -> DlfsError:
        """Likewise, of a read that failed as a whole, or of the directory."""
        self.watch_members()
        return self.diagnose() or error_for(code, f"read dataset {self._where.dataset!r}")

    def _replace(self, native: NativeBatch, failures: tuple[SampleFailure, ...]) -> Batch:
        """Read the batch again with the next index in place of each that failed."""
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
        """Counters since the reader was opened, by their names in ``dlfs_reader_stats``."""
        return self.native.stats()

    def member_stats(self) -> list[dict[str, Any]]:
        """Counters of each member's reads since the reader was opened, in member order.

        Returns:
            ``uri``, ``lost``, and what ``dlfs_member_stats`` has: ``reads``, ``read_bytes``,
            ``errors``, ``latency_ns`` (the sum) and ``latency``, the numbers of reads that took
            less than 2, 4, 8, ... us.
        """
        lost = self.native.lost_members()
        return [
            {"uri": uri, "lost": bool(lost >> number & 1), **self.native.member_stats(number)}
            for number, uri in enumerate(self._where.members)
        ]

    @property
    def member_count(self) -> int:
        """Members of the volume."""
        return len(self._where.members)

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self.native.closing

    def close(self, on_closed: Callable[[], None] | None = None) -> None:
        """Give up memory and queue pairs, once batches still in use are gone. Idempotent.

        Args:
            on_closed: called when epochs and calls under way have ended, too: at once if there are
                none, else by the last of them.
        """
        self.native.close(on_closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
