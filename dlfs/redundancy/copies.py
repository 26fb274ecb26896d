"""Makes all copies of a data space equal to the bytes whose checksums are right.

The space is read window by window, each copy separately. The correct bytes are assembled from the
copies. A small sample comes from the first copy with the right checksum. A sample larger than a
chunk is read in several ways until its checksum is right, which gives a checksum for each of its
chunks. Bytes between samples come from the first readable copy. Then every copy is compared with
the correct bytes, and the blocks that differ are written.

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
from dlfs._native.packing import Checker
from dlfs.block import BlockDevice, aligned_buffer
from dlfs.directory import FrozenDirectory
from dlfs.errors import DeviceError
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import display
from dlfs.store.chunk_reader import (
    WINDOW_BYTES,
    CopyOrder,
    FailedRead,
    Window,
    copy_orders,
    read_into,
    scan_space,
)
from dlfs.wording import quote

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
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
    samples.find_chunk_checksums()
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
            for copy in sorted(self._copies, key=lambda copy: self._is_stale(address, copy)):
                failure = windows[copy].failure_at(address, chunk_bytes)
                if failure is None:
                    memory[start : start + chunk_bytes] = windows[copy].memory[start:][:chunk_bytes]
                    break
            if failure is not None:
                yield FailedRead(address, chunk_bytes, failure.error)
                self._state.damaged.append(f"no copy can be read: {failure.error}")

    def _is_stale(self, address: int, copy: int) -> bool:
        return self._space.resolve(address, copy)[0] in self._state.stale

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
        self._space = space
        self._directory = directory
        self._name = name
        addresses, lengths = directory.addresses().astype(np.int64), directory.lengths()
        inside = (lengths > 0) & (addresses >= start) & (addresses + lengths <= space.size_bytes)
        order = np.flatnonzero(inside)
        order = order[np.argsort(addresses[order], kind="stable")]
        large = lengths[order] > space.geometry.chunk_bytes
        self._addresses, self._lengths, self._crcs = addresses, lengths, directory.crcs()
        self._small: Indices = order[~large]
        self._starts: Indices = addresses[self._small]
        self._large: Indices = order[large]
        self._chunks: dict[int, tuple[int, int, int]] = {}
        """Chunks of large samples, by address: sample index, length in bytes and CRC32C."""
        self._lost: list[tuple[int, int]] = []
        """Address ranges of large samples that no reading gave with the right checksum."""

    # ---- large samples ---------------------------------------------------------------------------

    def find_chunk_checksums(self) -> None:
        """Find a right reading of each large sample, and the checksums of its chunks."""
        for index in self._large.tolist():
            first = int(self._addresses[index])
            chunks = self._checksums_of(index)
            if chunks is None:
                self._report(index)
                self._lost.append((first, first + int(self._lengths[index])))
                continue
            self._chunks |= {address: (index, *chunk) for address, chunk in chunks.items()}

    def _checksums_of(self, index: int) -> dict[int, tuple[int, int]] | None:
        for choice in copy_orders(self._space.geometry):
            try:
                crc, chunks = self._sum(index, choice)
            except DeviceError:
                continue
            if crc == int(self._crcs[index]):
                return chunks
        return None

    def _sum(self, index: int, choice: CopyOrder) -> tuple[int, dict[int, tuple[int, int]]]:
        """Return the checksums of a sample and its chunks, read in one way; it starts a chunk."""
        block = max(4096, self._space.geometry.block_bytes)
        chunk_bytes = self._space.geometry.chunk_bytes
        memory = aligned_buffer(max(WINDOW_BYTES, chunk_bytes), block)
        first, left, crc = int(self._addresses[index]), int(self._lengths[index]), 0
        chunks: dict[int, tuple[int, int]] = {}
        while left > 0:
            part = memory[: min(-(-left // block) * block, memory.nbytes)]
            read_into(self._state.sources, self._space, first, part, choice)
            taken = min(left, part.nbytes)
            crc = crc32c(part[:taken].data, crc)
            for start in range(0, taken, chunk_bytes):
                chunk = part[start : min(start + chunk_bytes, taken)]
                chunks[first + start] = chunk.nbytes, crc32c(chunk.data)
            first, left = first + taken, left - taken
        return crc, chunks

    def _patch_large(self, part: Window, windows: Sequence[Window]) -> Iterator[slice]:
        """Correct the chunks of large samples; yield the ranges without a right copy."""
        end = part.address + part.memory.nbytes
        for address in range(part.address, end, self._space.geometry.chunk_bytes):
            if address not in self._chunks:
                continue
            index, length, crc = self._chunks[address]
            span = slice(address - part.address, address - part.address + length)
            whole = crc32c(part.memory[span].data) == crc
            if not whole and not _patch_span(span, crc, part, windows):
                self._report(index)
                yield span
        for first, last in self._lost:
            if first < end and last > part.address:
                yield slice(max(first - part.address, 0), last - part.address)

    # ---- small samples ---------------------------------------------------------------------------

    def patch(self, part: Window, windows: Sequence[Window]) -> Spans:
        """Correct the wrong samples of an assembled window from copies that are right.

        Returns:
            The ranges of samples without a right copy.
        """
        unverified = list(self._patch_large(part, windows))
        end = part.address + part.memory.nbytes
        low, high = np.searchsorted(self._starts, [part.address, end])
        chosen = self._small[low:high]
        geometry = self._space.geometry
        checker = Checker(
            chunk_bytes=geometry.chunk_bytes,
            block_bytes=geometry.block_bytes,
            locations=self._directory.locations,
        )
        crcs = checker.check(
            chosen.astype(np.uint64), window=part.memory, window_address=part.address
        )
        for index in chosen[np.flatnonzero(crcs != self._crcs[chosen])].tolist():
            start = int(self._addresses[index]) - part.address
            span = slice(start, start + int(self._lengths[index]))
            if not _patch_span(span, int(self._crcs[index]), part, windows):
                self._report(index)
                unverified.append(span)
        return unverified

    def _report(self, index: int) -> None:
        path = display(self._directory.name(index))
        self._state.damaged.append(
            f"sample {index} {quote(path)} of {self._name}: no copy has its CRC32C "
            f"{int(self._crcs[index]):#010x}"
        )


def _patch_span(span: slice, crc: int, part: Window, windows: Sequence[Window]) -> bool:
    """Copy a range from the first copy with the right checksum; return False if none has."""
    for window in windows:
        readable = window.failure_at(part.address + span.start, span.stop - span.start) is None
        if readable and crc32c(window.memory[span].data) == crc:
            part.memory[span] = window.memory[span]
            return True
    return False
