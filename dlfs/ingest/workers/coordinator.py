"""``Coordinator``: decides which worker imports which part, and what is committed.

A state machine without I/O, threads or a clock: its caller tells it what came from which worker and
what time it is, and carries out the ``Action``s that ``take_actions`` returns. So a simulator can
run it in any order of events. ``serving`` is the caller that has sockets and a volume.

**Parts** are given lowest first, one to a worker at a time. A worker reports the steps of its part
in their order; the caller commits them, one commit at a time, with all steps that have arrived
since the last one. A part is done when its last step is committed. If a worker is lost, another one
goes on behind the last step that has arrived. A part whose workers are lost ``LOSSES_MAX`` times,
after they had begun with it and without a further step, ends the import with an error that names
it.

**Chunks** are granted from those that a commit has listed as granted; the next commit lists more
before they run out. A worker's report of chunks that it was not granted ends this worker.

**Time.** A worker that sends nothing for ``valid_s`` is lost. Where writes have a deadline
(``grants_expire``), each of its requests is answered when a reading of the record that began after
the request came has found the own term (``Confirm``). It may then go on for ``valid_s`` from when
it sent the request, by its own clock (docs/leases.md, "Grants"). A lost worker's chunks are then
free after its deadline and the time in which its last writes drain. Otherwise they are free when
its process has ended: the caller kills it (``Remove``), and says so (``gone``).

A connection is a worker: one that is lost and comes back is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dlfs.base.units import format_bytes, format_count
from dlfs.block.lease import DRIFT
from dlfs.connection.unfinished import PartProgress
from dlfs.dataset.step_content import StepContent
from dlfs.errors import DeviceError, DlfsError, FormatError, LockedError, SpaceError, UsageError
from dlfs.ingest.workers.messages import (
    PROTOCOL_VERSION,
    RUNS_MAX,
    AnyMessage,
    End,
    Ended,
    Failed,
    Granted,
    Hello,
    NeedChunks,
    ProgressMade,
    Ready,
    Renew,
    Renewed,
    StepCommitted,
    StepMade,
    Welcome,
)
from dlfs.store.grants import GrantBook
from dlfs.store.space import count_chunks, merge_runs

RENEWALS_MAX = 2
"""Requests of a worker that may wait for a reading of the record; further ones are dropped."""
LOSSES_MAX = 3
"""Workers that a part may lose without a further step, before it counts as what ends them."""
GRANT_BYTES = 512 << 20
"""Most bytes of chunks that a worker is granted at a time: what it writes while a few commits take
their second, each of which waits for the lock of the volume."""
UNCOMMITTED_MAX = 2
"""Steps of one worker that may wait for their commit: it makes the next one meanwhile."""
_LATE = "it did not renew its right to write in time"


@dataclass(frozen=True)
class GrantTimes:
    """Durations of grants, in seconds.

    Attributes:
        renew_s: interval between two requests of a worker for more time.
        valid_s: longest time for which a request gives it, and for which a worker may be silent.
        drain_s: time in which a write that was sent may still take effect; None: as long as its
            process lives.
    """

    renew_s: float
    valid_s: float
    drain_s: float | None

    @property
    def expire(self) -> bool:
        """True if writes have a deadline."""
        return self.drain_s is not None


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    worker: int
    message: AnyMessage


@dataclass(frozen=True)
class Begin:
    """Send a worker a part: ``StartPart`` with its description."""

    worker: int
    part: int
    before: PartProgress


@dataclass(frozen=True)
class Remove:
    """End the connection of a worker and, if writes have no deadline, kill it; then ``gone``.

    Attributes:
        reason: why; empty if it has ended as it was told.
        name: name of the worker, for messages.
        slot: its slot.
        has_deadline: True if its writes end by their deadline.
        keys: key of its host at the target of each member; None if it never wrote.
        living: these keys of each living worker.
    """

    worker: int
    reason: str
    name: str
    slot: int
    has_deadline: bool
    keys: tuple[bytes | None, ...] | None
    living: tuple[tuple[bytes | None, ...], ...]


@dataclass(frozen=True)
class Commit:
    """Commit steps, and list more chunks as granted; then ``committed``.

    Attributes:
        contents: the steps, each with the number of the worker that has made it.
        reserve_chunks: number of chunks.
    """

    contents: tuple[tuple[StepContent, int], ...]
    reserve_chunks: int


@dataclass(frozen=True)
class Confirm:
    """Read whether the record has this coordinator's term; then ``confirmed``."""


