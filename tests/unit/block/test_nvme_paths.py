"""Devices over NVMe/TCP with several paths whose ANA states differ and change."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import UUID

import pytest

from dlfs.base.units import MIB
from dlfs.block import Kind, NvmeTcpDevice, aligned_buffer, open_device
from dlfs.errors import DeviceError, DeviceLostError
from tests.support.nvme import (
    DEFAULT_NQN,
    AnaState,
    Event,
    Fault,
    FaultScript,
    Namespace,
    ScriptedTarget,
    Settings,
    Subsystem,
)
from tests.support.nvme.faults import Omit
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
PAGES = 2 * MIB // PAGE
TIMEOUT_S = 20
DATA = random.Random(3).randbytes(2 * MIB)
ANA = Settings(ana=True)
UNUSABLE = [AnaState.INACCESSIBLE, AnaState.PERSISTENT_LOSS, AnaState.CHANGE]


@contextmanager
def two_paths(
    first: AnaState = AnaState.OPTIMIZED, second: AnaState = AnaState.OPTIMIZED
) -> Iterator[list[ScriptedTarget]]:
    """Start two targets that serve one subsystem with known contents."""
    space = Namespace(2 * MIB)
    space.contents[:] = DATA
    subsystem = Subsystem(DEFAULT_NQN, [space], settings=ANA)
    with ExitStack() as stack:
        targets = [stack.enter_context(ScriptedTarget([subsystem])) for _ in range(2)]
        for target, state in zip(targets, (first, second), strict=True):
            target.set_ana_state(state)
        yield targets
        for target in targets:
            assert target.violations == []


def opened(
    targets: list[ScriptedTarget], *, writable: bool = False, **options: object
) -> NvmeTcpDevice:
    others = "".join(f"&path=127.0.0.1:{target.port}" for target in targets[1:])
    device = open_device(targets[0].uri(**options) + others, writable=writable)
    assert isinstance(device, NvmeTcpDevice)
    return device


class Readers:
    """Threads that read pages at random through their own queue pairs and compare them."""

    def __init__(self, device: NvmeTcpDevice, count: int = 2) -> None:
        self.reads = 0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(device, seed)) for seed in range(count)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _run(self, device: NvmeTcpDevice, seed: int) -> None:
        chance = random.Random(seed)
        buffers = [aligned_buffer(PAGE, PAGE) for _ in range(8)]
        pages = [0] * len(buffers)
        waiting = set[int]()
        with device.queue_pair(len(buffers)) as queue:
            while waiting or not self._stop.is_set():
                for tag in range(len(buffers)):
                    if tag not in waiting and not self._stop.is_set():
                        pages[tag] = chance.randrange(PAGES)
                        assert queue.submit(Kind.READ, buffers[tag], pages[tag] * PAGE, tag)
                        waiting.add(tag)
                for tag, result in queue.poll(1000):
                    start = pages[tag] * PAGE
                    if tag not in waiting:
                        self.errors.append(f"read {tag} ended twice")
                    if result != PAGE or buffers[tag].tobytes() != DATA[start : start + PAGE]:
                        self.errors.append(f"page {pages[tag]}: {result}")
                    waiting.discard(tag)
                    self.reads += 1


@pytest.mark.parametrize("state", [AnaState.NON_OPTIMIZED, *UNUSABLE])
def test_an_optimized_path_is_preferred(state: AnaState) -> None:
    with two_paths(state, AnaState.OPTIMIZED) as targets, opened(targets) as device:
        status = device.status()
        assert (status.path, status.ana_state, status.ana_group) == (1, "optimized", 1)
        assert device.read(0, PAGE) == DATA[:PAGE]
        assert status.reconnects == status.path_moves == 0


@pytest.mark.parametrize("state", UNUSABLE)
def test_a_non_optimized_path_is_better_than_none(state: AnaState) -> None:
    with two_paths(AnaState.NON_OPTIMIZED, state) as targets, opened(targets) as device:
        assert (device.status().path, device.status().ana_state) == (0, "non-optimized")
        assert device.read(0, PAGE) == DATA[:PAGE]


def test_an_open_without_a_usable_path_names_the_states() -> None:
    with two_paths(AnaState.INACCESSIBLE, AnaState.PERSISTENT_LOSS) as targets:
        with pytest.raises(DeviceLostError) as caught:
            opened(targets)
        for target, word in zip(targets, ("inaccessible", "persistent loss"), strict=True):
            assert f"{target.port}: the namespace's ANA state is {word} (group 1)" in str(
                caught.value
            )


@pytest.mark.parametrize("state", UNUSABLE)
@pytest.mark.parametrize("notify", [True, False])
def test_reads_move_to_the_other_path(state: AnaState, notify: bool) -> None:
    """The device learns of the state by an event or by the status of a read."""
    with two_paths() as targets, opened(targets) as device, Readers(device) as readers:
        targets[0].set_ana_state(state, notify=notify)
        status = until(device, lambda status: status.connected and status.path == 1)
        before = readers.reads
        until(device, lambda _: readers.reads > before + 50)
        assert status.path_moves == 1
        assert status.ana_events <= notify  # a read may be quicker than the event


def test_the_states_are_toggled_under_load() -> None:
    with two_paths() as targets, opened(targets) as device, Readers(device) as readers:
        for count in range(20):
            here, there = targets[count % 2], targets[1 - count % 2]
            there.set_ana_state(AnaState.OPTIMIZED)
            here.set_ana_state(random.Random(count).choice(UNUSABLE))
            path = 1 - count % 2
            until(device, lambda status, path=path: status.connected and status.path == path)
            before = readers.reads
            until(device, lambda _, before=before: readers.reads > before + 10)
        assert device.status().path_moves == 20
        assert device.status().timeouts == device.status().protocol_errors == 0


def test_the_device_moves_back_to_an_optimized_path() -> None:
    with (
        two_paths(AnaState.INACCESSIBLE, AnaState.NON_OPTIMIZED) as targets,
        opened(targets, writable=True) as device,
        Readers(device),
    ):
        assert device.status().path == 1
        device.write(0, DATA[:PAGE])
        targets[0].set_ana_state(AnaState.OPTIMIZED)
        # It does not move now: a flush would fail after a move, as the cache is volatile. Nothing
        # reports that the device looked at the path, so the test waits for longer than it takes.
        time.sleep(1.5)
        assert device.status().path == 1
        device.flush()
        status = until(device, lambda status: status.connected and status.path == 0)
        assert status.path_moves == 1
        device.write(0, DATA[:PAGE])
        device.flush()


def test_a_path_that_turns_non_optimized_is_left_for_an_optimized_one() -> None:
    with two_paths() as targets, opened(targets) as device, Readers(device):
        targets[0].set_ana_state(AnaState.NON_OPTIMIZED)
        until(device, lambda status: status.connected and status.path == 1)
        assert device.status().timeouts == 0


def test_writes_that_were_not_executed_are_sent_again_at_once() -> None:
    """A write with an ANA status needs no quiesce time, although that is unknown here."""
    with two_paths() as targets:
        for target in targets:
            target.subsystems[0].settings = Settings(ana=True, quiesce_ms=0)
        with opened(targets, writable=True, keepalive_ms=0) as device:
            for count in range(6):
                targets[1 - count % 2].set_ana_state(AnaState.OPTIMIZED)
                targets[count % 2].set_ana_state(AnaState.INACCESSIBLE, notify=False)
                device.write(0, bytes([count]) * PAGE)
                assert device.read(0, PAGE) == bytes([count]) * PAGE
            assert device.status().path_moves == 6


def test_a_write_without_an_answer_is_not_sent_again_too_early() -> None:
    with two_paths() as targets:
        for target in targets:
            target.subsystems[0].settings = Settings(ana=True, quiesce_ms=0)
        targets[0].play(FaultScript([Fault(Event.WRITE, Omit())]))
        with (
            opened(targets, writable=True, keepalive_ms=0) as device,
            device.queue_pair(1) as queue,
        ):
            assert queue.submit(Kind.WRITE, aligned_buffer(PAGE, PAGE), 0, 7)
            targets[0].set_ana_state(AnaState.INACCESSIBLE)
            ((_, result),) = queue.poll(TIMEOUT_S * 1000)
            assert result < 0
            assert targets[1].counters.commands[Event.WRITE] == 0


def test_a_device_waits_while_no_path_is_usable() -> None:
    with (
        two_paths(AnaState.OPTIMIZED, AnaState.INACCESSIBLE) as targets,
        opened(targets) as device,
        Readers(device) as readers,
    ):
        targets[0].set_ana_state(AnaState.INACCESSIBLE)
        until(device, lambda status: not status.connected)
        before = readers.reads
        targets[1].set_ana_state(AnaState.OPTIMIZED)
        until(device, lambda status: status.connected and status.path == 1)
        until(device, lambda _: readers.reads > before + 10)


def test_a_device_without_a_usable_path_is_lost_with_the_states_in_the_error() -> None:
    with (
        two_paths(second=AnaState.CHANGE) as targets,
        opened(targets, timeout_ms=500, reconnect_ms=500) as device,
    ):
        targets[0].set_ana_state(AnaState.PERSISTENT_LOSS)
        with pytest.raises(DeviceLostError, match=r"ANA state is change.*; .*persistent loss"):
            device.read(0, PAGE)


def test_a_change_between_states_is_not_waited_for_beyond_its_limit() -> None:
    with two_paths() as targets:
        for target in targets:
            target.subsystems[0].settings = Settings(ana=True, transition_s=1)
        with opened(targets, timeout_ms=20000, reconnect_ms=60000) as device:
            for target in targets:
                target.set_ana_state(AnaState.CHANGE)
            began = time.monotonic()
            with pytest.raises(DeviceLostError, match="ANA state is change"):
                device.read(0, PAGE)
            assert time.monotonic() - began < 15  # not reconnect_ms


def test_another_namespace_on_an_optimized_path_is_refused() -> None:
    spaces = [Namespace(2 * MIB, identity=UUID(int=number)) for number in (1, 2)]
    subsystems = [Subsystem(DEFAULT_NQN, [space], settings=ANA) for space in spaces]
    with ScriptedTarget([subsystems[0]]) as first, ScriptedTarget([subsystems[1]]) as second:
        first.set_ana_state(AnaState.NON_OPTIMIZED)
        with opened([first, second]) as device:
            assert device.status().path == 0
            first.set_ana_state(AnaState.INACCESSIBLE)
            until(device, lambda status: "is another one now" in status.last_error)
            first.set_ana_state(AnaState.OPTIMIZED)
            until(device, lambda status: status.connected)
            assert device.status().path == 0


def test_one_path_is_waited_for() -> None:
    with two_paths() as targets, opened(targets[:1]) as device, Readers(device):
        for state in UNUSABLE:
            targets[0].set_ana_state(state)
            until(device, lambda status: not status.connected)
            targets[0].set_ana_state(AnaState.OPTIMIZED)
            until(device, lambda status: status.connected)


def test_a_target_that_always_answers_inaccessible_does_not_keep_reads_for_ever() -> None:
    """Its log says optimized, so that the path is not left: the attempts of a read are bounded."""
    script = FaultScript([])
    with two_paths() as targets, opened(targets[:1]) as device:
        targets[0].play(script)
        targets[0].server.ana_states[1] = AnaState.INACCESSIBLE
        log = Settings(ana=False)
        targets[0].subsystems[0].settings = log  # the log is refused: the state is unknown
        with pytest.raises(DeviceError) as caught:
            device.read(0, PAGE)
        assert caught.value.errno == errno.ENODEV


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_path_that_may_return_outweighs_one_that_refuses(refused_first: bool) -> None:
    """A gateway that gives its listeners up refuses hosts while the other one restarts."""
    hosts = ["nqn.2024-01.org.example:other"]
    refusal = Subsystem(DEFAULT_NQN, [Namespace(MIB)], hosts=hosts)
    with ScriptedTarget([refusal]) as refusing, ScriptedTarget() as away:
        away.kill()
        targets = [refusing, away] if refused_first else [away, refusing]
        with pytest.raises(DeviceLostError, match="status 0x184") as caught:
            opened(targets)
        assert caught.value.retryable
        with pytest.raises(DeviceError) as final:
            opened([refusing])
        assert not final.value.retryable
