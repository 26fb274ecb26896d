"""The protocols of what reads samples below ``SampleReader``: this process, or a node service.

``NativeReader`` reads the devices in this process. ``ClientReader`` sends the same calls to a node
service. Both report failed samples in their batches and do not raise for them.

Threads: any at once for a reader; one at a time for a stream.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dlfs._native.batch import NativeBatch, NativeFailure
from dlfs._native.parts import SamplePart
from dlfs._native.reader import NativeSequence, StreamOptions
from dlfs._native.sample_memory import SampleMemory


class StreamBackend(Protocol):
    """One consumer's part of an epoch, read ahead."""

    @property
    def plan(self) -> str:
        """Plan in use: ``direct``, ``chunks`` or ``chunk_copy``."""

    def next(self, count: int) -> NativeBatch | None:
        """Return the next samples, fewer at the end; None when no sample is left."""

    def close(self) -> None:
        """Stop reading ahead. Idempotent; batches given out stay valid."""


class ReaderBackend(Protocol):
    """A reader of one dataset, local or of a node service."""

    @property
    def closing(self) -> bool:
        """True once ``close`` has been called."""

    def read(self, indices: npt.NDArray[np.uint64]) -> NativeBatch:
        """Read samples as one batch; ``indices`` is contiguous and writable, ``uint64[n]``."""

    def get(self, index: int, *, flags: int = 0) -> bytes | None:
        """Copy one small sample; None if it is large, failed, or not there as the flags require."""

    def read_part(self, part: SamplePart, buffer: memoryview) -> NativeFailure:
        """Copy a part of a sample; return the failure, or one with code 0."""

    def memory(self) -> SampleMemory:
        """Return the mapping of the sample memory; raise ClosedError if the reader is closed."""

    def stream(self, sequence: NativeSequence, options: StreamOptions) -> StreamBackend:
        """Start reading some positions of an order ahead."""

    def stats(self) -> dict[str, int]:
        """Return the counters of ``dlfs_reader_stats`` by name."""

    def member_stats(self, member: int) -> dict[str, int | list[int]]:
        """Return the counters of ``dlfs_member_stats`` of a member by name."""

    def lost_members(self) -> int:
        """Return the members that are lost now, as bits by number."""

    def member_code(self, member: int) -> int:
        """Return the error code with which a member was last lost; 0 if it never was."""

    def close(self) -> None:
        """Close the reader; it is freed with the last call, stream or batch that uses it."""