Action = Send | Begin | Remove | Commit | Confirm


# ---- states --------------------------------------------------------------------------------------


@dataclass
class PartState:
    """A part of the source.

    Attributes:
        number: its number.
        size_bytes: its size, as the division says it: an estimate of the chunks that it takes.
        before: what the steps so far have of it, those that wait for their commit included.
        worker: number of the worker that has it; None if it waits for one, or is complete.
        losses: workers that it has lost since its last step.
        is_committed: True if its last step is committed.
        sample_count: samples of its steps in this run.
        sample_bytes: sum of their lengths.
        bad_count: bad records in its steps.
        left_bytes: the rest of its size behind these steps.
    """

    number: int
    size_bytes: int
    before: PartProgress = field(default_factory=PartProgress)
    worker: int | None = None
    losses: int = 0
    is_committed: bool = False
    sample_count: int = 0
    sample_bytes: int = 0
    bad_count: int = 0
    left_bytes: int = 0


@dataclass
class WorkerState:
    """A worker that has joined.

    Attributes:
        number: its number.
        slot: number of its slot.
        hello: what it said of itself.
        until_s: end of its right to write, at the latest; None if it has asked for none yet.
        heard_s: time of its last message.
        keys: key of its host at the target of each member; None until its devices are open.
        part: number of its part; None between two.
        began_s: time at which it got the part.
        has_begun: True if it has reported that it has the part.
        asked_chunks: chunks that it has asked for.
        is_waiting: True if it cannot go on without them.
        uncommitted: number of its steps that wait for their commit.
        steps_bytes: bytes of the steps of its part that it has reported.
        step_count: samples that it has read since its last step.
        step_bytes: sum of their lengths.
        bad_count: bad records that it has met since its last step.
        done_bytes: bytes of all samples that it has read.
        is_ending: True if it was told to end.
    """

    number: int
    slot: int
    hello: Hello
    until_s: float | None
    heard_s: float
    keys: tuple[bytes | None, ...] | None = None
    part: int | None = None
    began_s: float = 0.0
    has_begun: bool = False
    asked_chunks: int = 0
    is_waiting: bool = False
    uncommitted: int = 0
    steps_bytes: int = 0
    step_count: int = 0
    step_bytes: int = 0
    bad_count: int = 0
    done_bytes: int = 0
    is_ending: bool = False

    @property
    def key(self) -> str:
        """Name in the grants."""
        return str(self.number)

    @property
    def name(self) -> str:
        """Name for messages: number, process and host."""
        return f"worker {self.number} (process {self.hello.pid} on {self.hello.host})"


