"""Targets of a volume whose disks hang or send a few bytes at a time, and calls that must end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import dlfs
from dlfs.base import deadlines
from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceTimeoutError
from tests.support.nvme import (
    DEFAULT_NQN,
    Event,
    Fault,
    FaultScript,
    Fragments,
    Namespace,
    ScriptedTarget,
    Subsystem,
)
from tests.support.nvme.faults import Delay, Drip, Omit

BOUND_S = 3.0
SLACK_S = 2.0
WAIT_S = 60.0
OPTIONS = {"timeout_ms": 500, "reconnect_ms": 500}
SOUND_TIMEOUT_MS = 2500
"""Least timeout of the targets that answer, which a busy machine may not run for a while."""
LATE = {"timeout_ms": 60_000, "reconnect_ms": 0}  # the device itself does not give up in time
COUNT = 60
SAMPLES = {b"d%d/%03d" % (i % 3, i): bytes([i + 1]) * 9000 for i in range(COUNT)}
ORDERED = [SAMPLES[path] for path in sorted(SAMPLES)]


def hang() -> FaultScript:
    return FaultScript([Fault(Event.READ, Omit(), times=None)])


def hang_and_refuse() -> FaultScript:
    """Answer no read, and no Connect of a new I/O queue."""
    events = (Event.READ, Event.CONNECT_IO)
    return FaultScript([Fault(event, Omit(), times=None) for event in events])


def drip(bytes_each: int) -> FaultScript:
    return FaultScript([Fault(Event.READ, Drip(Fragments([bytes_each], 1000)), times=None)])


def delay(seconds: float) -> FaultScript:
    return FaultScript([Fault(Event.READ, Delay(seconds), times=None)])


@dataclass
class World:
    """Targets with one volume, which has a dataset ``ds``."""

    targets: list[ScriptedTarget]
    uuid: UUID | None = None
    opened: int = 0

    def uris(self, options: dict[str, int]) -> list[str]:
        """Return other URIs at each call: nothing is known of them yet."""
        self.opened += 1
        distinct = options | {"keepalive_ms": 10_000 - self.opened}
        sound = distinct | {"timeout_ms": max(options.get("timeout_ms", 0), SOUND_TIMEOUT_MS)}
        first, *others = self.targets
        return [first.uri(**distinct), *(target.uri(**sound) for target in others)]

    @property
    def copies(self) -> int:
        return len(self.targets)

    def recover(self) -> None:
        for target in self.targets:
            target.play(None)


@contextlib.contextmanager
def make_world(copies: int) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(
                ScriptedTarget([Subsystem(f"{DEFAULT_NQN}{number}", [Namespace(8 * MIB)])])
            )
            for number in range(copies)
        ]
        world = World(targets)
        uris = world.uris({})
        world.uuid = dlfs.format_volume(uris, chunk_bytes=64 * KIB, replicas=copies).uuid
        with dlfs.open(uris) as volume, volume.writer("ds") as writer:
            for path, data in SAMPLES.items():
                writer.add(path, data, attributes={"length": len(data)})
        yield world


def bound_s(options: dict[str, int]) -> float:
    operation_ms = max(options["timeout_ms"], SOUND_TIMEOUT_MS) + options["reconnect_ms"]
    return deadlines.call_timeout_ms([operation_ms]) / 1000


def within(limit_s: float, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result or the error of a call, which ends within a bound."""
    began = time.monotonic()
    result, failure = None, None
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  checked by the caller
        failure = error
    assert time.monotonic() - began < limit_s + SLACK_S, failure
    return result, failure


def check(world: World, found: tuple[Any, BaseException | None], expected: Any) -> None:
    """With another copy, the call succeeds; without, its error is typed and names the device."""
    result, failure = found
    if world.copies > 1:
        assert failure is None
        assert result == expected
        return
    assert isinstance(failure, DeviceTimeoutError), repr(failure)
    assert failure.retryable
    assert f"127.0.0.1:{world.targets[0].port}" in str(failure)
    assert "answer" in str(failure)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def batches(dataset: dlfs.Dataset, count: int = 1) -> list[list[bytes]]:
    with dataset.batches(8, seed=3) as epoch:
        return [next(epoch).to_list() for _ in range(count)]


def opened(uris: Sequence[str], found: Callable[[dlfs.Volume], Any]) -> Any:
    """Open a volume, return what is found in it, and close it.

    One that is left to the garbage collector may be closed by any thread, also by a target's, which
    then waits for itself.
    """
    with dlfs.open(uris) as volume:
        return found(volume)


def first_batch(dataset: dlfs.Dataset) -> list[bytes]:
    return batches(dataset)[0]


# What users call, by name: given the URIs, an open volume and its dataset.
CALLS: dict[str, tuple[Callable[[Sequence[str], dlfs.Volume, dlfs.Dataset], Any], Any]] = {
    "get": (lambda _u, _v, ds: ds[7], ORDERED[7]),
    "read": (lambda _u, _v, ds: ds.read([3, 50, 20]).to_list(), [ORDERED[i] for i in (3, 50, 20)]),
    "epoch": (lambda _u, _v, ds: len(first_batch(ds)), 8),
    "paths": (lambda _u, _v, ds: ds.paths(), sorted(SAMPLES)),
    "column": (lambda _u, _v, ds: int(ds.column("length")[5]), 9000),
    "refresh": (lambda _u, v, _ds: v.refresh(), None),
    "dataset": (lambda _u, v, _ds: len(v["ds"].open()), COUNT),
    "open": (lambda u, _v, _ds: opened(u, lambda v: v.label), ""),
    "info": (lambda u, _v, _ds: opened(u, lambda v: v.info().dataset_count), 1),
}
