"""Brings all copies of a space in line with what is right.

A space passes by window after window, each copy read by itself. What is right is put together from
the copies: for a small sample, the first copy in which its checksum holds; for one larger than a
chunk, the first way of reading it whole by which its checksum holds, which then gives one for each
of its chunks; for the room between samples, the first copy that can be read. Then every copy that
differs is written, block by block: blocks that are right already are not written.

What no copy is known to have right is told, and stays as it is in every copy: one that could not be
read now, or of a directory that could not, may be the good one. Only a new device, which has
nothing to lose, gets what there is. One thread; memory: three windows of each copy, and one.
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
    Choice,
    FailedRead,
    Window,
    alternatives,
    read_into,
    scan_space,
)
from dlfs.wording import quote

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Spans = list[slice]
"""Parts of a window or a chunk."""


@dataclass(eq=False)
class Mending:
    """What a repair works on, and what it has done.

    Attributes:
        sources: what to read the members from, in order.
        targets: what to write them to.
        progress: told bytes read so far of one copy of everything.
        fresh: members whose target holds nothing yet, and is not the source.
        stale: members that are believed only where a checksum holds.
        written_bytes: of copies that were wrong or not there.
        damaged: what no copy has right, for people.
    """

    sources: Sequence[BlockDevice]
    targets: Sequence[BlockDevice]
    progress: Callable[[int], None]
    fresh: frozenset[int] = frozenset()
    stale: frozenset[int] = frozenset()
    done_bytes: int = 0
    written_bytes: int = 0
    damaged: list[str] = field(default_factory=list)


def mend_bytes(mending: Mending, space: DataSpace, right: Bytes | None) -> None:
    """Bring the copies of a space in line with each other.

    Args:
        mending: what to work on.
        space: to be mended.
        right: what its first chunks hold, in whole chunks; the others are left alone. None: nobody
            knows, and only new devices are written.
    """
    doubtful = [slice(None)] if right is None else []
    _Mender(mending, space).run(lambda _part, _windows: doubtful, right)


def mend_samples(mending: Mending, space: DataSpace, directory: FrozenDirectory, name: str) -> None:
    """Bring a dataset's data in line with its samples' checksums.

    Args:
        mending: what to work on.
        space: of the dataset's data.
        directory: of the dataset.
        name: what the samples' dataset is called.
    """
    samples = _Samples(mending, space, directory, name)
    samples.sum_large()
    _Mender(mending, space).run(samples.patch, None)


class _Mender:
    """One pass over a space."""

    def __init__(self, mending: Mending, space: DataSpace) -> None:
        self._mending = mending
        self._space = space
        self._geometry = space.geometry
        chunk_bytes = space.geometry.chunk_bytes
        size = min(max(WINDOW_BYTES, chunk_bytes), max(space.size_bytes, chunk_bytes))
        self._right = aligned_buffer(size, max(4096, space.geometry.block_bytes))

    def run(
        self,
        patch: Callable[[Window, Sequence[Window]], Spans],
        right: Bytes | None,
    ) -> None:
        """Mend; ``patch`` puts right what was assembled, and gives what it cannot."""
        with ExitStack() as stack:
            scans = [stack.enter_context(closing(self._scan(c))) for c in self._copies]
            for windows in zip(*scans, strict=True):
                address, size = windows[0].address, windows[0].memory.nbytes
                failures: list[FailedRead] = []
                if right is None:
                    memory = self._right[:size]
                    failures = list(self._assemble(memory, windows))
                else:
                    size = min(size, right.nbytes - address)
                    if size <= 0:
                        break
                    memory = self._right[:size]
                    memory[:] = right[address : address + size]
                part = Window(address, memory, tuple(failures))
                self._write(part, windows, patch(part, windows))
                self._mending.done_bytes += size
                self._mending.progress(self._mending.done_bytes)

    @property
    def _copies(self) -> range:
        return range(self._geometry.replicas)

    def _scan(self, copy: int) -> Generator[Window, None, None]:
        return scan_space(self._mending.sources, self._space, Choice(copy=copy, only=True))

    def _assemble(self, memory: Bytes, windows: Sequence[Window]) -> Iterator[FailedRead]:
        """Take each chunk from the first copy that can be read; yields those that none gives."""
        chunk_bytes = self._geometry.chunk_bytes
        base = windows[0].address
        for start in range(0, memory.nbytes, chunk_bytes):
            address = base + start
            failure = None
            for copy in sorted(self._copies, key=lambda copy: self._is_stale(address, copy)):
                failure = failure_at(windows[copy], address, chunk_bytes)
                if failure is None:
                    memory[start : start + chunk_bytes] = windows[copy].memory[start:][:chunk_bytes]
                    break
            if failure is not None:
                yield FailedRead(address, chunk_bytes, failure.error)
                self._mending.damaged.append(f"no copy can be read: {failure.error}")

    def _is_stale(self, address: int, copy: int) -> bool:
        return self._space.resolve(address, copy)[0] in self._mending.stale

    def _write(self, part: Window, windows: Sequence[Window], doubtful: Spans) -> None:
        chunk_bytes = self._geometry.chunk_bytes
        unsure = np.zeros(part.memory.nbytes if doubtful else 0, np.bool_)
        for span in doubtful:
            unsure[span] = True
        for start in range(0, part.memory.nbytes, chunk_bytes):
            address = part.address + start
            if failure_at(part, address, chunk_bytes) is not None:
                continue
            right = part.memory[start : start + chunk_bytes]
            for copy, window in enumerate(windows):
                got: Bytes | None = window.memory[start : start + chunk_bytes]
                if failure_at(window, address, chunk_bytes) is not None:
                    got = None
                self._write_copy(address, copy, right, got, unsure[start : start + chunk_bytes])

    def _write_copy(
        self,
        address: int,
        copy: int,
        right: Bytes,
        got: Bytes | None,
        unsure: NDArray[np.bool_],
    ) -> None:
        """Write the blocks of a chunk that differ; all of them when it could not be read.

        Bytes that are unsure stay as they are, except on a new device. None are where the mask is
        empty.
        """
        member, offset_bytes = self._space.resolve(address, copy)
        target = self._mending.targets[member]
        block_bytes = self._geometry.block_bytes
        if member in self._mending.fresh:
            got, unsure = None, unsure[:0]
        differ = np.ones(right.nbytes // block_bytes, np.bool_)
        if got is not None:
            right = np.where(unsure, got, right) if unsure.size else right
            differ = (right.reshape(-1, block_bytes) != got.reshape(-1, block_bytes)).any(axis=1)
        elif unsure.size:
            differ[unsure.reshape(-1, block_bytes).any(axis=1)] = False
        edges = np.flatnonzero(np.diff(np.concatenate(([0], differ.view(np.int8), [0]))))
        for first, end in edges.reshape(-1, 2).tolist():
            blocks = right[first * block_bytes : end * block_bytes]
            target.write(offset_bytes + first * block_bytes, blocks)
            self._mending.written_bytes += blocks.nbytes


def failure_at(window: Window, address: int, length_bytes: int) -> FailedRead | None:
    """The failed read that a range of a window lacks bytes of, if any."""
    for failure in window.failures:
        end = failure.address + failure.length_bytes
        if failure.address < address + length_bytes and address < end:
            return failure
    return None


class _Samples:
    """A dataset's samples, by address: which of their copies are right."""

    def __init__(
        self, mending: Mending, space: DataSpace, directory: FrozenDirectory, name: str
    ) -> None:
        self._mending = mending
        self._space = space
        self._directory = directory
        self._name = name
        addresses, lengths = directory.addresses().astype(np.int64), directory.lengths()
        inside = (lengths > 0) & (addresses + lengths <= space.size_bytes)
        order = np.flatnonzero(inside)
        order = order[np.argsort(addresses[order], kind="stable")]
        large = lengths[order] > space.geometry.chunk_bytes
        self._addresses, self._lengths, self._crcs = addresses, lengths, directory.crcs()
        self._small: Indices = order[~large]
        self._starts: Indices = addresses[self._small]
        self._large: Indices = order[large]
        self._chunks: dict[int, tuple[int, int, int]] = {}
        """Of large samples, by address: the sample, and the length and CRC32C of what is there."""
        self._lost: list[tuple[int, int]] = []
        """Where large samples lie that nobody can tell the chunks of."""

    # ---- large ones ------------------------------------------------------------------------------

    def sum_large(self) -> None:
        """Learn from a reading by which a large sample is right what each of its chunks has."""
        for index in self._large.tolist():
            first = int(self._addresses[index])
            chunks = self._chunks_of(index)
            if chunks is None:
                self._tell(index)
                self._lost.append((first, first + int(self._lengths[index])))
                continue
            self._chunks |= {address: (index, *chunk) for address, chunk in chunks.items()}

    def _chunks_of(self, index: int) -> dict[int, tuple[int, int]] | None:
        for choice in alternatives(self._space.geometry):
            try:
                crc, chunks = self._sum(index, choice)
            except DeviceError:
                continue
            if crc == int(self._crcs[index]):
                return chunks
        return None

    def _sum(self, index: int, choice: Choice) -> tuple[int, dict[int, tuple[int, int]]]:
        """The checksums of a sample, read in one way, and of its chunks; it starts a chunk."""
        block = max(4096, self._space.geometry.block_bytes)
        chunk_bytes = self._space.geometry.chunk_bytes
        memory = aligned_buffer(max(WINDOW_BYTES, chunk_bytes), block)
        first, left, crc = int(self._addresses[index]), int(self._lengths[index]), 0
        chunks: dict[int, tuple[int, int]] = {}
        while left > 0:
            part = memory[: min(-(-left // block) * block, memory.nbytes)]
            read_into(self._mending.sources, self._space, first, part, choice)
            taken = min(left, part.nbytes)
            crc = crc32c(part[:taken].data, crc)
            for start in range(0, taken, chunk_bytes):
                chunk = part[start : min(start + chunk_bytes, taken)]
                chunks[first + start] = chunk.nbytes, crc32c(chunk.data)
            first, left = first + taken, left - taken
        return crc, chunks

    def _patch_large(self, part: Window, windows: Sequence[Window]) -> Iterator[slice]:
        """Put their chunks right; yields where that cannot be done."""
        end = part.address + part.memory.nbytes
        for address in range(part.address, end, self._space.geometry.chunk_bytes):
            if address not in self._chunks:
                continue
            index, length, crc = self._chunks[address]
            span = slice(address - part.address, address - part.address + length)
            whole = crc32c(part.memory[span].data) == crc
            if not whole and not _patch_span(span, crc, part, windows):
                self._tell(index)
                yield span
        for first, last in self._lost:
            if first < end and last > part.address:
                yield slice(max(first - part.address, 0), last - part.address)

    # ---- small ones ------------------------------------------------------------------------------

    def patch(self, part: Window, windows: Sequence[Window]) -> Spans:
        """Put samples right that are wrong in what was assembled, from copies where they are.

        Returns:
            Where those lie that no copy has right.
        """
        doubtful = list(self._patch_large(part, windows))
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
                self._tell(index)
                doubtful.append(span)
        return doubtful

    def _tell(self, index: int) -> None:
        path = display(self._directory.name(index))
        self._mending.damaged.append(
            f"sample {index} {quote(path)} of {self._name}: no copy has its CRC32C "
            f"{int(self._crcs[index]):#010x}"
        )


def _patch_span(span: slice, crc: int, part: Window, windows: Sequence[Window]) -> bool:
    """Take a part of a window from the first copy that has it right; False when none has."""
    for window in windows:
        readable = failure_at(window, part.address + span.start, span.stop - span.start) is None
        if readable and crc32c(window.memory[span].data) == crc:
            part.memory[span] = window.memory[span]
            return True
    return False
