"""``PartsWriter``: the coordinator's side of an import by several workers.

The coordinator alone changes the volume's catalog. It lists chunks in the record of the unfinished
import before it grants them (``GrantBook``). Workers write data to them and report steps
(``PartWriter``); ``commit`` adds the steps. The volume is locked for each commit only, so other
writers may commit in between. When all parts of the source are complete, a ``StepWriter`` seals the
import, as that of a plain import does, with a second pass if there is one.

Who opens a ``PartsWriter`` takes the import over: a coordinator of the same import that was there
before gets ``StaleError``, and its workers can write no more (``store.fencing``).

The result depends on the source and the options alone. Steps are sorted by their part for the seal,
and windows of the shuffle are numbered within the part.

Threads: one at a time, except for ``confirm`` and ``grants``, which any may use meanwhile.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self, cast
from uuid import UUID, uuid4

from dlfs.base.arguments import Layout, check_integer
from dlfs.base.closing import closed_on_error
from dlfs.base.wording import list_numbers, quote
from dlfs.block.lease import boot_clock
from dlfs.connection.previous_version import load_previous_version
from dlfs.connection.unfinished import PartProgress, UnfinishedSteps, load_steps
from dlfs.dataset.committed_steps import (
    DAMAGED,
    LOCK_TIMEOUT_S,
    CommittedSteps,
    digest_labels,
)
from dlfs.dataset.import_origin import Origin, check_origin, encode_origin, note_kept
from dlfs.dataset.part_writer import ImportOptions
from dlfs.dataset.sample_packer import STAGE_BYTES_SHUFFLED
from dlfs.dataset.schema import Schema
from dlfs.dataset.sealing import Tick
from dlfs.dataset.step_checks import WorkerStep, check_step
from dlfs.dataset.step_content import new_import, write_steps
from dlfs.dataset.step_cutter import STEP_BYTES
from dlfs.dataset.step_writer import StepWriter
from dlfs.directory.builder import segment_bytes_max
from dlfs.errors import (
    ClosedError,
    DlfsError,
    ExistsError,
    FormatError,
    SpaceError,
    StaleError,
    UsageError,
)
from dlfs.format.bad_records import BadReport, read_bad_records
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.constants import (
    ADDRESS_MAX,
    ATTRIBUTE_BLOCK_BYTES,
    PART_MAX,
    TAG_SOURCE,
)
from dlfs.format.geometry import ChunkRun
from dlfs.format.journal import Term
from dlfs.format.paths import PathLike, display
from dlfs.store.fencing import (
    COORDINATOR,
    expiry_ms,
    imports_by_workers,
    revoke_grants,
    with_term,
)
from dlfs.store.grants import GrantBook, grant_unit
from dlfs.store.info import DatasetInfo, read_origin
from dlfs.store.space import allocatable_runs, append_run, count_chunks
from dlfs.store.transaction import Generation, Transaction, after_commit

__all__ = ["PartsWriter", "WorkerStep"]


ABORT_LOCK_S = 5.0
"""Longest wait of ``PartsWriter.abort`` for the lock of another writer, in seconds."""


class PartsWriter:
    """Commits the steps that workers report. A context manager; ``seal`` must be called.

    Args:
        begin: starts a transaction, which the writer ends.
        read: opens the newest generation of the volume for reading. Called from any thread.
        name: name of the new dataset.
        origin: describes the source; see ``StepWriter``.
        part_count: number of parts of the source, >= 1.
        workers: number of workers that are expected, >= 1: the fewer, the larger are grants.
        choose_base: returns the version to append to; None: the version is a new one.
        step_bytes: bytes of samples after which a step ends. An unfinished import goes on with its
            own.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.
        stage_bytes: size of a window of the shuffle.
        defaults: value of each attribute for samples that are added without it.
        uuid: UUID of the new dataset; random by default.
        on_end: called with each new generation.
        clock: clock of grants, in seconds.
        wait: waits for some seconds.
        options: further arguments of the ``StepWriter`` that seals: ``one_pass``,
            ``on_second_pass``, ``expected_bytes``, ``expected_samples``.

    Attributes:
        grants: the chunks that workers may write. The caller grants and returns them here.
        unit: number of chunks to grant at once.
        term: term of this coordinator.
        bad: records that the steps so far have left out.
        labels: label of each class of the version to append to.
        warnings: what the user should know of the dataset, after the seal.

    Raises:
        UsageError: an unfinished import of this name has another source, or workers cannot write to
            these devices.
        LockedError: worker processes of an earlier coordinator still run.
        DlfsError: as ``StepWriter``.
    """

    def __init__(
        self,
        begin: Callable[[], Transaction],
        read: Callable[[], AbstractContextManager[Generation]],
        name: bytes,
        origin: Origin,
        *,
        part_count: int,
        workers: int = 1,
        choose_base: Callable[[Catalog], DatasetRecord] | None = None,
        step_bytes: int = STEP_BYTES,
        layout: Layout | None = "shuffled",
        seed: int = 0,
        source_shuffled: bool = False,
        stage_bytes: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        uuid: UUID | None = None,
        on_end: Callable[[Generation | None], None] = lambda _: None,
        clock: Callable[[], float] = boot_clock,
        wait: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        action = f"import {quote(name)} by workers"
        check_integer(part_count, 1, PART_MAX + 1, option="part_count", action=action)
        check_integer(workers, 1, None, option="workers", action=action)
        check_integer(step_bytes, 1, ADDRESS_MAX, option="step_bytes", action=action)
        self._begin, self._read, self._name = begin, read, name
        self._part_count, self._workers = part_count, workers
        self._choose_base, self._on_end = choose_base, on_end
        self._clock, self._wait = clock, wait
        self._stage_bytes = stage_bytes or STAGE_BYTES_SHUFFLED
        self._defaults, self._source_shuffled = dict(defaults or {}), source_shuffled
        self._sealing_options = options
        self._committed = CommittedSteps(begin, read, name, choose_base, self._defaults)
        self._progress: dict[int, PartProgress] = {}
        self._schema: Schema | None = None
        self.origin = {**origin, "step_bytes": step_bytes}
        self.layout: Layout = layout or "shuffled"
        self.seed = seed
        self.grants = GrantBook()
        self.bad = BadReport()
        self.labels: Mapping[str, int] = {}
        self.warnings: list[str] = []
        self._fences = False  # a host was fenced off before, and stays so after the import
        self._state = "open"
        self._with_transaction(begin(), lambda one: self._take_over(one, layout, uuid))

    def __repr__(self) -> str:
        done = sum(progress.is_complete for progress in self._progress.values())
        return (
            f"<PartsWriter of dataset {quote(self._name)}: {done} of {self._part_count} parts, "
            f"{self._state}>"
        )

    # ---- the begin -------------------------------------------------------------------------------

    def _take_over(
        self, transaction: Transaction, layout: Layout | None, uuid: UUID | None
    ) -> Generation:
        """Begin the import, or take it over from an earlier coordinator or writer."""
        for device in transaction.devices:
            device.check_can_grant()
        self._chunk_bytes = transaction.geometry.chunk_bytes
        catalog = transaction.base.catalog
        for record in imports_by_workers(catalog.unfinished):
            if record.name != self._name:
                raise UsageError(
                    f"import {quote(self._name)} by workers: expected no other import by workers "
                    f"on the volume, got that of {quote(record.name)}: wait for its end, go on "
                    "with it, or free it with 'dlfs import --abandon'"
                )
        self._find_base(transaction.base, layout)
        found = catalog.find_unfinished(self._name)
        if found is None:
            made = uuid or uuid4()
            if catalog.has_uuid(made):
                raise ExistsError(
                    f"import {quote(self._name)} by workers: a dataset has the UUID {made}"
                )
            steps = new_import(self._name, made, self.layout, self.seed)
        else:
            check_origin(found, self.origin)
            transaction = revoke_grants(transaction, [found], wait=self._wait)
            steps = self._go_on(transaction.base)
        shuffles = self.layout == "shuffled" and not self._source_shuffled
        self.origin[COORDINATOR] = f"process {os.getpid()} on {socket.gethostname()}"
        self.origin["one_pass"] = self._sealing_options.get("one_pass", False) or not shuffles
        removed = [] if found is None else [steps.record]
        self.term = Term.draw(expiry_ms(transaction.devices))
        record = with_term(steps.record, self.term)
        if found is None:
            record = replace(record, tags=((TAG_SOURCE, encode_origin(self.origin)), self.term.tag))
        generation = transaction.commit(removed=removed, added=[record])
        self._committed.steps, self._committed.term = steps.with_record(record), self.term
        self._note_unit(generation)
        for device in transaction.devices:
            self._fences = device.admit_writers() or self._fences
        return generation

    def _find_base(self, base: Generation, layout: Layout | None) -> None:
        """Note what the version to append to has."""
        record = self._committed.find_base(base)
        if record is None:
            return
        with load_previous_version(base, record) as previous:
            self.layout = layout or cast(Layout, record.layout)
            self.labels = previous.labels()
            self.origin["labels"] = digest_labels(self.labels)
            self._schema = Schema.of_version(previous)

    def _go_on(self, base: Generation) -> UnfinishedSteps:
        """Take over the steps of an unfinished import, and what it began with."""
        found = base.catalog.find_unfinished(self._name)
        assert found is not None
        try:
            steps = load_steps(base, found)
        except FormatError as error:
            error.add_note(DAMAGED)
            raise
        self.origin |= read_origin(found)
        self.layout, self.seed = cast(Layout, found.layout), found.seed
        self.bad = read_bad_records(found.tags)
        self._progress = steps.find_parts()
        self._schema = Schema.of_steps(steps) or self._schema
        outside = [part for part in self._progress if part >= self._part_count]
        if outside and steps.first_pass is None:
            raise UsageError(
                f"import {quote(self._name)}: expected parts 0..{self._part_count - 1} of the "
                f"source in its unfinished import, got {list_numbers(outside)}"
            )
        return steps

    def _note_unit(self, generation: Generation) -> None:
        free = count_chunks(allocatable_runs(generation.geometry, generation.catalog.free))
        self.unit = grant_unit(generation.geometry, free, self._workers)

    def _with_transaction(
        self, transaction: Transaction, change: Callable[[Transaction], Generation]
    ) -> None:
        """Make a commit, and end its transaction."""
        with closed_on_error(transaction):
            generation = change(transaction)
        with after_commit(generation.superblock):
            try:
                transaction.close()
            finally:
                self._on_end(generation)

    # ---- what workers need -----------------------------------------------------------------------

    @property
    def options(self) -> ImportOptions:
        """What all parts of the import have in common, for ``PartWriter``."""
        return ImportOptions(
            name=self._name,
            uuid=self._steps.record.uuid,
            layout=self.layout,
            seed=self.seed,
            source_shuffled=self._source_shuffled,
            step_bytes=self.origin["step_bytes"],
            stage_bytes=self._stage_bytes,
            defaults=self._defaults,
        )

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return display(self._name)

    @property
    def schema(self) -> Schema | None:
        """What the samples so far have, for ``PartWriter``; None before the first one."""
        return self._schema

    @property
    def is_read(self) -> bool:
        """True if all parts are complete: the seal is what is left."""
        if self._steps.first_pass is not None:
            return True
        complete = sum(progress.is_complete for progress in self._progress.values())
        return complete == self._part_count

    def progress(self, part: int) -> PartProgress:
        """Return what the committed steps have of a part."""
        return self._progress.get(part, PartProgress())

    @property
    def imported(self) -> tuple[int, int]:
        """Number of samples of the committed steps, and sum of their lengths."""
        return self._steps.imported

    @property
    def _steps(self) -> UnfinishedSteps:
        assert self._committed.steps is not None
        return self._committed.steps

    # ---- commits ---------------------------------------------------------------------------------

    def confirm(self) -> float:
        """Check that this is still the coordinator; may be called while another thread commits.

        Returns:
            The start of the check on the clock. What was granted may be written until
            ``LeaseTimes.valid_s`` after it.

        Raises:
            StaleError: another writer has taken the import over, or has ended it.
            DlfsError: the volume cannot be read.
        """
        start_s = self._clock()
        with self._read() as generation:
            self._committed.check_term(generation)
        return start_s

    def commit(self, reports: Sequence[WorkerStep] = (), *, reserve: int = 0) -> None:
        """Add steps that workers report, and put chunks into the pool of ``grants``.

        Also frees the chunks of lost workers that cannot write any more.

        Args:
            reports: the steps; those of one part in their order.
            reserve: number of chunks; as many as are free, if they are fewer.

        Raises:
            UsageError, FormatError: a report is wrong; the message names worker and part. Nothing
                is committed.
            StaleError: as ``confirm``.
            SpaceError: the volume has no room for the journal of the steps.
            DlfsError: as a commit.
        """
        self._check_open()
        schema, progress = self._check_reports(reports)
        contents = [report.content for report in reports]
        bad = self.bad
        for content in contents:
            bad = bad.merged(content.bad)
        used = [run for content in contents for run in content.runs]
        added: list[ChunkRun] = []
        now_s = self._clock()

        def change(transaction: Transaction) -> Generation:
            for device in transaction.devices:
                if not device.writers_admitted:
                    self._fences = device.admit_writers() or self._fences
            before = self._steps
            origin = encode_origin(self.origin)
            made = write_steps(transaction, before, contents, source=origin, bad=bad)
            left = self.grants.runs_without(used, now_s)
            added.extend(self._reserve(transaction, made, count_chunks(left), reserve))
            record = replace(made.record, granted_runs=tuple(sorted([*left, *added])))
            generation = transaction.commit(removed=[before.record], added=[record])
            self._committed.steps = made.with_record(record)
            return generation

        self._with_transaction(self._committed.lock(), change)
        for report in reports:
            self.grants.use(report.worker, report.content.runs)
        self.grants.expire(now_s)
        self.grants.add(added)
        self._schema, self._progress, self.bad = schema, progress, bad

    def _check_reports(
        self, reports: Sequence[WorkerStep]
    ) -> tuple[Schema | None, dict[int, PartProgress]]:
        """Check reports; return what samples have and the progress with them."""
        schema, progress = self._schema, dict(self._progress)
        runs: dict[str, list[ChunkRun]] = {}
        record = self._steps.record
        for report in reports:
            content = report.content
            before = progress.get(content.part, PartProgress())
            what = f"import {quote(self._name)}: part {content.part} from worker "
            what += quote(report.worker)
            if content.part >= self._part_count or self._steps.first_pass is not None:
                raise UsageError(f"{what}: expected one of {self._part_count} parts to be read")
            schema = check_step(
                report,
                name=self._name,
                uuid=record.uuid,
                chunk_bytes=self._chunk_bytes,
                progress=before,
                schema=schema,
            )
            runs.setdefault(report.worker, []).extend(content.runs)
            try:
                self.grants.check(report.worker, runs[report.worker])
            except UsageError as error:
                raise UsageError(f"{what}: {error}") from error
            progress[content.part] = content.progress(before)
        return schema, progress

    def _reserve(
        self, transaction: Transaction, made: UnfinishedSteps, granted: int, count: int
    ) -> list[ChunkRun]:
        """Allocate chunks to grant; fewer if the others are needed for journals and the seal.

        If nothing is granted, only what the samples so far need is left free: an import ends for
        lack of space when there is none, not by an estimate.
        """
        space = transaction.space
        taken: list[ChunkRun] = []
        while count > 0:
            planned = granted + count_chunks(taken)
            planned += min(count, self.unit) if planned else 0
            space.reserve = self._sealing_chunks(transaction, made, planned)
            try:
                run = space.take(min(count, self.unit))
            except SpaceError:
                break
            append_run(taken, run)
            count -= run.chunk_count
        return taken

    def _sealing_chunks(self, transaction: Transaction, made: UnfinishedSteps, granted: int) -> int:
        """Estimate the chunks for the journals of granted chunks, and for the seal.

        The samples in granted chunks are taken to be like those so far. What each step takes
        whatever its samples are does not grow with them.
        """
        record, chunk_bytes = made.record, self._chunk_bytes
        packed = record.data_bytes // chunk_bytes
        growth = 1 + granted / packed if packed else 1.0
        directory_bytes, grown_bytes = (
            segment_bytes_max(
                int(record.sample_count * factor),
                int(made.path_bytes * factor),
                int(record.sample_bytes * factor) // chunk_bytes,
            )
            for factor in (1.0, growth)
        )
        fixed_bytes = ATTRIBUTE_BLOCK_BYTES * (1 + len(made.columns))
        values_bytes = max(0, made.attributes_bytes - fixed_bytes * len(made.steps))
        journal_bytes = grown_bytes - directory_bytes + int(values_bytes * (growth - 1))
        total = directory_bytes + made.attributes_bytes + 2 * journal_bytes + fixed_bytes
        return int(-(-total // chunk_bytes)) + 3 + 2 * transaction.next_catalog_chunks

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClosedError(f"import {quote(self._name)} by workers: the writer is {self._state}")

    # ---- the end ---------------------------------------------------------------------------------

    def seal(
        self,
        tick: Tick = lambda _samples: None,
        *,
        directories: Sequence[PathLike] = (),
        bad: BadReport | None = None,
    ) -> DatasetInfo:
        """Commit all samples as one dataset, atomically, when all parts are complete.

        Waits until no lost worker can write any more. No worker may have a grant.

        Args:
            tick: see ``sealing.Tick``.
            directories: paths of directories without samples that are in no step.
            bad: bad records that are in no step.

        Raises:
            UsageError: a part is not complete, or a worker has a grant.
            ExistsError: two samples have one path, or a file and a directory.
            DlfsError: as ``StepWriter.seal``. The steps are kept.
        """
        self._check_open()
        self._committed.is_cancelled = False
        if not self.is_read:
            every = range(self._part_count)
            missing = [part for part in every if not self.progress(part).is_complete]
            raise UsageError(
                f"seal the import of {quote(self._name)}: expected all {self._part_count} parts, "
                f"got not all of {list_numbers(missing)}"
            )
        self._end_grants()
        self._state = "ended"  # a StepWriter has the import from now on
        writer = StepWriter(
            self._begin,
            self._read,
            self._name,
            self.origin,
            choose_base=self._choose_base,
            step_bytes=self.origin["step_bytes"],
            layout=self.layout,
            seed=self.seed,
            source_shuffled=self._source_shuffled,
            stage_bytes=self._stage_bytes,
            defaults=self._defaults,
            on_end=self._on_end,
            **self._sealing_options,
        )
        with writer:
            writer.bad = writer.bad_so_far.merged(bad or BadReport())
            for path in directories:
                writer.add_directory(path)
            info = writer.seal(tick)
            self.warnings = writer.warnings
        self._state = "sealed"
        return info

    def cancel(self) -> None:
        """Have a commit that waits for the lock of another writer end; any thread may call it.

        That commit, and those that begin until ``abort``, raise ClosedError.
        """
        self._committed.is_cancelled = True

    def _end_grants(self, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Commit that nothing is granted, and that the import has no coordinator."""
        until_s = self.grants.lost_until_s
        while until_s is not None and self._clock() < until_s:
            self._wait(max(0.0, until_s - self._clock()))
        if self.grants.held:
            holders = ", ".join(map(quote, self.grants.held))
            raise UsageError(
                f"seal the import of {quote(self._name)}: expected all workers to have ended, but "
                f"{holders} may still write"
            )

        def change(transaction: Transaction) -> Generation:
            record = self._steps.record
            ended = replace(with_term(record, None), granted_runs=())
            for device in transaction.devices:
                device.dismiss_writers(fence=self._fences or self.grants.has_lost)
            added = [ended] if ended.journal_bytes else []
            return transaction.commit(removed=[record], added=added)

        self._with_transaction(self._committed.lock(lock_timeout_s), change)
        self.grants = GrantBook()

    def abort(self) -> None:
        """End without a seal; the steps stay on the volume. Idempotent.

        If no worker may write any more, the import has no coordinator afterwards, and what was
        granted is free; one without any step is gone. Else who takes it over waits for the workers.

        Raises:
            DlfsError: as a commit; the import can be taken over all the same.
        """
        if self._state != "open":
            return
        self._state = "aborted"
        self._committed.is_cancelled = False
        lost_until_s = self.grants.lost_until_s
        if not self.grants.held and (lost_until_s is None or lost_until_s <= self._clock()):
            self._end_grants(ABORT_LOCK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        if error is None:
            self.abort()
            return
        try:
            if self._state == "open" and self.imported[0] and not isinstance(error, StaleError):
                note_kept(error, self._name, self.imported)
            self.abort()
        except DlfsError as problem:  # the first error is what the caller must know
            error.add_note(f"the import could not be ended as a whole: {problem}")
