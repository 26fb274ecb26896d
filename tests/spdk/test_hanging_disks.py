"""A disk behind SPDK's target that never answers a read, through libdlfs's initiator.

SPDK's error device keeps the reads; connects, keep-alive, writes and admin commands go on. Each
call ends within the bound of ``dlfs.base.deadlines``, with one copy and with two.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dlfs
from dlfs.base import deadlines
from dlfs.base.units import KIB, MIB
from tests.fault.silent_world import (
    BOUND_S,
    CALLS,
    OPTIONS,
    ORDERED,
    SAMPLES,
    bound_s,
    check,
    wait_until,
    within,
)
from tests.spdk.target import Namespace, SpdkTarget

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(120)]

NQN = "nqn.2024-01.org.example:hanging"
ERROR_PREFIX = "EE_"
"""Beginning of the name of an error device, before that of the device below it."""


class SpdkWorld:
    """A target whose namespaces, error devices over RAM disks, hold the copies of a volume.

    Attributes:
        copies: number of copies.
        targets: the target of each copy.
    """

    def __init__(self, target: SpdkTarget, copies: int) -> None:
        self.copies = copies
        self.targets = [target] * copies
        self._target = target
        self._opened = 0
        namespaces = [Namespace(8 * MIB, fails=True)] * copies
        target.add(NQN, namespaces)
        uris = self.uris({})
        dlfs.format_volume(uris, chunk_bytes=64 * KIB, replicas=copies)
        with dlfs.open(uris) as volume, volume.writer("ds") as writer:
            for path, data in SAMPLES.items():
                writer.add(path, data, attributes={"length": len(data)})

    def uris(self, options: dict[str, int]) -> list[str]:
        """Return other URIs at each call: nothing is known of them yet."""
        self._opened += 1
        distinct = options | {"keepalive_ms": 10_000 - self._opened}
        return [self._target.tcp_uri(NQN, nsid, **distinct) for nsid in range(1, self.copies + 1)]

    def hang(self) -> None:
        """Have the first copy's disk keep all reads from now on."""
        self._target.call(
            "bdev_error_inject_error",
            name=f"{ERROR_PREFIX}{NQN}/1", io_type="read", error_type="pending", num=1 << 30,
        )  # fmt: skip

    def recover(self) -> None:
        """Have it answer again, also what it kept."""
        name = f"{ERROR_PREFIX}{NQN}/1"
        self._target.call(
            "bdev_error_inject_error", name=name, io_type="clear", error_type="failure"
        )
        self._target.call("bdev_error_resume_pending", name=name)


@pytest.fixture(scope="module", params=[1, 2])
def made(request: pytest.FixtureRequest) -> Iterator[SpdkWorld]:
    with SpdkTarget() as target:
        yield SpdkWorld(target, request.param)


@pytest.fixture
def world(made: SpdkWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpdkWorld]:
    monkeypatch.setattr(deadlines, "CALL_TIMEOUT_MS", int(BOUND_S * 1000))
    yield made
    made.recover()


@pytest.mark.parametrize("call", CALLS)
def test_each_call_ends_within_the_bound(world: SpdkWorld, call: str) -> None:
    uris = world.uris(OPTIONS)
    function, expected = CALLS[call]
    with dlfs.open(uris) as volume, volume["ds"] as dataset:
        world.hang()
        found = within(bound_s(OPTIONS), lambda: function(uris, volume, dataset))
        check(world, found, expected)  # type: ignore[arg-type]


def test_a_disk_that_answers_again_is_read_again(world: SpdkWorld) -> None:
    with dlfs.open(world.uris(OPTIONS)) as volume, volume["ds"] as dataset:
        world.hang()
        check(world, within(bound_s(OPTIONS), lambda: dataset[7]), ORDERED[7])  # type: ignore[arg-type]
        world.recover()

        def reads() -> bool:
            try:
                return bool(dataset[20] == ORDERED[20])
            except dlfs.DeviceTimeoutError:
                return False

        wait_until(reads)
