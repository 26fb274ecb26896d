"""Coordinator and workers of an import under a scheduler that hypothesis chooses.

The world has one ``Coordinator`` and processes that run the real ``Worker``. The scheduler draws
how long messages, commits and writes take, which processes are killed, stopped and continued, or
cut off from the network, and by how much their clocks run fast or slow. Writes take effect up to
the drain time after they were sent, also those of a process that is killed meanwhile. Then: all
parts are imported once, in their steps; no chunk is written by two workers; and none is written
after it is free. DLFS_IMPORT_SEEDS asks for more worlds than usual.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlfs.block.lease import DRIFT
from dlfs.dataset.step_content import StepContent, StepEnd
from dlfs.errors import DeviceError, DlfsError, SpaceError
from dlfs.format.geometry import ChunkRun
from dlfs.ingest.workers.coordinator import (
    Begin,
    Commit,
    Confirm,
    Coordinator,
    GrantTimes,
    Remove,
    Send,
)
from dlfs.ingest.workers.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Hello,
    ProgressMade,
    StartPart,
)
from dlfs.ingest.workers.worker import Worker
from dlfs.store.grants import GrantBook

RENEW_S, VALID_S, DRAIN_S = 1.0, 5.0, 3.0
END_S = 4000.0
FAULTS_S = 200.0
"""Time after which nothing fails any more."""
CHUNK_BYTES = 1000
SEEDS = int(os.environ.get("DLFS_IMPORT_SEEDS", "150"))


def make_content(part: int, number: int, ends_part: bool, chunks: list[int]) -> StepContent:
    nothing = np.empty(0, np.uint8)
    return StepContent(
        part=part,
        number=number,
        end=StepEnd(source_count=number, ends_part=ends_part),
        runs=tuple(ChunkRun(chunk, 1) for chunk in chunks),
        sample_count=1,
        sample_bytes=CHUNK_BYTES * len(chunks),
        path_bytes=1,
        window_count=0,
        entries=nothing,
        names=nothing,
        attributes=[],
        attributes_head_bytes=0,
    )


@dataclass(eq=False)
class Process:
    """A process of the world that runs a ``Worker``."""

    number: int
    rate: float
    offset_s: float
    is_alive: bool = True
    stopped_until_s: float = 0.0
    is_cut_off: bool = False
    joined: int | None = None
    has_ended: bool = False
    is_ready: bool = False
    worker: Worker = field(init=False)
    step: int = 0
    chunks: list[int] = field(default_factory=list)
    to_write: int = 0
    writing: int = 0
    read: int = 0
    inbox_s: float = 0.0
    outbox_s: float = 0.0

    def clock(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s


class World:
    """One import."""

    def __init__(
        self, seed: int, *, expire: bool, faults: float = 1.0, chunk_count: int = 1 << 40
    ) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.expire = expire
        self.faults = faults
        self.part_steps = [
            self.random.choice((1, 1, 2, 3)) for _ in range(self.random.randint(1, 6))
        ]
        self.committed: list[tuple[int, int]] = []
        self.data: dict[int, tuple[int, int]] = {}
        self.writers: dict[int, set[int]] = {}
        self.book = GrantBook()
        self.granted: set[int] = set()  # as the record lists them
        self.next_chunk, self.chunk_count = 0, chunk_count
        self.freed: list[int] = []  # of lost workers, by the commits so far
        self.wanted = self.random.randint(1, 4)
        self.processes: list[Process] = []
        self.error: DlfsError | None = None
        self.is_complete = False
        self.coordinator = Coordinator(
            [CHUNK_BYTES * self.random.randint(0, 5) for _ in self.part_steps],
            {},
            self.book,
            GrantTimes(RENEW_S, VALID_S, DRAIN_S * DRIFT if expire else None),
            chunk_bytes=CHUNK_BYTES,
            setup=b"",
            slots=8,
            now_s=0.0,
        )
        self.paused_until_s = self.confirmed_s = 0.0
        self._tick_at: float | None = None

    # ---- time ------------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), call))

    def delay(self, longest_s: float) -> float:
        share = self.random.choice((0, 0.01, 0.02, 0.05, 0.1, 0.3, 1))
        return share * longest_s * self.random.random()

    def run(self) -> None:
        self.later(0, self.tick)
        self.later(0, self.launch)
        self.later(self.random.expovariate(0.5), self.fault)
        while self._events and not (self.is_complete or self.error):
            self.now_s, _, call = heapq.heappop(self._events)
            assert self.now_s < END_S, "the import does not end"
            call()
        while self._events:  # what is in flight takes effect
            self.now_s, _, call = heapq.heappop(self._events)
            if getattr(call, "is_write", False):
                call()

    # ---- the coordinator -------------------------------------------------------------------------

    def tick(self) -> None:
        if self.now_s < self.paused_until_s:
            self.later(self.paused_until_s - self.now_s, self.tick)
            return
        self.coordinator.check_time(self.now_s)
        self.act()
        self.later(max(0.01, self.coordinator.next_time() - self.now_s), self.tick)

    def act(self) -> None:
        for action in self.coordinator.take_actions():
            if isinstance(action, Send):
                self.to_process(action.worker, action.message)
            elif isinstance(action, Begin):
                steps = bytes([self.part_steps[action.part]])
                before = bytes([action.before.step_count])
                self.to_process(action.worker, StartPart(action.part, steps, before))
            elif isinstance(action, Commit):
                self.later(self.delay(10), lambda action=action: self.commit(action))
            elif isinstance(action, Confirm):
                began_s = self.now_s
                self.later(self.delay(4), lambda began_s=began_s: self.confirm(began_s))
            elif isinstance(action, Remove):
                self.remove(action)
        self.error = self.coordinator.failure
        self.is_complete = self.coordinator.is_complete

    def commit(self, action: Commit) -> None:
        for content, worker in action.contents:
            self.committed.append((content.part, content.number))
            self.book.use(str(worker), content.runs)
        gone = self.book.expire(self.now_s)
        count = min(action.reserve_chunks, self.free_chunks)
        again, self.freed = self.freed[:count], self.freed[count:]
        for chunk in again:
            self.book.add([ChunkRun(chunk, 1)])
            self.writers.pop(chunk, None)
        if count > len(again):
            self.book.add([ChunkRun(self.next_chunk, count - len(again))])
            self.next_chunk += count - len(again)
        self.freed += [chunk for run in gone for chunk in range(run.first_chunk, run.end_chunk)]
        runs = self.book.runs()
        self.granted = {chunk for run in runs for chunk in range(run.first_chunk, run.end_chunk)}
        self.coordinator.committed()
        self.act()

    @property
    def free_chunks(self) -> int:
        return self.chunk_count - self.next_chunk + len(self.freed)

    def confirm(self, began_s: float) -> None:
        self.confirmed_s = max(self.confirmed_s, began_s)
        self.coordinator.confirmed(began_s)
        self.act()

    def remove(self, action: Remove) -> None:
        process = next(each for each in self.processes if each.joined == action.worker)
        process.has_ended = True
        if not self.expire and action.reason:
            process.is_alive = False
        self.wait_until_gone(process, action)

    def wait_until_gone(self, process: Process, action: Remove) -> None:
        if not self.expire and process.writing:
            self.later(0.1, lambda: self.wait_until_gone(process, action))
            return
        self.coordinator.gone(action.worker)
        self.act()

    def to_process(self, number: int, message: AnyMessage) -> None:
        process = next(each for each in self.processes if each.joined == number)
        if process.is_cut_off:
            return
        process.inbox_s = max(process.inbox_s, self.now_s + self.delay(2))
        self.later(process.inbox_s - self.now_s, lambda: self.deliver(process, message))

    def to_coordinator(self, process: Process, message: AnyMessage) -> None:
        if process.is_cut_off:
            return
        process.outbox_s = max(process.outbox_s, self.now_s + self.delay(2), self.paused_until_s)
        self.later(process.outbox_s - self.now_s, lambda: self.arrive(process, message))

    def arrive(self, process: Process, message: AnyMessage) -> None:
        if process.has_ended or process.is_cut_off:
            return
        if isinstance(message, Hello):
            process.joined = self.coordinator.join(message, self.now_s, can_be_killed=True)
        elif process.joined is not None:
            self.coordinator.receive(process.joined, message, self.now_s)
        self.act()

    # ---- processes -------------------------------------------------------------------------------

    def launch(self) -> None:
        living = [each for each in self.processes if each.is_alive and not each.has_ended]
        if len(living) < min(self.wanted, self.coordinator.wanted_workers):
            rate = self.random.uniform(1 / 1.02, 1.02)
            process = Process(len(self.processes), rate, self.random.uniform(-1e6, 1e6))
            hello = Hello(PROTOCOL_VERSION, "", b"", "host", "", process.number)
            process.worker = Worker(hello, process.clock(self.now_s))
            self.processes.append(process)
            self.later(self.delay(3), lambda: self.work(process))
        self.later(0.5, self.launch)

    def deliver(self, process: Process, message: AnyMessage) -> None:
        if process.stopped_until_s > self.now_s:
            self.later(process.stopped_until_s - self.now_s, lambda: self.deliver(process, message))
        elif process.is_alive:
            process.worker.receive(message, process.clock(self.now_s))

    def work(self, process: Process) -> None:
        """Do the next thing that the process does, and so on."""
        if not process.is_alive:
            return
        if process.stopped_until_s > self.now_s:
            self.later(process.stopped_until_s - self.now_s, lambda: self.work(process))
            return
        worker = process.worker
        worker.check_time(process.clock(self.now_s))
        if worker.end is None and worker.welcome is not None and not process.is_ready:
            process.is_ready = True
            worker.be_ready([None], process.clock(self.now_s))
        elif worker.end is None and worker.part is not None and worker.is_permitted:
            self.pack(process)
        for outgoing in worker.take_messages():
            self.to_coordinator(process, outgoing.message)
        if worker.end is not None and not process.writing:
            if not worker.is_lost:
                worker.report_end()
                for outgoing in worker.take_messages():
                    self.to_coordinator(process, outgoing.message)
            process.is_alive = False
            self.hang_up(process)
            return
        self.later(0.02 + self.delay(1.5), lambda: self.work(process))

    def pack(self, process: Process) -> None:
        worker = process.worker
        assert worker.part is not None
        part, steps = worker.part.part, worker.part.description[0]
        if process.read != 1 + part:  # a part that was begun just now
            process.read, process.step, process.chunks = 1 + part, worker.part.before[0], []
            process.to_write = self.random.randint(0, 4)
        if len(process.chunks) < process.to_write:
            if not worker.has_chunks:
                worker.ask_for_chunks(self.random.randint(1, 3), is_waiting=True)
                return
            run = worker.take(1)
            process.chunks.append(run.first_chunk)
            self.write(process, run.first_chunk)
        elif not process.writing and worker.may_report:
            ends_part = process.step + 1 == steps
            worker.report(self.content(part, process, ends_part=ends_part))
            process.read = 0 if ends_part else process.read
            process.step, process.chunks = process.step + 1, []
            process.to_write = self.random.randint(0, 4)
        elif self.random.random() < 0.2:
            worker.report_progress(ProgressMade(part, 0, 0, 0))

    def content(self, part: int, process: Process, *, ends_part: bool) -> StepContent:
        return make_content(part, process.step, ends_part, process.chunks)

    def write(self, process: Process, chunk: int) -> None:
        """Send a write, if the process has the right to; it takes effect later."""
        deadline_s = process.worker.deadline_s
        if self.expire and (deadline_s is None or process.clock(self.now_s) >= deadline_s):
            process.worker.check_time(process.clock(self.now_s))
            process.chunks.pop()
            return
        limit_s = self.confirmed_s + VALID_S * DRIFT
        assert not self.expire or self.now_s < limit_s, "a write behind the coordinator's own right"
        process.writing += 1

        def take_effect() -> None:
            process.writing -= 1
            assert chunk in self.granted, "a write to a chunk that is free"
            self.writers.setdefault(chunk, set()).add(process.number)

        take_effect.is_write = True  # type: ignore[attr-defined]
        self.later(self.delay(DRAIN_S), take_effect)

    def hang_up(self, process: Process) -> None:
        """Have the coordinator see the end of the connection."""

        def see() -> None:
            if process.joined is not None and not process.has_ended:
                self.coordinator.leave(process.joined, "the connection ended")
                self.act()
            process.has_ended = True

        if not process.is_cut_off:
            process.outbox_s = max(process.outbox_s, self.now_s + self.delay(2))
            self.later(process.outbox_s - self.now_s, see)

    # ---- faults ----------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.now_s > FAULTS_S * self.faults:
            return
        living = [each for each in self.processes if each.is_alive]
        if living:
            process = self.random.choice(living)
            kind = self.random.randint(0, 4)
            if kind == 0:
                process.is_alive = False
                self.hang_up(process)
            elif kind == 1:
                process.stopped_until_s = self.now_s + self.random.uniform(0, 4 * VALID_S)
            elif kind == 2 and self.expire:
                process.is_cut_off = True
            elif kind == 3:
                self.paused_until_s = self.now_s + self.random.uniform(0, 2 * VALID_S)
        self.later(self.random.expovariate(0.1), self.fault)


def check(world: World) -> None:
    if world.error is not None:  # a part lost too many workers
        assert isinstance(world.error, DeviceError)
        assert "without a further step" in str(world.error)
    else:
        expected = [(part, step) for part, n in enumerate(world.part_steps) for step in range(n)]
        assert sorted(world.committed) == expected
    for part in range(len(world.part_steps)):
        steps = [step for number, step in world.committed if number == part]
        assert steps == list(range(len(steps)))
    assert all(len(writers) == 1 for writers in world.writers.values())


@settings(max_examples=SEEDS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), expire=st.booleans())
def test_every_part_is_imported_once(seed: int, expire: bool) -> None:
    world = World(seed, expire=expire)
    world.run()
    check(world)


@pytest.mark.parametrize("expire", [False, True])
def test_without_faults_nothing_is_lost(expire: bool) -> None:
    world = World(1, expire=expire, faults=0)
    world.run()
    check(world)
    assert world.error is None


@settings(max_examples=SEEDS // 3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    chunk_count=st.integers(0, 30),
    expire=st.booleans(),
    faults=st.sampled_from([0.0, 1.0]),
)
def test_a_full_volume_is_an_error_or_enough(
    seed: int, chunk_count: int, expire: bool, faults: float
) -> None:
    world = World(seed, expire=expire, faults=faults, chunk_count=chunk_count)
    world.run()
    if isinstance(world.error, SpaceError):
        assert "expected room for about" in str(world.error)
        assert not world.free_chunks
    else:
        check(world)


def notices(expire: bool) -> bool:
    """Return True if a world finds what a test has broken."""
    for seed in range(1000):
        world = World(seed, expire=expire)
        try:
            world.run()
            check(world)
        except AssertionError:
            return True
    return False


def test_chunks_that_are_free_before_the_last_writes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose = GrantBook.lose
    monkeypatch.setattr(GrantBook, "lose", lambda self, key, s: lose(self, key, s - DRAIN_S))
    assert notices(expire=True)


def test_answers_by_a_reading_that_began_before_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    confirmed = Coordinator.confirmed

    def answer_all(self: Coordinator, began_s: float) -> None:
        self._renewals = [(worker, number, 0.0) for worker, number, _ in self._renewals]
        confirmed(self, began_s)

    monkeypatch.setattr(Coordinator, "confirmed", answer_all)
    assert notices(expire=True)


def test_slots_of_processes_that_still_write_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: World, _process: Process, action: Remove) -> None:
        self.coordinator.gone(action.worker)
        self.act()

    monkeypatch.setattr(World, "wait_until_gone", at_once)
    assert notices(expire=False)
