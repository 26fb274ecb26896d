"""Makes all copies of a data space equal to the bytes whose checksums are right.

The space is read window by window, each copy separately. The correct bytes are assembled from the
copies. A sample comes from the first copy with the right checksum, and so does each part of a
sample larger than a chunk. Bytes between samples come from the first readable copy. Then every copy
is compared with the correct bytes, and the blocks that differ are written.

A sample without a valid copy is reported and left as it is in every copy: an unreadable copy, or
one of an unreadable directory, may be the right one. Only a new device, which has no data to lose,
gets the bytes of the first readable copy.

Threads: one. Memory: three windows of each copy, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c
from dlfs._native.packing import sum_ranges
from dlfs.base.wording import quote
from dlfs.block import BlockDevice, aligned_buffer
from dlfs.directory import FrozenDirectory, checked_ranges
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import display
from dlfs.store.chunk_reader import (
    WINDOW_BYTES,
    CopyOrder,
    FailedRead,
    Window,
    scan_space,
)

Bytes = NDArray[np.uint8]
Spans = list[slice]
"""Ranges of a window or a chunk."""


@dataclass(eq=False)
class RepairState:
    """The devices of a repair and its results so far.

    Attributes:
        sources: devices to read the members from, in order.
        targets: devices to write the members to, in order.
        progress: called with the bytes of one copy that have been read.
        fresh: members whose target is empty and is not the source.
        stale: members whose bytes are used only if a checksum proves them.
        done_bytes: bytes of one copy that have been read.
        written_bytes: bytes written to copies that were wrong or missing.
        damaged: one text for each part of which no copy is right.
    """

    sources: Sequence[BlockDevice]
    targets: Sequence[BlockDevice]
    progress: Callable[[int], None]
    fresh: frozenset[int] = frozenset()
    stale: frozenset[int] = frozenset()
    done_bytes: int = 0
    written_bytes: int = 0
    damaged: list[str] = field(default_factory=list)

    def progress_by(self, size_bytes: int) -> None:
        """Count bytes of one copy as read, and report the progress."""
        self.done_bytes += size_bytes
        self.progress(self.done_bytes)


def repair_bytes(state: RepairState, space: DataSpace, correct: Bytes | None) -> None:
    """Write known bytes, or the first readable copy, to the copies of a space.

    Args:
        state: devices and results of the repair.
        space: space to repair.
        correct: correct bytes of its first chunks, in whole chunks; later chunks are left alone.
            None if they are unknown: then only new devices are written.
    """
    unverified = [slice(None)] if correct is None else []
    _SpaceRepair(state, space).run(lambda _part, _windows: unverified, correct)


def repair_samples(
    state: RepairState, space: DataSpace, directory: FrozenDirectory, name: str, *, start: int
) -> None:
    """Make the copies of a dataset's data agree with the checksums of its samples.

    Args:
        state: devices and results of the repair.
        space: space of the dataset's samples.
        directory: sample directory of the dataset.
        name: name of the dataset in reports.
        start: address of the first chunk to repair; those before it agree already.
    """
    samples = _Samples(state, space, directory, name, start)
    _SpaceRepair(state, space, start).run(samples.patch, None)


class _SpaceRepair:
    """One pass over a space that repairs its copies."""

    def __init__(self, state: RepairState, space: DataSpace, start: int = 0) -> None:
        self._state = state
        self._space = space
        self._start = start
        self._geometry = space.geometry
        chunk_bytes = space.geometry.chunk_bytes
        size = min(max(WINDOW_BYTES, chunk_bytes), max(space.size_bytes, chunk_bytes))
        self._correct = aligned_buffer(size, max(4096, space.geometry.block_bytes))

    def run(
        self,
        patch: Callable[[Window, Sequence[Window]], Spans],
        correct: Bytes | None,
    ) -> None:
        """Read, correct and write all windows.

        Args:
            patch: corrects an assembled window, given all copies of it, and returns its unverified
                ranges.
            correct: correct bytes from the start of the space; None to assemble them from the
                copies.
        """
        with ExitStack() as stack:
            scans = [stack.enter_context(closing(self._scan(c))) for c in self._copies]
            for windows in zip(*scans, strict=True):
                address, size = windows[0].address, windows[0].memory.nbytes
                failures: list[FailedRead] = []
                if correct is None:
                    memory = self._correct[:size]
                    failures = list(self._assemble(memory, windows))
                else:
                    size = min(size, correct.nbytes - address)
                    if size <= 0:
                        break
                    memory = self._correct[:size]
                    memory[:] = correct[address : address + size]
                part = Window(address, memory, tuple(failures))
                self._write(part, windows, patch(part, windows))
                self._state.progress_by(size)

    @property
    def _copies(self) -> range:
        return range(self._geometry.replicas)

    def _scan(self, copy: int) -> Generator[Window, None, None]:
        choice = CopyOrder(copy=copy, only=True)
        return scan_space(self._state.sources, self._space, choice, start=self._start)

    def _assemble(self, memory: Bytes, windows: Sequence[Window]) -> Iterator[FailedRead]:
        """Copy each chunk from its first readable copy; yield the chunks without one."""
        chunk_bytes = self._geometry.chunk_bytes
        base = windows[0].address
        for start in range(0, memory.nbytes, chunk_bytes):
            address = base + start
            failure = None
            members = [self._space.resolve(address, copy)[0] for copy in self._copies]
            for copy in sorted(self._copies, key=lambda copy: members[copy] in self._state.stale):
                failure = windows[copy].failure_at(address, chunk_bytes)
                if failure is None:
                    memory[start : start + chunk_bytes] = windows[copy].memory[start:][:chunk_bytes]
                    break
            if failure is not None:
                yield FailedRead(address, chunk_bytes, failure.error)
                self._state.damaged.append(f"no copy can be read: {failure.error}")

    def _write(self, part: Window, windows: Sequence[Window], unverified: Spans) -> None:
        chunk_bytes = self._geometry.chunk_bytes
        unverified_mask = np.zeros(part.memory.nbytes if unverified else 0, np.bool_)
        for span in unverified:
            unverified_mask[span] = True
        for start in range(0, part.memory.nbytes, chunk_bytes):
            address = part.address + start
            if part.failure_at(address, chunk_bytes) is not None:
                continue
            correct = part.memory[start : start + chunk_bytes]
            for copy, window in enumerate(windows):
                got: Bytes | None = window.memory[start : start + chunk_bytes]
                if window.failure_at(address, chunk_bytes) is not None:
                    got = None
                self._write_copy(
                    address, copy, correct, got, unverified_mask[start : start + chunk_bytes]
                )

    def _write_copy(
        self,
        address: int,
        copy: int,
        correct: Bytes,
        got: Bytes | None,
        unverified_mask: NDArray[np.bool_],
    ) -> None:
        """Write the blocks of a chunk that differ; all of them if the chunk could not be read.

        Unverified bytes are not written, except to a new device. An empty mask means that all bytes
        are verified.
        """
        member, offset_bytes = self._space.resolve(address, copy)
        target = self._state.targets[member]
        block_bytes = self._geometry.block_bytes
        if member in self._state.fresh:
            got, unverified_mask = None, unverified_mask[:0]
        differ = np.ones(correct.nbytes // block_bytes, np.bool_)
        if got is not None:
            correct = np.where(unverified_mask, got, correct) if unverified_mask.size else correct
            differ = (correct.reshape(-1, block_bytes) != got.reshape(-1, block_bytes)).any(axis=1)
        elif unverified_mask.size:
            differ[unverified_mask.reshape(-1, block_bytes).any(axis=1)] = False
        edges = np.flatnonzero(np.diff(np.concatenate(([0], differ.view(np.int8), [0]))))
        for first, end in edges.reshape(-1, 2).tolist():
            blocks = correct[first * block_bytes : end * block_bytes]
            target.write(offset_bytes + first * block_bytes, blocks)
            self._state.written_bytes += blocks.nbytes


class _Samples:
    """The samples of a dataset by address, and which of their copies are right."""

    def __init__(
        self,
        state: RepairState,
        space: DataSpace,
        directory: FrozenDirectory,
        name: str,
        start: int,
    ) -> None:
        self._state = state
        self._directory = directory
        self._name = name
        self._ranges = checked_ranges(directory, start=start, end=space.size_bytes)

    def patch(self, part: Window, windows: Sequence[Window]) -> Spans:
        """Correct what is wrong in an assembled window from copies that are right.

        Returns:
            The ranges without a right copy: samples, or parts of large ones.
        """
        ranges = self._ranges
        first = int(np.searchsorted(ranges.addresses, part.address))
        crcs = sum_ranges(ranges.locations[first:], window=part.memory, window_address=part.address)
        unverified: Spans = []
        bad = np.flatnonzero(crcs != ranges.crcs[first : first + len(crcs)])
        for number in (first + bad).tolist():
            start = int(ranges.addresses[number]) - part.address
            span = slice(start, start + int(ranges.lengths[number]))
            if not _patch_span(span, int(ranges.crcs[number]), part, windows):
                self._report(number)
                unverified.append(span)
        return unverified

    def _report(self, number: int) -> None:
        index, crc = int(self._ranges.samples[number]), int(self._ranges.crcs[number])
        length = int(self._ranges.lengths[number])
        whole, path = int(self._directory.lengths([index])[0]), display(self._directory.name(index))
        part = ""
        if length < whole:
            offset = int(self._ranges.addresses[number] - self._directory.addresses([index])[0])
            part = f", bytes {offset} to {offset + length - 1} of {whole}"
        where = f"sample {index} {quote(path)} of {self._name}{part}"
        self._state.damaged.append(f"{where}: no copy has its CRC32C {crc:#010x}")


def _patch_span(span: slice, crc: int, part: Window, windows: Sequence[Window]) -> bool:
    """Copy a range from the first copy with the right checksum; return False if none has."""
    for window in windows:
        readable = window.failure_at(part.address + span.start, span.stop - span.start) is None
        if readable and crc32c(window.memory[span].data) == crc:
            part.memory[span] = window.memory[span]
            return True
    return False
