"""A service with a member that hangs: its other clients and volumes go on, and it ends in time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.service.client import get_statistics
from tests.fault.silent_world import (
    BOUND_S,
    OPTIONS,
    ORDERED,
    World,
    check,
    hang,
    make_world,
    wait_until,
    within,
)
from tests.service.serving import Service
from tests.support.nvme import Event

SHORT = (
    f"from dlfs.base import deadlines; deadlines.CALL_TIMEOUT_MS = {int(BOUND_S * 1000)}; "
    "import runpy; runpy.run_module('dlfs.cli', run_name='__main__', alter_sys=True)"
)
"""Program that runs ``dlfs`` with the bound of the tests."""

UNIT_LIMIT_S = 30.0
"""Time in which systemd expects the service to end: TimeoutStopSec of its unit."""


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with make_world(request.param) as made:
        yield made


@pytest.fixture
def service(world: World, volume: str, serve: Callable[..., Service], tmp_path: Path) -> Service:
    """A service of the volume that will hang, and of a sound one."""
    hanging = ",".join(world.uris(OPTIONS))
    return serve(hanging, volume, program=("-c", SHORT))


def connect(service: Service, world: World) -> dlfs.Volume:
    return dlfs.connect(service.uri, volume=str(world.uuid))


def test_other_clients_and_volumes_go_on(
    service: Service, world: World, samples: dict[bytes, bytes]
) -> None:
    before = connect(service, world)
    reader = before["ds"]
    world.targets[0].play(hang())
    asking = threading.Thread(target=lambda: within(BOUND_S, lambda: reader[3]))
    asking.start()  # meanwhile, the service waits for the member

    def read_other() -> bytes:
        with dlfs.connect(service.uri, volume="images") as other, other["d"] as dataset:
            return dataset[5]

    assert within(1.0, read_other) == (sorted(samples.items())[5][1], None)
    assert within(1.0, lambda: len(get_statistics(service.uri)["volumes"])) == (2, None)
    asking.join()
    check(world, within(BOUND_S, lambda: connect(service, world).label), "")
    check(world, within(BOUND_S, lambda: reader[7]), ORDERED[7])
    check(world, within(BOUND_S, lambda: next(reader.batches(4)).to_list()[:0]), [])
    check(world, within(BOUND_S, before.refresh), None)
    check(world, within(BOUND_S, lambda: before["ds"][9]), ORDERED[9])
    world.recover()
    wait_until(lambda: within(BOUND_S, lambda: connect(service, world).label) == ("", None))
    wait_until(lambda: within(BOUND_S, lambda: reader[11]) == (ORDERED[11], None))
    service.stop()


def test_a_service_ends_while_a_member_hangs(service: Service, world: World) -> None:
    client = connect(service, world)
    reader = client["ds"]
    world.targets[0].play(hang())
    calls: list[Callable[[], object]] = [client.refresh, lambda: reader[3], reader.paths] * 3
    failures: list[dlfs.DlfsError] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except dlfs.DlfsError as error:
            failures.append(error)

    def reads() -> int:
        return world.targets[0].counters.commands[Event.READ]

    before = reads()
    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    wait_until(lambda: reads() > before)
    service.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert service.process.wait(UNIT_LIMIT_S) == 0, service.log.read_text()
    assert time.monotonic() - began < UNIT_LIMIT_S
    for thread in threads:
        thread.join()
