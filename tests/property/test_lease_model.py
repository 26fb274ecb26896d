"""Contenders for one lease under a scheduler that hypothesis chooses: never two holders at once.

The world is a record, a time, and contenders that run the real steps of ``dlfs.block.lease``. The
scheduler draws how long each step takes, when within it a write takes effect, which writes fail and
take effect late or never, when a contender pauses, crashes or gives the lease back, and by how much
its clock runs fast or slow. What it draws keeps to the assumptions of the module's docstring; two
tests break one of them each, and show that the model notices. DLFS_LEASE_SEEDS asks for more worlds
than usual.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlfs.block.lease import (
    Flush,
    Lease,
    LeaseAliveError,
    LeaseTimes,
    PreemptReservation,
    Read,
    Step,
    Steps,
    Wait,
)
from dlfs.block.lock import RECORD_BYTES, HolderRecord
from dlfs.errors import DeviceTimeoutError, LeaseLostError

TIMES = LeaseTimes(renew_s=2, valid_s=5, drain_s=3, claim_s=1, poll_s=1.5)
END_S = 120.0
SEEDS = int(os.environ.get("DLFS_LEASE_SEEDS", "500"))


class TwoHoldersError(AssertionError):
    """Two contenders held the lease at once, which must never happen."""


@dataclass
class Fate:
    """Random choices of the scheduler."""

    random: Random
    drain_s: float = TIMES.drain_s
    pause_s: float = 3 * TIMES.valid_s
    patience: float = 1.0
    """Share of each wait that a contender really waits."""

    def duration(self, longest: float) -> float:
        """Mostly short, sometimes up to the longest."""
        shares = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 1)
        return self.random.choice(shares) * longest

    def happens(self, in_ten: int) -> bool:
        return self.random.randrange(10) < in_ten


@dataclass
class World:
    fate: Fate
    time: float = 0.0
    content: bytes = bytes(RECORD_BYTES)
    contenders: list[Contender] = field(default_factory=list)
    holders: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.time + seconds, next(self._serial), event))

    def run(self) -> None:
        for contender in self.contenders:
            self.after(self.fate.duration(4), contender.start)
        while self._events:
            self.time, _, event = heapq.heappop(self._events)
            if self.time > END_S:
                return
            event()

    def put(self, content: bytes) -> None:
        self.content = content

    def check_alone(self, newest: Contender) -> None:
        """Nobody else may still write."""
        self.holders += 1
        for other in self.contenders:
            if other is not newest and other.may_write():
                raise TwoHoldersError(f"{other.name} and {newest.name} at {self.time}")
            if other is not newest:
                other.superseded = True

    def data_written(self, by: Contender, epoch: int) -> None:
        if by.superseded or by.epoch != epoch:
            raise TwoHoldersError(f"a late write of {by.name} at {self.time}")


class Contender:
    """Claims, holds, writes, renews, and gives back or crashes; again and again."""

    def __init__(self, world: World, name: str, times: LeaseTimes) -> None:
        self.world, self.fate, self.name, self.times = world, world.fate, name, times
        self.rate = self.fate.random.choice((0.98, 1.0, 1.02))
        self.offset = self.fate.random.randrange(1000)
        self.holding = False
        self.superseded = False
        self.epoch = 0
        self.lease = self.new_lease()

    def now(self) -> float:
        return self.offset + self.world.time * self.rate

    def new_lease(self) -> Lease:
        record = HolderRecord("a model", self.name, 1, "pytest", "now")
        place = SimpleNamespace(
            uri="model:", limit_writes=lambda _until_s: None
        )  # the steps are performed here, not by the lease
        return Lease(place, record, times=self.times, now=self.now)  # type: ignore[arg-type]

    def may_write(self) -> bool:
        return self.holding and not self.lease.lost

    # ---- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        self.lease = self.new_lease()
        self.run(self.lease.claiming(), self.claimed)

    def claimed(self) -> None:
        if self.lease.lost:  # a pause between the check and here
            self.rest()
            return
        self.holding, self.superseded = True, False
        self.epoch += 1
        self.world.check_alone(self)
        self.hold()

    def hold(self) -> None:
        """One turn of a holder: data, then a renewal, a pause, a crash or the end."""
        if self.fate.happens(5):
            self.write_data()
        turn = self.fate.random.randrange(12)
        if turn == 0:
            self.holding = False  # a crash: what is under way takes effect
            self.rest()
        elif turn == 1:
            self.run(self.lease.releasing(), self.rest)
        elif turn == 2:
            self.world.after(self.fate.duration(self.fate.pause_s), self.hold)
        else:
            pause = self.times.renew_s / self.rate
            self.world.after(pause, lambda: self.run(self.lease.renewing(), self.hold))

    def rest(self) -> None:
        self.holding = False
        self.world.after(self.fate.duration(10), self.start)

    def write_data(self) -> None:
        if self.lease.lost:
            return
        failed = self.fate.happens(2)
        if failed:
            self.lease.note_failed_write()
        if not (failed and self.fate.happens(3)):
            late, epoch = self.fate.duration(self.fate.drain_s), self.epoch
            if failed or late < 0.1:  # one that succeeds has ended before the lease is given back
                self.world.after(late, lambda: self.world.data_written(self, epoch))

    # ---- its steps -------------------------------------------------------------------------------

    def run(self, steps: Steps[None], then: Callable[[], None]) -> None:
        self.advance(steps, None, then)

    def advance(self, steps: Steps[None], answer: bytes | None, then: Callable[[], None]) -> None:
        try:
            step = next(steps) if answer is None else steps.send(answer)
        except StopIteration:
            then()
        except (LeaseAliveError, LeaseLostError, DeviceTimeoutError):
            self.rest()
        else:
            self.perform(step, steps, then)

    def perform(self, step: Step, steps: Steps[None], then: Callable[[], None]) -> None:
        world, fate = self.world, self.fate

        def proceed(answer: bytes = b"") -> None:
            self.advance(steps, answer, then)

        if isinstance(step, Read):
            effect, rest = fate.duration(1), fate.duration(1)
            world.after(
                effect,
                lambda: (lambda seen: world.after(rest, lambda: proceed(seen)))(world.content),
            )
        elif isinstance(step, Wait):
            world.after(step.seconds * fate.patience / self.rate, proceed)
        elif isinstance(step, Flush | PreemptReservation):
            world.after(fate.duration(0.1), proceed)
        elif fate.happens(1):
            self.fail_write(step.content)
        else:
            effect = fate.duration(fate.drain_s)
            world.after(effect, lambda: world.put(step.content))
            world.after(effect + fate.duration(0.5), proceed)

    def fail_write(self, content: bytes) -> None:
        """An error is answered now; the write takes effect late, or never."""
        self.lease.note_failed_write()
        if self.fate.happens(5):
            self.world.after(self.fate.duration(self.fate.drain_s), lambda: self.world.put(content))
        if self.holding and any(content):
            self.world.after(self.fate.duration(1), self.hold)
        else:
            self.rest()  # a claim, or giving back: either way it holds nothing


def run_world(fate: Fate, count: int, times: list[LeaseTimes]) -> World:
    world = World(fate)
    for i in range(count):
        world.contenders.append(Contender(world, f"contender {i}", times[i % len(times)]))
    world.run()
    return world


@given(random=st.randoms(use_true_random=False), count=st.integers(2, 4))
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_there_is_one_holder_at_most(random: Random, count: int) -> None:
    run_world(Fate(random), count, [TIMES])


def test_there_is_one_holder_at_most_from_many_seeds() -> None:
    """Hypothesis shrinks well and draws slowly: seeds cover more. Holders there must be, too."""
    holders = 0
    for seed in range(SEEDS):
        holders += run_world(Fate(Random(seed)), 2 + seed % 3, [TIMES]).holders
    assert holders > 2 * SEEDS


@pytest.mark.parametrize(
    ("broken", "times"),
    [
        pytest.param({"drain_s": 5 * TIMES.drain_s}, [TIMES], id="writes take effect too late"),
        pytest.param({"patience": 0.1}, [TIMES], id="nobody waits before the check"),
        pytest.param({}, [TIMES, replace(TIMES, valid_s=40)], id="one goes on for too long"),
    ],
)
def test_the_model_notices_a_broken_assumption(
    broken: dict[str, float], times: list[LeaseTimes]
) -> None:
    for seed in range(2000):
        try:
            run_world(Fate(Random(seed), **broken), 4, times)
        except TwoHoldersError:
            return
    pytest.fail("2000 worlds with a broken assumption, and never two holders")
