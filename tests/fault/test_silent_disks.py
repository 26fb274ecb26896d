"""Disks that hang: their target answers connects, keep-alive and admin commands, and never a read.

Each call of a user ends within the bound of ``base.deadlines``, with one copy and with two, also if
the disk sends a few bytes now and then. What is known to be silent is not waited for again, until
it answers. The tests shorten the bound of 30 s.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import dlfs
from dlfs._native import abi
from dlfs.base import deadlines
from dlfs.block import is_silent, note_unanswered, open_device
from tests.fault.silent_world import (
    BOUND_S,
    CALLS,
    COUNT,
    LATE,
    OPTIONS,
    ORDERED,
    WAIT_S,
    World,
    bound_s,
    check,
    delay,
    drip,
    first_batch,
    hang,
    hang_and_refuse,
    make_world,
    opened,
    wait_until,
    within,
)
from tests.golden import c_reader
from tests.support.nvme import Event, Fault, FaultScript, ScriptedTarget
from tests.support.nvme.faults import Delay, Omit

ROUNDS = int(os.environ.get("DLFS_HANG_ROUNDS", "3"))


@pytest.fixture(scope="module", params=[1, 2])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    with make_world(request.param) as world:
        yield world


@pytest.fixture
def world(made: World) -> Iterator[World]:
    yield made
    made.recover()


@pytest.fixture(autouse=True)
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CALL_TIMEOUT_MS", int(BOUND_S * 1000))


def find_in_vain(volume: dlfs.Volume) -> int:
    """Verify a volume; return how many chunks' worth of defects there are, at least."""
    return sum(1 for _ in volume.verify())


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Options of a device that does not give up by itself within the bound."""
    for module in ("dlfs.base.deadlines", "dlfs.reader.reader"):
        monkeypatch.setattr(f"{module}.call_timeout_ms", lambda _times: int(BOUND_S * 1000))
    return LATE


def check_call(world: World, call: str, options: dict[str, int]) -> None:
    uris = world.uris(options)
    function, expected = CALLS[call]
    with dlfs.open(uris) as volume, volume["ds"] as dataset:
        world.targets[0].play(hang())
        check(world, within(bound_s(options), lambda: function(uris, volume, dataset)), expected)


@pytest.mark.parametrize("call", CALLS)
def test_each_call_ends_within_the_bound(world: World, call: str) -> None:
    check_call(world, call, OPTIONS)


@pytest.mark.parametrize("call", ["get", "epoch", "open", "refresh", "paths"])
def test_each_call_ends_though_the_device_waits(
    world: World, call: str, late: dict[str, int]
) -> None:
    check_call(world, call, late)


@pytest.mark.parametrize("bytes_each", [2, 200])
def test_a_trickle_does_not_move_the_bound(world: World, bytes_each: int) -> None:
    with dlfs.open(world.uris(OPTIONS)) as volume, volume["ds"] as dataset:
        world.targets[0].play(drip(bytes_each))
        limit_s = bound_s(OPTIONS)
        check(world, within(limit_s, lambda: len(first_batch(dataset))), 8)
        check(world, within(limit_s, lambda: dataset[7]), ORDERED[7])
        check(world, within(limit_s, volume.refresh), None)


def test_what_is_silent_is_not_waited_for_again(world: World) -> None:
    uris = world.uris(OPTIONS)
    with dlfs.open(uris) as volume, volume["ds"] as dataset:
        world.targets[0].play(hang())
        limit_s = bound_s(OPTIONS)
        check(world, within(limit_s, lambda: dataset[0]), ORDERED[0])

        def many() -> None:  # together they take no longer than one call may
            for index in range(1, 50):
                check(world, within(limit_s, lambda index=index: dataset[index]), ORDERED[index])
            for _ in range(5):
                check(world, within(limit_s, lambda: opened(uris, lambda v: v.label)), "")
                check(world, within(limit_s, volume.refresh), None)

        assert within(limit_s, many) == (None, None)
        (device, *_others) = volume.uri.split(",")  # in the order of the members
        assert is_silent(device)
        world.recover()
        wait_until(lambda: not is_silent(device))
        wait_until(lambda: dataset.read(range(COUNT), on_error="skip").to_list() == ORDERED)
        volume.refresh()
        assert [member.state for member in volume.members] == ["current"] * world.copies


def test_threads_share_the_outcome(world: World) -> None:
    with dlfs.open(world.uris(OPTIONS)) as volume, volume["ds"] as dataset:
        world.targets[0].play(hang())
        found: list[tuple[Any, BaseException | None]] = []
        calls: list[Callable[[], Any]] = [lambda: dataset[7], lambda: len(dataset.paths())] * 6
        threads = [
            threading.Thread(target=lambda call=call: found.append(within(bound_s(OPTIONS), call)))
            for call in calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(calls)
        for result, failure in found:
            check(world, (result if failure else None, failure), None)


def test_the_last_copy_is_waited_for() -> None:
    """A sixteenth of the bound is for a member while another one has the same."""
    with (
        make_world(2) as world,
        dlfs.open(world.uris(OPTIONS)) as volume,
        volume["ds"] as dataset,
    ):
        world.targets[0].play(hang())
        note_unanswered(volume.session.generation.members[0].device)
        world.targets[1].play(delay(0.3))
        assert BOUND_S / 16 < 0.3
        column = partial(dataset.column, "length")
        assert within(bound_s(OPTIONS), lambda: int(column()[5])) == (9000, None)


def test_a_copy_that_connects_late_is_asked_again() -> None:
    """An eighth of the bound is for a connection while another member has the same."""
    with make_world(2) as world:
        for call in ("get", "read", "epoch"):
            world.recover()
            uris = world.uris(OPTIONS)
            with dlfs.open(uris) as volume, volume["ds"] as dataset:
                world.targets[0].play(hang())
                world.targets[1].play(FaultScript([Fault(Event.CONNECT_IO, Delay(0.6))]))
                assert BOUND_S / 8 < 0.6
                function, expected = CALLS[call]
                read = partial(function, uris, volume, dataset)
                assert within(bound_s(OPTIONS), read) == (expected, None)


def test_collecting_devices_does_not_wait_for_targets() -> None:
    """Any thread may collect them: the target's own, which cannot answer meanwhile, or a server's.

    Each device asks its target to end the association, and waits half a second for it.
    """
    with ScriptedTarget() as target:
        script = FaultScript([Fault(Event.PROPERTY_SET, Omit(), times=None)])
        devices = [open_device(target.uri(keepalive_ms=10_000 + n)) for n in range(16)]
        target.play(script)
        assert within(1.0, devices.clear) == (None, None)
        assert script.wait(16, timeout_s=WAIT_S)


def test_closing_does_not_wait(world: World, late: dict[str, int]) -> None:
    volume = dlfs.open(world.uris(late))
    dataset = volume["ds"]
    world.targets[0].play(hang())
    epoch = dataset.batches(8, seed=3)
    within(BOUND_S, lambda: next(epoch))  # some of its reads are still in flight
    assert within(0.0, lambda: (epoch.close(), dataset.close(), volume.close()))[1] is None


def test_closing_does_not_wait_for_a_connection(world: World) -> None:
    options = OPTIONS | {"connect_ms": 60_000}
    volume = dlfs.open(world.uris(options))
    dataset = volume["ds"]
    target = world.targets[0]
    before = target.counters.commands[Event.CONNECT_IO]
    target.play(hang_and_refuse())
    check(world, within(bound_s(options), lambda: dataset[7]), ORDERED[7])
    epoch = dataset.batches(8, seed=3)
    check(world, within(bound_s(options), lambda: len(next(epoch))), 8)
    wait_until(lambda: target.counters.commands[Event.CONNECT_IO] > before)
    assert within(0.0, lambda: (epoch.close(), dataset.close(), volume.close()))[1] is None


def test_mounting_from_c_ends(world: World) -> None:
    uris = world.uris(OPTIONS)
    world.targets[0].play(hang())

    def read() -> bytes:
        with c_reader.mounted(uris) as (c, volume), c_reader.opened(c, volume, b"ds") as dataset:
            return c_reader.read(c, dataset, 7)

    found, failure = within(deadlines.call_timeout_ms([]) / 1000, read)
    if world.copies > 1:
        assert (found, failure) == (ORDERED[7], None)
    else:
        assert isinstance(failure, c_reader.Failed), failure
        assert failure.code == abi.E_TIMEOUT
        assert f"127.0.0.1:{world.targets[0].port}" in str(failure)


def test_verification_ends(world: World) -> None:
    with dlfs.open(world.uris(OPTIONS)) as volume:
        world.targets[0].play(hang())
        # Superblocks, catalog, directory, attributes and data of each copy: one wait for all.
        findings, failure = within(2 * bound_s(OPTIONS), lambda: find_in_vain(volume))
        assert failure is not None or findings > 0


def test_a_hang_at_a_random_moment(world: World) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        world.recover()
        uris = world.uris(OPTIONS)
        with dlfs.open(uris) as volume, volume["ds"] as dataset:
            names = draw.choices(list(CALLS), k=6)
            delay_s = draw.random() * 0.05
            print(names, delay_s)
            timer = threading.Timer(delay_s, world.targets[0].play, [hang()])
            timer.start()
            for name in names:
                function, expected = CALLS[name]
                call = partial(function, uris, volume, dataset)
                found = within(bound_s(OPTIONS), call)
                if found[1] is not None or world.copies > 1:  # or it was before the hang
                    check(world, found, expected)
            timer.join()
