"""``StepCutter``: cuts the samples of a source into steps, by their bytes.

What a step is made of, and what becomes of it, is left to its two kinds: a ``StepWriter`` commits
each step, a ``PartWriter`` reports it to the coordinator of an import by workers. Both cut in the
same places, so the samples lie in the same steps in both.

Threads: one at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes.builder import as_array
from dlfs.base.units import GIB, MIB
from dlfs.errors import UsageError
from dlfs.format.bad_records import BadReport
from dlfs.format.journal import CURSOR_BYTES_MAX, STEP_SAMPLES, Cursor

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

STEP_BYTES = 2 * GIB
"""Bytes of samples after which a step ends."""
STEP_JOURNAL_BYTES = 256 * MIB
"""Bytes of paths and attributes after which a step ends: a writer has them in memory, and a worker
reports them in one message."""


class SampleTarget(Protocol):
    """Takes the samples of the present step."""

    @property
    def new_count(self) -> int:
        """Number of samples of the step so far."""

    @property
    def new_bytes(self) -> int:
        """Sum of their lengths, in bytes."""

    @property
    def journal_bytes(self) -> int:
        """Bytes of their paths and attributes, at most."""

    def add_batch(
        self,
        paths: Sequence[bytes],
        data: BytesLike,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        attributes: Mapping[str, ArrayLike] = ...,
        begins_chunk: bool | None = None,
    ) -> None:
        """Add many samples of bytes at once; see ``DatasetWriter.add_batch``."""


class StepCutter(abc.ABC):
    """Adds the samples of a source, and ends steps.

    Args:
        step_bytes: bytes of samples after which a step ends.
        by_batches: True if a step ends with a batch, not within it.

    Attributes:
        source_count: samples of the source that were used so far.
        cursor: the last cursor that the source gave for these samples; None without one.
        bad_so_far: bad records in the part of the source that the steps so far have used.
    """

    def __init__(self, *, step_bytes: int, by_batches: bool) -> None:
        self._step_bytes, self._by_batches = step_bytes, by_batches
        self.source_count = 0
        self.cursor: Cursor | None = None
        self.bad_so_far = BadReport()

    @abc.abstractmethod
    def _opened(self) -> SampleTarget:
        """Return the target of the present step, which is made if there is none."""

    @property
    @abc.abstractmethod
    def _present(self) -> SampleTarget | None:
        """The target of the present step; None if there is none."""

    @abc.abstractmethod
    def _end_step(self, *, ends_part: bool) -> None:
        """End the present step, and its part of the source if ``ends_part`` is true."""

    @abc.abstractmethod
    def end_part(self) -> None:
        """Note that the part of the source ends after the samples so far."""

    def _begin_samples(self) -> None:  # noqa: B027 - few have to do anything
        """Prepare for samples that follow."""

    @property
    def _counts_source(self) -> bool:
        """True if the samples that are added come from the source."""
        return True

    def add_batch(
        self,
        paths: Sequence[bytes],
        data: BytesLike,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        attributes: Mapping[str, ArrayLike] | None = None,
        begins_chunk: bool | None = None,
        cursor: Mapping[str, Any] | None = None,
        ends_part: bool = False,
    ) -> None:
        """Add samples as ``DatasetWriter.add_batch`` does; end the steps that end in them.

        Where the batches say where chunks begin, a step ends before one that begins a chunk.
        ``cursor`` is the position in the source after them, and a part of the source ends there if
        ``ends_part`` is true; see ``SampleBlock``.
        """
        self._begin_samples()
        if begins_chunk and self._is_full():
            self._end_step(ends_part=False)
        columns = {name: as_array(name, values) for name, values in (attributes or {}).items()}
        for name, values in columns.items():
            if values.shape[:1] != (len(paths),):
                raise UsageError(
                    f"add attribute {name!r}: expected {len(paths)} values, got an array of shape "
                    f"{values.shape}"
                )
        first, is_complete = 0, False
        while not is_complete:  # once also without samples, which may have columns
            target = self._opened()
            is_whole = self._by_batches or begins_chunk is not None
            end = len(lengths) if is_whole else self._end_of_step(target, lengths, first)
            chosen = slice(first, end)
            target.add_batch(
                paths[chosen],
                data,
                offsets[chosen],
                lengths[chosen],
                attributes={name: values[chosen] for name, values in columns.items()},
                begins_chunk=begins_chunk,
            )
            self.source_count += chosen.stop - first if self._counts_source else 0
            first = chosen.stop
            is_complete = first == len(paths)
            if is_complete:
                self.note_cursor(cursor)
            if begins_chunk is None and self._is_full():
                self._end_step(ends_part=is_complete and ends_part)
                ends_part &= not is_complete
        if ends_part:
            self.end_part()

    def note_cursor(self, value: Mapping[str, Any] | None) -> None:
        """Take note of a cursor of the source after all samples so far, unless it is too long."""
        if value is not None:
            cursor = Cursor(value, self.source_count)
            if len(cursor.json) <= CURSOR_BYTES_MAX:
                self.cursor = cursor

    def add_part(
        self,
        paths: Sequence[bytes],
        data: BytesLike,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        attributes: Mapping[str, ArrayLike],
    ) -> None:
        """Add some samples of a block, of which others are left out; see ``end_block``."""
        self._begin_samples()
        self._opened().add_batch(paths, data, offsets, lengths, attributes=attributes)

    def end_block(
        self,
        count: int,
        cursor: Mapping[str, Any] | None,
        bad: BadReport,
        *,
        ends_part: bool = False,
    ) -> None:
        """End the step if it ends in the block whose parts were added.

        If the source has cursors, a step ends at one of them: the bad records up to there are then
        known without reading what the step has again.

        Args:
            count: samples of the source in the block, with those that were left out.
            cursor: as in ``add_batch``.
            bad: bad records so far.
            ends_part: as in ``add_batch``.
        """
        if count:
            self._begin_samples()
        self.source_count += count
        self.bad_so_far = bad
        self.note_cursor(cursor)
        at_cursor = self.cursor is None or self.cursor.count == self.source_count
        if at_cursor and self._is_full():
            self._end_step(ends_part=ends_part)
        elif ends_part:
            self.end_part()

    def end_step(self) -> None:
        """End the present step, if it has any samples, or ends a part."""
        self._begin_samples()
        present = self._present
        if present is not None and present.new_count:
            self._end_step(ends_part=False)

    def _is_full(self) -> bool:
        present = self._present
        return present is not None and (
            present.new_bytes >= self._step_bytes
            or present.new_count >= STEP_SAMPLES
            or present.journal_bytes >= STEP_JOURNAL_BYTES
        )

    def _end_of_step(self, target: SampleTarget, lengths: NDArray[np.int64], first: int) -> int:
        """Return the position after the last sample to add to the present step."""
        ends = target.new_bytes + np.cumsum(lengths[first:])
        ending = int(np.searchsorted(ends, self._step_bytes))  # the first sample that reaches it
        return min(len(lengths), first + ending + 1, first + STEP_SAMPLES - target.new_count)
