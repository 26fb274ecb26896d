"""What a source of samples is, and what all sources share.

A source says how much it holds (as far as it can know beforehand) and then gives blocks: runs of
whole samples in one buffer. ``read_ahead`` fills the next block in a thread while the consumer
packs the present one, so that reading and writing overlap in bounded memory: two buffers of
``BUFFER_BYTES``. A sample larger than a buffer gets a block, and memory, of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.errors import FormatError, LimitError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.format.paths import path_problem
from dlfs.units import MIB

LinkPolicy = Literal["follow", "skip", "error"]

BUFFER_BYTES = 32 * MIB
BLOCK_SAMPLES_MAX = 16384
THREADS = 8
"""Threads that read files: enough to keep a disk's queue busy, few enough for two cores."""


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """A run of samples: sample ``i`` is ``data[offsets[i]:offsets[i] + lengths[i]]``.

    Owns: ``data`` belongs to the source and is overwritten when the next block is asked for.

    Attributes:
        attributes: of each column an array with a value for each sample: bool, integers, floats, or
            strings (dtype ``object`` or ``U``); see ``DatasetWriter.add_batch``.
    """

    paths: list[bytes]
    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    attributes: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Source(Protocol):
    """Where the samples of a dataset come from. Used by one thread, once, and closed."""

    @property
    def name(self) -> str:
        """What people call it: its path."""
        ...

    @property
    def sample_count(self) -> int | None:
        """Samples that it holds, or None when only reading it through would tell."""
        ...

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of all its samples, or None when only reading it through would tell."""
        ...

    @property
    def gives_shuffled(self) -> bool:
        """Whether layout ``shuffled`` gives the samples in a true shuffle of all of them."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """What it leaves out, by reason; complete once all blocks were taken."""
        ...

    @property
    def empty_directories(self) -> int:
        """Directories without a sample under them, which a dataset does not keep."""
        ...

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Give every sample once: in an order drawn from the seed, or in path order.

        Raises:
            DlfsError: the source cannot be read, or changed while it was read.
        """
        ...

    def close(self) -> None:
        """Release what it holds open; again is fine."""
        ...


def read_ahead(
    fill: Callable[[npt.NDArray[np.uint8]], SampleBlock | None], *, buffer_bytes: int
) -> Generator[SampleBlock, None, None]:
    """Give the blocks that ``fill`` makes, the next one always under way.

    Args:
        fill: fills a buffer and returns its block, or None at the end; called by one thread at a
            time.
        buffer_bytes: of each of the two buffers.

    Threads: one thread for ``fill``; it has ended when the iterator is closed.
    """
    buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(2)]
    with ThreadPoolExecutor(1, thread_name_prefix="dlfs-ingest") as executor:
        turn = 0
        pending = executor.submit(fill, buffers[turn])
        while (block := pending.result()) is not None:
            turn ^= 1
            pending = executor.submit(fill, buffers[turn])
            yield block


class BlockFiller:
    """Makes blocks of a stream of samples, for ``read_ahead``.

    Args:
        samples: (path, size in bytes, what reads the bytes into a buffer of that size); a sample is
            read before the next one is asked for.
    """

    def __init__(self, samples: Iterator[tuple[bytes, int, Callable[[memoryview], None]]]) -> None:
        self._samples = samples
        self._next = next(samples, None)

    def __call__(self, buffer: npt.NDArray[np.uint8]) -> SampleBlock | None:
        """Fill a buffer with as many samples as fit."""
        paths: list[bytes] = []
        lengths: list[int] = []
        used = 0
        while self._next is not None and len(paths) < BLOCK_SAMPLES_MAX:
            path, size, read = self._next
            if size > len(buffer) - used:
                if paths:
                    break
                buffer = np.empty(size, np.uint8)
            read(buffer.data[used : used + size])
            paths.append(path)
            lengths.append(size)
            used += size
            self._next = next(self._samples, None)
        if not paths:
            return None
        sizes = np.array(lengths, np.int64)
        return SampleBlock(paths, buffer, np.cumsum(sizes) - sizes, sizes)


def clean_path(name: bytes, where: str) -> bytes:
    """Normalise the name of a member into a sample's path; empty for the root itself.

    Args:
        name: as the archive has it: ``./a//b`` and ``a/b`` are the same.
        where: names the archive, for the error.

    Raises:
        FormatError: the name is absolute, or leads upwards.
        LimitError: the path or one of its components is too long.
    """
    if name.startswith(b"/"):
        raise FormatError(f"{where}: expected a relative name, got {show(name)}")
    path = b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in path.split(b"/"):
        raise FormatError(f"{where}: expected a name without '..', got {show(name)}")
    if path:
        check_path(path, where)
    return path


def check_path(path: bytes, where: str) -> None:
    """Check that a path can be a sample's.

    Raises:
        LimitError: it, or a component of it, is too long.
        FormatError: it breaks another rule.
    """
    problem = path_problem(path)
    if problem is None:
        return
    too_long = (
        len(path) > PATH_BYTES_MAX or len(max(path.split(b"/"), key=len)) > COMPONENT_BYTES_MAX
    )
    kind = LimitError if too_long else FormatError
    raise kind(f"{where}: {show(path)}: {problem}")


def show(path: bytes) -> str:
    """A path for a message: readable, on one line, with other bytes escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
