"""Samples that a writer buffers in memory until it packs them.

Threads: one at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import UsageError

SAMPLES_MAX = 1 << 20
"""Most samples in one buffer."""


class SampleBuffer:
    """Buffered samples: their bytes in one buffer, with paths, offsets and lengths.

    Args:
        capacity_bytes: size of the buffer.

    Attributes:
        capacity_bytes: size of the buffer.
        used_bytes: bytes of it that are in use.
        paths: path of each sample, in the order in which they were added.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = np.empty(capacity_bytes, np.uint8)
        self.capacity_bytes = capacity_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self.paths: list[bytes] = []
        self._path_set: set[bytes] | None = None  # the same paths, once one was looked for
        self._offsets = array("q")
        self._lengths = array("q")
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __contains__(self, path: object) -> bool:
        """Return True if a buffered sample has this path."""
        if self._path_set is None:
            self._path_set = set(self.paths)
        return path in self._path_set

    def fits(self, length_bytes: int, samples: int = 1) -> bool:
        """Return True if there is room for so many bytes and samples."""
        room = self.capacity_bytes - self.used_bytes
        return length_bytes <= room and len(self.paths) + samples <= SAMPLES_MAX

    def add(self, path: bytes, data: NDArray[np.uint8]) -> None:
        """Copy a sample, for which there is room, into the buffer."""
        start = self.used_bytes
        self._memory[start : start + data.size] = data
        self.paths.append(path)
        if self._path_set is not None:
            self._path_set.add(path)
        self._offsets.append(start)
        self._lengths.append(data.size)
        self.used_bytes = start + data.size

    def add_span(
        self,
        paths: Sequence[bytes],
        span: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Copy a run of samples and the bytes between them; offsets count from its start."""
        start = self.used_bytes
        self._memory[start : start + span.size] = span
        self.paths.extend(paths)
        if self._path_set is not None:
            self._path_set.update(paths)
        self._offsets.frombytes((offsets + start).tobytes())
        self._lengths.frombytes(lengths.tobytes())
        self.used_bytes = start + span.size

    def contents(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes of all samples, and the offset and length of each in bytes."""
        return (
            self._memory[: self.used_bytes],
            np.frombuffer(self._offsets, np.int64),
            np.frombuffer(self._lengths, np.int64),
        )


def check_batch(
    count: int, source_bytes: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> None:
    """Check the arrays of a batch of samples.

    Raises:
        UsageError: they differ in length, or a sample lies outside the batch's bytes.
    """
    if offsets.shape != (count,) or lengths.shape != (count,):
        raise UsageError(
            f"add a batch: expected {count} offsets and lengths, "
            f"got {offsets.shape} and {lengths.shape}"
        )
    if not count:
        return
    low, high = int(offsets.min()), int((offsets + lengths).max())
    if low < 0 or int(lengths.min()) < 0 or high > source_bytes:
        raise UsageError(
            f"add a batch: expected samples within {source_bytes} bytes, got some in {low}..{high}"
        )
