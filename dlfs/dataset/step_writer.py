"""``StepWriter``: writes a dataset in steps, so that a writer that was killed goes on.

Each step is a ``DatasetWriter`` of its own, which ends with a commit: the samples so far are then
on the volume with a journal, as an unfinished import that no reader sees. Between two steps the
volume is unlocked. The seal merges the journals into one dataset of all steps; the volume is locked
again when that is to be written, in one commit.

A source may be divided into parts: consecutive samples, whose steps and windows of the shuffle do
not depend on the other parts. So parts that workers import one by one (``PartsWriter``) make the
same dataset. ``end_part`` says where a part ends. The writer takes the parts in their order.

A step costs what is new in it, and the record of the import in the catalog. Steps end where the
samples say so, by their bytes, so that the chunks of an import do not depend on when it was killed.

A writer with fewer samples than a step makes no step: it writes as a ``DatasetWriter`` does.

If a shuffle took more than one window, the seal packs all samples once more (``second_pass``), in
steps of the same import. The seal then replaces those of both passes. A writer that was killed goes
on with the second pass without the source. It needs the space of the samples twice until the seal;
without that, the dataset stays shuffled within windows, and ``warnings`` says so.

Threads: one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast
from uuid import UUID

from dlfs.base.arguments import Layout, check_integer
from dlfs.base.closing import closed_on_error
from dlfs.base.units import format_bytes, format_count
from dlfs.base.wording import quote
from dlfs.connection.previous_version import PreviousVersion, load_previous_version
from dlfs.connection.unfinished import UnfinishedSteps, load_steps
from dlfs.dataset.committed_steps import DAMAGED, CommittedSteps, digest_labels
from dlfs.dataset.import_origin import Origin, check_origin, encode_origin, note_kept
from dlfs.dataset.sample_packer import STAGE_BYTES_SHUFFLED
from dlfs.dataset.sealing import Tick, write_version
from dlfs.dataset.second_pass import Batch, SecondPass
from dlfs.dataset.step_content import StepEnd
from dlfs.dataset.step_cutter import STEP_BYTES, StepCutter
from dlfs.dataset.writer import DatasetWriter
from dlfs.directory.builder import segment_bytes_max
from dlfs.errors import (
    ClosedError,
    FormatError,
    SpaceError,
    StaleError,
    UsageError,
)
from dlfs.format.bad_records import BadReport, read_bad_records
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.constants import ADDRESS_MAX
from dlfs.format.geometry import ChunkRun, DataSpace
from dlfs.format.journal import Cursor, FirstPass
from dlfs.format.paths import PathLike, display, path_bytes
from dlfs.store.fencing import check_not_running, revoke_grants
from dlfs.store.info import DatasetInfo, describe_dataset, read_origin
from dlfs.store.sample_buffer import SampleBuffer
from dlfs.store.space import joined_runs
from dlfs.store.transaction import Generation, Transaction, after_commit

_log = logging.getLogger("dlfs")

SKIPPED = "skipped"
"""Key of a cursor: how many entries of the part were left out, by reason. A cursor of a complete
part that has only this key is no position in the source."""
Counts = tuple[int, int]
"""Number of samples, and sum of their lengths in bytes."""


def _base_bad(base: DatasetRecord | None) -> BadReport:
    """Return the records that are left out of the version to append to."""
    return BadReport() if base is None else read_bad_records(base.tags).of_version(base.version)


def _base_runs(transaction: Transaction, base: DatasetRecord | None) -> tuple[ChunkRun, ...]:
    """Return the chunks of the samples of the version to append to."""
    if base is None:
        return ()
    return base.split_data_runs(transaction.geometry.chunk_bytes)[0]


class StepWriter(StepCutter):
    """Writes one dataset in steps. A context manager: a clean exit seals it.

    An exception leaves the steps that were committed on the volume, and the rest as it was.

    Args:
        begin: starts a transaction, which the writer ends.
        read: opens the newest generation of the volume for reading.
        name: name of the new dataset.
        origin: describes the source. If an unfinished import of this name is there, the writer goes
            on with it; then its source must be the same.
        choose_base: returns the version to append to; None: the version is a new one. It is
            called again at the seal.
        step_bytes: bytes of samples after which a step ends, > 0. An unfinished import goes on with
            its own.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it; a step
            then ends with a batch.
        one_pass: True to leave out the second pass.
        stage_bytes: size of a window of the shuffle.
        expected_bytes: sum of the samples' lengths, if known: free space is checked first.
        expected_samples: number of samples, if known: free space is checked first.
        defaults: value of each attribute for samples that are added without it.
        on_end: called with each new generation, or with None after an abort.
        on_second_pass: called in the second pass with the samples and the bytes that it has packed,
            and with those that there are.

    Attributes:
        layout: order in which samples are packed.
        origin: what the record says of the source; the caller may add what the second pass shall
            keep, until the seal.
        warnings: what the user should know of the dataset.
        source_count: samples of the source that the steps so far have used. The caller adds those
            that follow.
        part: number of the part of the source that they end in.
        cursor: the last cursor that the source gave for these samples; None without one.
        kept_count: samples of the steps that were there at the start.
        kept_bytes: sum of their lengths.
        sample_count: samples so far: of earlier steps, added since, and of the version that is
            appended to.
        bad: records that the import left out of the dataset.
        bad_so_far: bad records in the part of the source that the steps so far have used.

    Raises:
        UsageError: an unfinished import of this name has another source.
        DlfsError: as ``DatasetWriter``.
    """

    def __init__(
        self,
        begin: Callable[[], Transaction],
        read: Callable[[], AbstractContextManager[Generation]],
        name: bytes,
        origin: Origin,
        *,
        choose_base: Callable[[Catalog], DatasetRecord] | None = None,
        step_bytes: int = STEP_BYTES,
        layout: Layout | None = "shuffled",
        seed: int = 0,
        source_shuffled: bool = False,
        one_pass: bool = False,
        stage_bytes: int | None = None,
        expected_bytes: int = 0,
        expected_samples: int = 0,
        defaults: Mapping[str, Any] | None = None,
        uuid: UUID | None = None,
        on_end: Callable[[Generation | None], None] = lambda _: None,
        on_second_pass: Callable[[Counts, Counts], None] = lambda _done, _total: None,
    ) -> None:
        super().__init__(step_bytes=step_bytes, by_batches=False)
        self._name = name
        self.origin = dict(origin)
        self.warnings: list[str] = []
        action = f"write {display(name)!r} in steps"
        check_integer(step_bytes, 1, ADDRESS_MAX, option="step_bytes", action=action)
        self.origin["step_bytes"] = step_bytes
        self._committed = CommittedSteps(begin, read, name, choose_base, defaults or {})
        self.layout: Layout = layout or "shuffled"
        self.bad = BadReport()
        self.part, self._part_begin, self._part_windows, self._part_ended = 0, 0, 0, False
        self._window_bytes = stage_bytes or STAGE_BYTES_SHUFFLED
        self._on_second_pass = on_second_pass
        self._options: dict[str, Any] = {"seed": seed, "defaults": defaults, "on_end": on_end}
        self._directories: list[PathLike] = []
        self._writer: DatasetWriter | None = None
        self._state = "open"
        transaction = begin()
        with closed_on_error(transaction):
            found = transaction.base.catalog.find_unfinished(name)
            base = self._committed.find_base(transaction.base)
            if base is not None:
                previous = load_previous_version(transaction.base, base)
                self._committed.previous = previous
                self.layout = layout or cast(Layout, base.layout)
                self.origin["labels"] = digest_labels(previous.labels())
            if found is not None:
                check_origin(found, self.origin)
                check_not_running(transaction.devices, [found], f"import {quote(name)}")
                transaction = revoke_grants(transaction, [found])
                self._go_on(transaction.base)
            self._choose_order(source_shuffled, one_pass)
            journal_bytes = 0
            if expected_bytes > self._step_bytes:  # the journals are there until the seal
                chunks = expected_bytes // transaction.geometry.chunk_bytes
                most = segment_bytes_max(expected_samples, 0, chunks)
                journal_bytes = most - (found.journal_bytes if found else 0)
            kept = (0, 0) if self._steps is None else self._steps.imported
            self.kept_count, self.kept_bytes = kept
            self._writer = self._step(
                transaction,
                uuid=uuid,
                expected_samples=max(0, expected_samples - kept[0]),
                expected_bytes=max(0, expected_bytes - kept[1] + journal_bytes),
            )
            if not (self._one_pass or self.is_read) and expected_bytes > self._window_bytes:
                self._check_room(max(0, expected_bytes - kept[1]) + expected_bytes)

    def __repr__(self) -> str:
        count = format_count(self.sample_count, "sample")
        return f"<StepWriter of dataset {display(self._name)!r}: {count}, {self._state}>"

    def _go_on(self, base: Generation) -> None:
        """Take over the steps of an unfinished import, and what it began with."""
        found = base.catalog.find_unfinished(self._name)
        assert found is not None
        try:
            steps = self._committed.steps = load_steps(base, found)
        except FormatError as error:
            error.add_note(DAMAGED)
            raise
        self.origin |= read_origin(found)
        self.layout = cast(Layout, found.layout)
        self._options["seed"] = found.seed
        self._find_part(steps)
        self.bad_so_far = read_bad_records(found.tags)

    def _find_part(self, steps: UnfinishedSteps) -> None:
        """Find where the steps end in the source.

        Raises:
            UsageError: they are of parts that do not follow one another, as workers made them.
        """
        parts = steps.find_parts()
        while self.part in parts:
            progress = parts.pop(self.part)
            cursor = progress.cursor
            if progress.source_count:  # a place in an earlier part says nothing of this one
                self.cursor = None
            if cursor is not None and cursor.value.keys() != {SKIPPED}:
                self.cursor = replace(cursor, count=self._part_begin + cursor.count)
            self.source_count = self._part_begin + progress.source_count
            self._part_windows = progress.window_count
            if not progress.is_complete:
                break
            self._next_part()
        if parts:
            raise UsageError(
                f"import {quote(self._name)}: workers of its unfinished import have imported part "
                f"{min(parts)} of the source and not all of part {self.part}: go on with it with "
                "--workers"
            )

    def _next_part(self) -> None:
        """Go on to the next part of the source."""
        self.part, self._part_begin = self.part + 1, self.source_count
        self._part_windows, self._part_ended = 0, False

    def _choose_order(self, source_shuffled: bool, one_pass: bool) -> None:
        """Choose how samples are shuffled, and where steps end."""
        shuffles = self.layout == "shuffled" and not source_shuffled
        self.origin["one_pass"] = self._one_pass = one_pass or not shuffles
        self._by_batches = source_shuffled and self.layout != "path"
        self._step_bytes = self.origin["step_bytes"]
        self._options["source_shuffled"] = source_shuffled
        self._options["stage"] = SampleBuffer(self._window_bytes) if shuffles else None
        if self.is_read:
            self.bad = self.bad_so_far
            self._pack_in_order()

    def _step(self, transaction: Transaction, **options: Any) -> DatasetWriter:
        kept: dict[str, Any] = {
            "layout": self.layout,
            "unfinished": self._steps,
            "previous": self.previous,
        }
        if not self.is_read:
            kept |= {"part": self.part, "part_windows": self._part_windows}
        options = {**self._options, **kept, **options}
        version, self._base = transaction.next_version(self._name), transaction.base
        return DatasetWriter(transaction, self._name, version, **options)

    @property
    def previous(self) -> PreviousVersion | None:
        """The version that is appended to, as it was at the start; None without."""
        return self._committed.previous

    @property
    def _steps(self) -> UnfinishedSteps | None:
        return self._committed.steps

    @property
    def is_read(self) -> bool:
        """True if the steps have all samples of the source: the seal is what is left."""
        return self._steps is not None and self._steps.first_pass is not None

    @property
    def sample_count(self) -> int:
        """Samples so far: of the version appended to, of earlier steps, and those added since."""
        before = 0 if self._steps is None else self._steps.imported[0]
        base = 0 if self.previous is None else self.previous.record.sample_count
        added = 0 if self._writer is None or self.is_read else self._writer.new_count
        return base + before + added

    # ---- steps -----------------------------------------------------------------------------------

    def end_part(self) -> None:
        """Note that the part of the source ends after the samples so far.

        Its last step is committed when samples of the next part are added. So a source that has no
        more samples than a step makes no step.
        """
        self._begin_samples()
        self._part_ended = True

    def _begin_samples(self) -> None:
        """Commit the last step of the part before, if it has ended."""
        if self._part_ended:
            self._commit_step(self._opened(), ends_part=True)

    def find_known(self, paths: Sequence[bytes]) -> set[bytes]:
        """Return those of some paths that samples of the dataset have.

        Memory: as ``CommittedSteps.find_known``.
        """
        added = () if self._writer is None else (path for path in paths if path in self._writer)
        return self._committed.find_known(paths).union(added)

    def kept_paths(self) -> Iterator[bytes]:
        """Yield the paths of the samples of all steps so far; see ``find_known`` for memory."""
        return self._committed.kept_paths()

    def add_directory(self, path: PathLike) -> None:
        """Add a directory; see ``DatasetWriter.add_directory``. The seal reports what is wrong."""
        self._directories.append(path)

    @property
    def _present(self) -> DatasetWriter | None:
        return self._writer

    @property
    def _counts_source(self) -> bool:
        return not self.is_read

    def _end_step(self, *, ends_part: bool) -> None:
        self._commit_step(self._opened(), ends_part=ends_part)

    def _commit_step(
        self, writer: DatasetWriter, *tags: tuple[int, bytes], ends_part: bool = False
    ) -> None:
        """Commit the samples since the last step; go on to the next part if this one ends."""
        writer.bad, origin = self.bad_so_far, encode_origin(self.origin)
        count = self.source_count - self._part_begin
        cursor: Cursor | None = self.cursor
        if cursor is not None:
            in_part = cursor.count - self._part_begin
            cursor = None if in_part < 0 else replace(cursor, count=in_part)
        if self.is_read:  # the second pass, which knows no parts
            count, cursor = 0, None
        self._part_windows = writer.window_count
        end = StepEnd(source_count=count, cursor=cursor, ends_part=ends_part)
        self._committed.steps = writer.commit_step(end, origin, tags)
        self._writer = None
        if ends_part:
            self._next_part()

    def _opened(self) -> DatasetWriter:
        """Return the writer of the present step, which locks the volume at its begin."""
        if self._state != "open":
            raise ClosedError(f"write {quote(self._name)} in steps: the writer is {self._state}")
        if self._writer is None:
            transaction = self._committed.lock()
            with closed_on_error(transaction):
                self._writer = self._step(transaction)
        return self._writer

    def _unlock(self) -> None:
        """Discard the samples since the last step, and unlock the volume."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    # ---- the end ---------------------------------------------------------------------------------

    def seal(self, tick: Tick = lambda _samples: None) -> DatasetInfo:
        """Commit all samples as one dataset, atomically.

        Args:
            tick: see ``sealing.Tick``; called while the samples of steps are merged.

        Raises:
            ExistsError: two samples of different steps have one path, or a file and a directory.
            DlfsError: as ``DatasetWriter.seal``. The writer has aborted; its steps are kept.
        """
        try:
            info = self._seal(tick)
        except BaseException as error:
            self._give_up(error)
            raise
        self._state = "sealed"
        return info

    def _seal(self, tick: Tick) -> DatasetInfo:
        self._committed.release_directories()
        second = (self.is_read or self._begin_second_pass()) and self._pack_again()
        if self._steps is None:
            writer = self._opened()
            for path in self._directories:
                writer.add_directory(path)
            writer.bad += self.bad
            return writer.seal(tick)
        if self._writer is not None and self._writer.new_count:
            self._commit_step(self._writer, ends_part=not self.is_read)
        self._unlock()
        self._options["stage"] = None  # the merge needs memory, too
        transaction, encoded, base = self._committed.merge_and_lock(
            [path_bytes(path) for path in self._directories], second=second, tick=tick
        )
        with closed_on_error(transaction):
            record = write_version(
                transaction,
                encoded,
                name=self._name,
                uuid=self._steps.record.uuid,
                layout=self.layout,
                seed=self._options["seed"],
                runs=joined_runs(
                    _base_runs(transaction, base),
                    self._steps.of_pass(second=second).in_order().record.data_runs,
                ),
                bad=_base_bad(base) + self.bad,
            )
            generation = transaction.commit(removed=[self._steps.record], added=[record])
        self._state = "sealed"
        with after_commit(transaction.committed):
            try:
                transaction.close()
            finally:
                self._options["on_end"](generation)
        return describe_dataset(record, transaction.geometry)

    def _begin_second_pass(self) -> bool:
        """Commit what the source gave last; return False if there is to be no second pass."""
        steps = self._steps
        earlier = 0 if steps is None else steps.window_count - self._part_windows
        windows = earlier + self._opened().window_count
        if self._one_pass or windows < 2 or not self._check_room():
            return False
        writer = self._opened()
        before = steps.imported if steps else (0, 0)
        for path in self._directories:
            writer.add_directory(path)
        number = len(steps.steps) if steps else 0
        count, size_bytes = before[0] + writer.new_count, before[1] + writer.new_bytes
        first = FirstPass(number + 1, count, size_bytes)
        self.bad_so_far = self.bad
        self._commit_step(writer, first.tag, ends_part=True)
        self._pack_in_order()
        return True

    def _pack_in_order(self) -> None:
        """Pack the samples that follow in the order in which they are added."""
        self._options |= {"source_shuffled": True, "stage": None}
        self._by_batches = True

    def _check_room(self, expected_bytes: int = 0) -> bool:
        """Return True if all samples can be packed again; warn if not.

        Args:
            expected_bytes: bytes that both passes will take in addition to those so far.
        """
        needed, free = self._opened().room_for_second_pass()
        needed += expected_bytes
        if needed > free:
            self._warn(
                f"the second pass needs {format_bytes(needed)} of free space, got "
                f"{format_bytes(free)}"
            )
        return needed <= free

    def _warn(self, reason: str) -> None:
        window = format_bytes(self._window_bytes)
        text = f"the samples are shuffled within windows of {window} only: {reason}"
        self.warnings = [text]
        _log.warning("import %s: %s", display(self._name), text)

    def _pack_again(self) -> bool:
        """Pack all samples once more; return False if there was no room for them."""
        self._unlock()
        seed, block_bytes = self._options["seed"], self._window_bytes
        second = self._committed.read_journal(
            partial(SecondPass, seed=seed, block_bytes=block_bytes)
        )
        steps = self._steps
        assert steps is not None
        packed = steps.of_pass(second=True).record
        done = packed.sample_count, packed.sample_bytes
        with second:
            self._directories = list(second.directories)
            self._on_second_pass(done, steps.imported)
            self.warnings.clear()
            try:
                for batch in second.batches(done[0]):
                    done = self._pack_batch(second, batch, done)
                if self._writer is not None and self._writer.new_count:
                    self._commit_step(self._writer)
            except SpaceError as error:
                self._unlock()
                self._warn(f"there was no room for the second pass: {error}")
                return False
        return True

    def _pack_batch(self, second: SecondPass, batch: Batch, done: Counts) -> Counts:
        """Pack a batch again; return the samples and the bytes that are done then."""
        self._opened()
        base, steps = self._base, self._steps
        assert steps is not None
        first = steps.of_pass(second=False).in_order()
        space = DataSpace(base.geometry, first.record.data_runs)
        found = second.read(base, space, batch)
        self.add_batch(
            found.paths, found.data, found.offsets, found.lengths, attributes=found.columns
        )
        done = done[0] + len(found.paths), done[1] + int(found.lengths.sum())
        self._on_second_pass(done, steps.imported)
        return done

    def abort(self) -> None:
        """Discard the samples since the last step. Idempotent."""
        self._committed.release_directories()
        self._options["stage"] = None
        if self._state == "open":
            self._state = "aborted"
            if self._writer is not None:
                self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        if error is None and self._state == "open":
            self.seal()
        elif error is not None:
            self._give_up(error)
        self.abort()

    def _give_up(self, error: BaseException) -> None:
        """Abort after an error, and note in it what is kept; do nothing after the end."""
        if self._state != "open":
            return
        self.abort()
        is_lost = isinstance(error, StaleError) or DAMAGED in getattr(error, "__notes__", ())
        if self._steps is not None and not is_lost:
            note_kept(error, self._name, self._steps.imported)