class Coordinator:
    """The decisions of an import by several workers.

    Args:
        parts: size of each part in bytes.
        before: progress of the parts that have steps already, by number.
        grants: chunks that can be granted, and who has which.
        times: durations.
        chunk_bytes: size of a chunk.
        setup: what workers need to know of the import, for ``Welcome``.
        slots: most workers at a time.
        now_s: the time.

    Attributes:
        parts: state of each part.
        workers: state of each living worker, by number.
        failure: error that ends the import; None without.
    """

    def __init__(
        self,
        parts: Iterable[int],
        before: Mapping[int, PartProgress],
        grants: GrantBook,
        times: GrantTimes,
        *,
        chunk_bytes: int,
        setup: bytes,
        slots: int,
        now_s: float,
    ) -> None:
        self.parts = [PartState(number, size, left_bytes=size) for number, size in enumerate(parts)]
        for number, progress in before.items():
            self.parts[number].before = progress
            self.parts[number].is_committed = progress.is_complete
        self.workers: dict[int, WorkerState] = {}
        self.failure: DlfsError | None = None
        self._grants = grants
        self._times = times
        self._chunk_bytes = chunk_bytes
        self._setup = setup
        self._slots = slots
        self._removed: dict[int, WorkerState] = {}
        self._next_worker = 1
        self._actions: deque[Action] = deque()
        self._leaving: dict[int, float | None] = {}  # end of the writes of lost workers
        self._contents: list[tuple[StepContent, int]] = []  # with the worker of each
        self._committing: list[tuple[StepContent, int]] | None = None
        self._is_broken = False
        self._reserving = 0  # chunks that the commit under way lists
        self._is_scarce = False  # the last commit found no chunk to list
        self._may_have_freed = False  # the last commit may have: chunks of lost workers
        self._reserve_after_s = now_s
        self._confirmed_s = now_s
        self._is_confirming = False
        self._confirm_after_s = now_s  # later than now after a reading that failed
        self._renewals: list[tuple[int, int, float]] = []  # worker, number, and when it came
        self._seen_s = now_s
        self._first_waiting = 0  # number below which no part waits for a worker
        self._parts_left = sum(not part.is_committed for part in self.parts)
        self._bytes_left = sum(part.size_bytes for part in self.parts if not part.is_committed)

    # ---- what others read ------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True if all parts are committed."""
        return self._committing is None and not self._parts_left

    @property
    def is_idle(self) -> bool:
        """True if no worker is left, or is still being removed, and nothing is being committed."""
        has_work = self._contents or self._committing is not None
        return not (self.workers or self._removed or has_work)

    @property
    def grants_expire(self) -> bool:
        """True if writes have a deadline."""
        return self._times.expire

    @property
    def wanted_workers(self) -> int:
        """Number of workers that could have a part."""
        if self._is_scarce and self.workers:
            return len(self.workers)
        return sum(not part.before.is_complete for part in self.parts)

    @property
    def bad_count(self) -> int:
        """Number of bad records so far."""
        counts = [part.bad_count for part in self.parts]
        return sum(counts) + sum(worker.bad_count for worker in self.workers.values())

    @property
    def done(self) -> tuple[int, int]:
        """Samples, and bytes of samples, that this run has read."""
        counts = [(part.sample_count, part.sample_bytes) for part in self.parts]
        counts += [(worker.step_count, worker.step_bytes) for worker in self.workers.values()]
        return sum(count for count, _ in counts), sum(size for _, size in counts)

    def take_actions(self) -> list[Action]:
        """Return what is to be done now, in this order."""
        self._plan_commit()
        found = list(self._actions)
        self._actions.clear()
        return found

    def next_time(self) -> float:
        """Return the time at which ``check_time`` is to be called at the latest."""
        times = [self._seen_s + self._times.renew_s]
        times += [worker.heard_s + self._times.valid_s for worker in self.workers.values()]
        if self._times.expire:
            times += [worker.until_s for worker in self.workers.values() if worker.until_s]
            if not self._is_confirming and not self._is_broken:
                due_s = self._seen_s if self._renewals else self._confirmed_s + self._times.renew_s
                times.append(max(due_s, self._confirm_after_s))
        return min(times)

    # ---- workers ---------------------------------------------------------------------------------

    def join(self, hello: Hello, now_s: float, *, can_be_killed: bool) -> int | None:
        """Take a worker in that has proved who it is.

        Args:
            hello: what it says of itself.
            now_s: the time.
            can_be_killed: True if the caller can kill its process.

        Returns:
            Its number; None if there are as many as there may be.

        Raises:
            FormatError: it is of another version.
            UsageError: its writes have no deadline, and it cannot be killed.
        """
        if not can_be_killed and not self._times.expire:
            raise UsageError(
                "join an import: expected a process of the coordinator's host that it can kill, as "
                "writes to files and disks have no deadline, got one of "
                f"{hello.host}, process {hello.pid}"
            )
        if hello.protocol != PROTOCOL_VERSION:
            raise FormatError(
                f"join an import: expected version {PROTOCOL_VERSION} of its messages, got "
                f"{hello.protocol}, of DLFS {hello.version}"
            )
        everyone = [*self.workers.values(), *self._removed.values()]
        used = {worker.slot for worker in everyone}
        slot = next((slot for slot in range(self._slots) if slot not in used), None)
        if slot is None:
            return None
        number, self._next_worker = self._next_worker, self._next_worker + 1
        self.workers[number] = WorkerState(number, slot, hello, None, now_s)
        times = self._times
        welcome = Welcome(number, slot, self._setup, times.renew_s, times.valid_s)
        self._actions.append(Send(number, welcome))
        return number

    def receive(self, number: int, message: AnyMessage, now_s: float) -> None:
        """Take a message of a worker; one of a worker that was removed is dropped."""
        worker = self.workers.get(number)
        if worker is None:
            return
        if self._is_late(worker, now_s):
            self._lose(worker, _LATE, counts=False)
            return
        worker.heard_s = now_s
        try:
            self._take(worker, message, now_s)
        except FormatError as error:
            self._lose(worker, str(error))

    def _take(self, worker: WorkerState, message: AnyMessage, now_s: float) -> None:
        if isinstance(message, Ready) and worker.keys is None:
            worker.keys = tuple(message.keys)
            self._give_part(worker, now_s)
        elif isinstance(message, Renew):
            self._renew(worker, message.number, now_s)
        elif isinstance(message, NeedChunks):
            worker.asked_chunks, worker.is_waiting = message.count, message.is_waiting
            self._settle_grants()
        elif isinstance(message, ProgressMade):
            self._note_progress(worker, message)
        elif isinstance(message, StepMade):
            self._take_step(worker, message.content(), now_s)
        elif isinstance(message, Failed):
            self._take_failure(worker, message)
        elif isinstance(message, Ended) and worker.is_ending:
            if self._leave_part(worker) is not None and self._times.expire:
                # A write that has failed may take effect until its time is over.
                self._lose(worker, "it has ended in the middle of a part", counts=False)
                return
            self._leaving[worker.number] = None
            self._remove(worker, "")
        else:
            raise FormatError(f"expected another message, got {type(message).__name__}")

    def leave(self, number: int, reason: str) -> None:
        """Take note of the end of a worker's connection."""
        if (worker := self.workers.get(number)) is not None:
            self._lose(worker, reason)

    def gone(self, number: int) -> None:
        """Take note that no write of a removed worker can take effect any more."""
        if self._removed.pop(number, None) is not None:
            self._leaving.setdefault(number, self._seen_s)
            self._settle_grants()

    def all_gone(self) -> None:
        """Take note that no worker runs any more, when the caller has ended them all."""
        for holder in list(self._grants.held):
            self._grants.give_back(holder)

    def end(self, reason: str) -> None:
        """Tell all workers to end; if the import has failed, with its error."""
        failure = None if self.failure is None else Failed.of(self.failure, None)
        for worker in self.workers.values():
            if not worker.is_ending:
                worker.is_ending = True
                self._actions.append(Send(worker.number, End(reason, failure)))

    def _lose(self, worker: WorkerState, reason: str, *, counts: bool = True) -> None:
        """Remove a worker that has not ended as it was told.

        Args:
            worker: the worker.
            reason: why it is lost.
            counts: True if its part may be what has ended it.
        """
        part = self._leave_part(worker)
        if part is not None:
            # One that was lost before it began says nothing of the part: many are lost at once.
            part.losses += counts and worker.has_begun and not worker.is_ending
            if part.losses >= LOSSES_MAX:
                self._fail(
                    DeviceError(
                        f"import part {part.number}: expected a worker that imports it, but it "
                        f"has lost {format_count(part.losses, 'worker')} without a further step; "
                        f"the last, {worker.name}: {reason}"
                    )
                )
        if self._times.drain_s is not None:  # else when it is gone
            self._leaving[worker.number] = (worker.until_s or self._seen_s) + self._times.drain_s
        self._remove(worker, reason)
        for other in self.workers.values():
            if other.part is None:
                self._give_part(other, self._seen_s)

    def _leave_part(self, worker: WorkerState) -> PartState | None:
        """Let others have the part of a worker; return it, or None if it has none."""
        if worker.part is None:
            return None
        part, worker.part = self.parts[worker.part], None
        part.worker = None
        self._first_waiting = min(self._first_waiting, part.number)
        return part

    def _remove(self, worker: WorkerState, reason: str) -> None:
        del self.workers[worker.number]
        self._removed[worker.number] = worker
        living = tuple(each.keys for each in self.workers.values() if each.keys is not None)
        action = Remove(
            worker.number, reason, worker.name, worker.slot, self._times.expire, worker.keys, living
        )
        self._actions.append(action)

    def _fail(self, error: DlfsError) -> None:
        self.failure = self.failure or error

    def _take_failure(self, worker: WorkerState, message: Failed) -> None:
        error = message.error()
        at = "" if message.part is None else f", part {message.part}"
        error.add_note(f"{worker.name}{at}")
        if isinstance(error, LockedError):  # by a worker that is lost and has not ended yet
            self._lose(worker, str(error))
        else:
            self._fail(error)

    # ---- parts -----------------------------------------------------------------------------------

    def _give_part(self, worker: WorkerState, now_s: float) -> None:
        """Give a worker the lowest part that waits for one."""
        if worker.is_ending or worker.keys is None or self.failure is not None:
            return
        while self._first_waiting < len(self.parts):
            part = self.parts[self._first_waiting]
            if part.worker is None and not part.before.is_complete:
                part.worker, worker.part, worker.began_s = worker.number, part.number, now_s
                worker.steps_bytes = worker.step_bytes = worker.step_count = 0
                worker.bad_count, worker.has_begun = 0, False
                self._actions.append(Begin(worker.number, part.number, part.before))
                return
            self._first_waiting += 1

    def _part_of(self, worker: WorkerState, number: int) -> PartState:
        """Return the part of a worker.

        Raises:
            FormatError: it speaks of another one.
        """
        if worker.part != number:
            raise FormatError(f"expected a report of part {worker.part}, got one of {number}")
        return self.parts[number]

    def _note_progress(self, worker: WorkerState, message: ProgressMade) -> None:
        self._part_of(worker, message.part)
        worker.has_begun = True
        worker.done_bytes += max(0, message.sample_bytes - worker.step_bytes)
        worker.step_count, worker.step_bytes = message.sample_count, message.sample_bytes
        worker.bad_count = message.bad_count

    def _take_step(self, worker: WorkerState, content: StepContent, now_s: float) -> None:
        part = self._part_of(worker, content.part)
        before = part.before
        if content.number != before.step_count or worker.uncommitted >= UNCOMMITTED_MAX:
            raise FormatError(
                f"expected step {before.step_count} of part {part.number}, got {content.number}"
            )
        self._check_granted(worker, content)
        part.before = content.progress(before)
        part.losses = 0
        part.sample_count += content.sample_count
        part.sample_bytes += content.sample_bytes
        part.bad_count += content.bad.count
        worker.done_bytes += max(0, content.sample_bytes - worker.step_bytes)
        worker.steps_bytes += content.sample_bytes
        worker.step_count = worker.step_bytes = 0
        worker.bad_count = 0
        worker.uncommitted += 1
        used = (
            part.left_bytes if content.end.ends_part else min(part.left_bytes, content.sample_bytes)
        )
        part.left_bytes -= used
        self._bytes_left -= used
        self._contents.append((content, worker.number))
        if content.end.ends_part:
            part.worker = worker.part = None
            self._give_part(worker, now_s)

    # ---- chunks and commits ----------------------------------------------------------------------

    def _check_granted(self, worker: WorkerState, content: StepContent) -> None:
        """Check that a worker has filled chunks that it was granted, and that no other step has.

        Raises:
            FormatError: it has not.
        """
        # The grants may have those of the commit under way, or not any more.
        waiting = [each for each, number in self._contents if number == worker.number]
        taken = [each for each, number in self._committing or () if number == worker.number]
        try:
            self._grants.check(
                worker.key, [run for each in (*waiting, content) for run in each.runs]
            )
            merge_runs(run for each in (*taken, content) for run in each.runs)
        except (UsageError, ValueError) as error:
            raise FormatError(str(error)) from error

    def _waiting_contents(self) -> list[tuple[StepContent, int]]:
        """Return the steps that wait for their commit, and the number of the worker of each."""
        return [*(self._committing or ()), *self._contents]

    def committed(self) -> None:
        """Take note that the last ``Commit`` was carried out."""
        contents, self._committing = self._committing or [], None
        self._is_scarce = self._reserving > self._grants.pool_chunks == 0
        for content, number in contents:  # the writer has taken their chunks out of the grants
            if content.end.ends_part:
                self.parts[content.part].is_committed = True
                self._parts_left -= 1
            if (worker := self.workers.get(number)) is not None:
                worker.uncommitted -= 1
                self._actions.append(Send(number, StepCommitted(content.part, content.number)))
        self._settle_grants()

    def fail(self, error: DlfsError) -> None:
        """Take note of an error after which nothing more can be committed, as one of a commit."""
        self._committing, self._contents, self._is_broken = None, [], True
        self._fail(error)

    def _plan_commit(self) -> None:
        """Have steps committed, and chunks listed, if no commit is under way."""
        if self._committing is not None or self._is_broken:
            return
        reserve = self._chunks_to_reserve() if self.failure is None else 0
        if reserve and self._is_scarce:
            reserve = self._reserve_where_scarce(reserve)
        if self._contents or reserve:
            self._committing, self._contents = self._contents, []
            self._reserving = reserve
            self._may_have_freed = bool(self._grants.lost)
            self._actions.append(Commit(tuple(self._committing), reserve))

    def _reserve_where_scarce(self, count: int) -> int:
        """Return the chunks to list although the last commit found none that is free.

        It is tried again now and then. Meanwhile workers without a part end, which gives back what
        they have. When all others wait for chunks and none come back, the volume is full.
        """
        for worker in self.workers.values():
            if worker.part is None and worker.keys is not None and not worker.is_ending:
                worker.is_ending = True
                end = End("the volume has no room for another worker now", goes_on=True)
                self._actions.append(Send(worker.number, end))
        may_come = bool(self._removed or self._leaving or self._grants.lost or self._contents)
        may_come |= self._may_have_freed  # what a commit frees is listed by the next one
        if not may_come and all(worker.is_waiting for worker in self.workers.values()):
            left = format_bytes(self._bytes_left)
            self._fail(SpaceError(f"import: expected room for about {left} of samples, got none"))
            return 0
        if self._seen_s < self._reserve_after_s:
            return 0
        self._reserve_after_s = self._seen_s + self._times.renew_s
        return count

    def _chunks_to_reserve(self) -> int:
        """Return the chunks to list as granted: before the free ones run out, and not too many."""
        asked = sum(worker.asked_chunks for worker in self.workers.values())
        held = sum(count_chunks(runs) for runs in self._grants.held.values())
        left = -(-self._bytes_left // self._chunk_bytes) + self._parts_left - held
        wanted = max(asked, min(left, self._grant_chunks * len(self.workers)))
        available = self._grants.pool_chunks
        return wanted - available if available < max(asked, (wanted + 1) // 2) else 0

    @property
    def _grant_chunks(self) -> int:
        return max(1, GRANT_BYTES // self._chunk_bytes)

    def _settle_grants(self) -> None:
        """Take the chunks of workers that have left, and grant chunks to those that wait for some.

        Those of a worker of which steps wait for their commit stay its own until then.
        """
        waiting = {number for _, number in self._waiting_contents()}
        for number in [number for number in self._leaving if number not in waiting]:
            until_s = self._leaving.pop(number)
            if until_s is None:
                self._grants.give_back(str(number))
            else:
                self._grants.lose(str(number), until_s)
                self._may_have_freed = True
        self._grant()

    def _grant(self) -> None:
        """Grant chunks to the workers that wait for some."""
        for worker in self.workers.values():
            if not worker.asked_chunks or worker.is_ending or not self._grants.pool_chunks:
                continue
            size = self.parts[worker.part].size_bytes if worker.part is not None else 0
            in_part = -(-max(0, size - worker.steps_bytes) // self._chunk_bytes) + 1
            count = max(worker.asked_chunks, min(self._grant_chunks, in_part))
            runs = self._grants.take(worker.key, count)
            if len(runs) > RUNS_MAX:
                self._grants.give_back(worker.key, runs[RUNS_MAX:])
                runs = runs[:RUNS_MAX]
            worker.asked_chunks, worker.is_waiting = 0, False
            found = [(run.first_chunk, run.chunk_count) for run in runs]
            self._actions.append(Send(worker.number, Granted(found)))

    # ---- time ------------------------------------------------------------------------------------

    def _renew(self, worker: WorkerState, number: int, now_s: float) -> None:
        """Answer a request for more time, if need be after a reading of the record."""
        if not self._times.expire:
            self._actions.append(Send(worker.number, Renewed(number, None)))
        elif [waiting for waiting, *_ in self._renewals].count(worker.number) < RENEWALS_MAX:
            self._renewals.append((worker.number, number, now_s))
            self._confirm()

    def _confirm(self) -> None:
        """Have the record read, unless that is under way."""
        if not self._is_confirming and not self._is_broken:
            self._is_confirming = True
            self._actions.append(Confirm())

    def confirmed(self, began_s: float) -> None:
        """Take note that a reading of the record, begun at a time, found its own term."""
        self._is_confirming = False
        self._confirmed_s = max(self._confirmed_s, began_s)
        renewals, self._renewals = self._renewals, []
        for number, request, came_s in renewals:
            if number not in self.workers:
                continue
            if came_s > began_s:
                self._renewals.append((number, request, came_s))
            else:
                self._extend(self.workers[number], request, began_s)
        if self._renewals:
            self._confirm()

    def not_confirmed(self) -> None:
        """Take note that a reading of the record failed; it is tried again a little later."""
        self._is_confirming = False
        self._confirm_after_s = self._seen_s + self._times.renew_s / 4

    def check_time(self, now_s: float) -> None:
        """Do what is due: lose silent workers, confirm the term, free drained chunks."""
        paused_s = now_s - self._seen_s - self._times.renew_s
        self._seen_s = now_s
        if paused_s > self._times.renew_s:  # this process was stopped: nothing was heard meanwhile
            for worker in self.workers.values():
                worker.heard_s += paused_s
        for worker in list(self.workers.values()):
            if self._is_late(worker, now_s):
                self._lose(worker, _LATE, counts=False)
            elif now_s - worker.heard_s >= self._times.valid_s:
                reason = f"it was silent for {self._times.valid_s:g} s"
                self._lose(worker, reason, counts=False)
        self._settle_grants()
        if self._times.expire:
            due = now_s >= self._confirmed_s + self._times.renew_s
            if (due or self._renewals) and now_s >= self._confirm_after_s:
                self._confirm()

    def _is_late(self, worker: WorkerState, now_s: float) -> bool:
        return worker.until_s is not None and now_s >= worker.until_s

    def _extend(self, worker: WorkerState, request: int, began_s: float) -> None:
        """Let a worker write for ``valid_s`` from a request that came before ``began_s``."""
        valid_s = self._times.valid_s
        worker.until_s = max(worker.until_s or 0.0, began_s + valid_s * DRIFT)
        self._actions.append(Send(worker.number, Renewed(request, valid_s)))
