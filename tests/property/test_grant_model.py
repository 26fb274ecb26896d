"""Workers of an import under a scheduler that seeds choose: no write of a term after its end.

The world is the term of an import on its volume, a time, and three kinds of processes. Coordinators
take the import over from each other and answer the requests of their own workers. Workers extend a
real ``Grant`` and write. The scheduler draws how long each step takes, when within it a write takes
effect, by how much each clock runs fast or slow, when a process is stopped, for how long, and
whether its clock stands still meanwhile, as that of a virtual machine may. What it draws keeps to
the assumptions of docs/leases.md; four tests break a rule each, and show that the model notices.
DLFS_LEASE_SEEDS asks for more worlds than usual.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from dlfs.block.grant import Grant
from dlfs.block.lease import LeaseTimes
from dlfs.errors import LeaseLostError

TIMES = LeaseTimes(renew_s=1, valid_s=5, drain_s=3)
END_S = 90.0
SEEDS = int(os.environ.get("DLFS_LEASE_SEEDS", "150"))


class ForeignWriteError(AssertionError):
    """A granted write took effect after its chunks were free, which must never happen."""


@dataclass
class Fate:
    """Random choices of the scheduler, and the rule that is broken, if any."""

    random: Random
    drain_s: float = TIMES.drain_s
    """Longest time from the check of a deadline to the effect of a write."""
    patience: float = 1.0
    """Share of each wait for the end of grants that a coordinator really waits."""
    answers_by_clock: bool = False
    """Coordinators answer at once, by what is left of their last confirmation on their clocks."""
    forgets_incarnations: bool = False
    """Workers write through any controller."""

    def duration(self, longest: float) -> float:
        """Mostly short, sometimes up to the longest."""
        return self.random.choice((0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 1)) * longest

    def happens(self, in_hundred: int) -> bool:
        return self.random.randrange(100) < in_hundred


@dataclass
class World:
    fate: Fate
    time: float = 0.0
    term: int = 0
    freed_terms: int = 0
    """The chunks that were granted under earlier terms than this are free."""
    writes: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.time + seconds, next(self._serial), event))

    def run(self) -> None:
        Coordinator(self).take_over()
        while self._events:
            self.time, _, event = heapq.heappop(self._events)
            if self.time > END_S:
                return
            event()

    def take_effect(self, by: Worker) -> None:
        self.writes += 1
        if by.is_freed or by.coordinator.term < self.freed_terms:
            raise ForeignWriteError(f"a write of term {by.coordinator.term} at {self.time}")


class Process:
    """A process with a clock, which may be stopped: then it does nothing until it continues."""

    def __init__(self, world: World) -> None:
        self.world, self.fate = world, world.fate
        self.rate = self.fate.random.choice((0.98, 1.0, 1.02))
        self.offset = self.fate.random.randrange(1000)
        self.stands_still = 0.0
        self.stopped_until = 0.0
        self.world.after(self.fate.duration(30), self.stop)

    def now(self) -> float:
        return self.offset + (self.world.time - self.stands_still) * self.rate

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Do something after some real time, or as soon as the process continues."""

        def run() -> None:
            if self.world.time < self.stopped_until:
                self.world.after(self.stopped_until - self.world.time, run)
            else:
                event()

        self.world.after(seconds, run)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Do something at a time of the process's clock."""

        def run() -> None:
            left_s = time_s - self.now()
            if left_s <= 1e-9:
                event()
            else:
                self.later(left_s / self.rate, run)

        run()

    def stop(self) -> None:
        seconds = self.fate.duration(4 * TIMES.valid_s)
        self.stopped_until = self.world.time + seconds
        if seconds >= TIMES.drain_s and self.fate.happens(50):  # assumption 3 excludes shorter ones
            self.stands_still += seconds
        self.was_silent(seconds)
        self.world.after(seconds + self.fate.duration(30), self.stop)

    def was_silent(self, seconds: float) -> None:
        """The process is stopped from now on, for so long."""


class Worker(Process):
    """Asks for extensions, and writes whenever its grant allows it."""

    def __init__(self, world: World, coordinator: Coordinator) -> None:
        super().__init__(world)
        self.coordinator = coordinator
        self.grant = Grant("model:", now=self.now)
        self.is_freed = False
        self.incarnation = 0  # as the initiator knows it
        self.confirmed: int | None = None
        self.is_connected = True
        self.ask()
        self.write()

    def was_silent(self, seconds: float) -> None:
        if seconds >= TIMES.drain_s:  # assumption 4
            self.is_connected = False
            self.later(self.fate.duration(1), self.reconnect)

    def reconnect(self) -> None:
        self.incarnation += 1
        self.is_connected = True

    def ask(self) -> None:
        asked_at, incarnation = self.now(), self.incarnation

        def extend(rest_s: float) -> None:
            self.grant.extend(asked_at + min(TIMES.valid_s, rest_s))
            self.confirmed = incarnation

        def answer(rest_s: float) -> None:
            self.later(self.fate.duration(2), lambda: extend(rest_s))

        request = self.coordinator.request
        self.coordinator.later(self.fate.duration(1), lambda: request(self, answer))
        self.later(TIMES.renew_s, self.ask)

    def write(self) -> None:
        self.later(self.fate.duration(1) + 0.05, self.write)
        try:
            self.grant.check()
        except LeaseLostError:
            return
        if self.confirmed != self.incarnation and not self.fate.forgets_incarnations:
            return
        checked_at, incarnation = self.world.time, self.incarnation
        effect_at = checked_at + self.fate.duration(self.fate.drain_s)

        def send() -> None:
            sent = self.is_connected and incarnation == self.incarnation
            if sent and self.world.time <= checked_at + self.fate.drain_s:  # assumption 2
                seconds = max(0, effect_at - self.world.time)
                self.world.after(seconds, lambda: self.world.take_effect(self))

        self.later(self.fate.duration(0.2), send)


class Coordinator(Process):
    """Takes the import over, confirms its term for its workers, and gives some of them up."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.term = -1
        self.read_at = 0.0
        self.answered_at: dict[Worker, float] = {}
        self.lost: set[Worker] = set()

    def take_over(self) -> None:
        """Commit a new term, wait, and begin; another process does the same some time later."""

        def commit() -> None:
            self.term = self.world.term = self.world.term + 1
            self.later(self.fate.duration(0.5), wait)

        def wait() -> None:
            self.read_at = self.now()
            self.at(self.now() + TIMES.expiry_s * self.fate.patience, begin)

        def begin() -> None:
            if self.world.term == self.term:  # else a successor waits by itself
                self.world.freed_terms = max(self.world.freed_terms, self.term)
            for _ in range(self.fate.random.randint(1, 3)):
                self.answered_at[Worker(self.world, self)] = self.now()
            self.at(self.now() + TIMES.renew_s, self.confirm)
            self.world.after(self.fate.duration(30), lambda: Coordinator(self.world).take_over())

        self.later(self.fate.duration(0.5), commit)

    def confirm(self) -> None:
        """Read the term, only for the rule that answers by the clock."""
        began_at = self.now()
        if self.world.term == self.term:
            self.read_at = began_at
            self.at(began_at + TIMES.renew_s, self.confirm)

    def request(self, worker: Worker, answer: Callable[[float], None]) -> None:
        """Answer a worker after a read that begins now and finds this coordinator's term."""
        if worker in self.lost:
            return
        if self.fate.answers_by_clock:
            self.answered_at[worker] = self.now()
            answer(self.read_at + TIMES.valid_s - self.now())
            return
        effect_s, rest_s = self.fate.duration(1), self.fate.duration(1)

        def read() -> None:
            found = self.world.term
            self.later(rest_s, lambda: reply(found))

        def reply(found: int) -> None:
            if found != self.term or worker in self.lost:
                return
            self.answered_at[worker] = self.now()
            answer(TIMES.valid_s)
            if self.fate.happens(10):
                self.give_up(worker)

        self.world.after(effect_s, read)  # the device reads, also while the process is stopped

    def give_up(self, worker: Worker) -> None:
        """Answer a worker no more, and free its chunks when its grant must have ended."""

        def free() -> None:
            worker.is_freed = True

        self.lost.add(worker)
        self.at(self.answered_at[worker] + TIMES.expiry_s * self.fate.patience, free)


def run_world(fate: Fate) -> World:
    world = World(fate)
    world.run()
    return world


def test_no_write_takes_effect_after_the_wait() -> None:
    """Writes and takeovers there must be, too."""
    worlds = [run_world(Fate(Random(seed))) for seed in range(SEEDS)]
    assert sum(world.writes for world in worlds) > 10 * SEEDS
    assert sum(world.freed_terms > 1 for world in worlds) > SEEDS / 2


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"drain_s": 5 * TIMES.drain_s}, id="writes take effect too late"),
        pytest.param({"patience": 0.1}, id="a successor does not wait"),
        pytest.param({"answers_by_clock": True}, id="a coordinator trusts its own clock"),
        pytest.param({"forgets_incarnations": True}, id="writes go through any controller"),
    ],
)
def test_the_model_notices_a_broken_rule(broken: dict[str, float]) -> None:
    for seed in range(2000):
        try:
            run_world(Fate(Random(seed), **broken))
        except ForeignWriteError:
            return
    pytest.fail("2000 worlds with a broken rule, and no foreign write")
