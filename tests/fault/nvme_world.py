"""A scripted target with known contents, a device on it, and reads and writes that are checked."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from dlfs.base.units import KIB
from dlfs.block import BlockDevice, Kind, aligned_buffer, open_device, operation_error
from dlfs.errors import (
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
    NotFoundError,
)
from tests.spdk.target import spdk_uri
from tests.support.descriptors import own_threads
from tests.support.nvme import (
    DEFAULT_NQN,
    Fault,
    FaultScript,
    Namespace,
    ScriptedTarget,
    Settings,
    Subsystem,
    Transport,
)
from tests.support.waiting import wait_for

OPENING_S = 20
SIZE_BYTES = 512 * KIB
BLOCK = 4096
CONTENT = random.Random(20190923).randbytes(SIZE_BYTES)

# Options of a device that must recover, long enough for a slow machine.
PATIENT = {"timeout_ms": 10000, "connect_ms": 1000, "keepalive_ms": 10000, "reconnect_ms": 20000}
# The same for faults with a silent target, which cost one timeout.
ATTENTIVE = PATIENT | {"timeout_ms": 400}
# Options of a device whose target never recovers.
HASTY = {"timeout_ms": 100, "connect_ms": 100, "keepalive_ms": 5000, "reconnect_ms": 200}
DIGESTS = {"hdgst": 1, "ddgst": 1}
INITIATORS = ["nvme-tcp", pytest.param("spdk", marks=pytest.mark.spdk)]
"""Parameter values for tests that run with both initiators."""


def uri_through(initiator: str, target: ScriptedTarget, **options: object) -> str:
    """Return the URI of the first namespace through one of ``INITIATORS``."""
    if initiator == "spdk":
        return spdk_uri(target.port, target.subsystems[0].nqn, **options)
    return target.uri(**options)


def check_honest(initiator: str, target: ScriptedTarget) -> None:
    """Check that the host followed the specification."""
    if initiator == "nvme-tcp":  # SPDK reads properties that fabrics do not have
        assert target.violations == []


def make_target(
    script: FaultScript | None = None,
    *,
    settings: Settings | None = None,
    transport: Transport | None = None,
    block_bytes: int = 512,
) -> ScriptedTarget:
    """Make a target with one namespace that holds ``CONTENT``."""
    space = Namespace(SIZE_BYTES, block_bytes=block_bytes)
    space.contents[:] = CONTENT
    subsystem = Subsystem(DEFAULT_NQN, [space], settings=settings)
    return ScriptedTarget([subsystem], transport=transport, script=script)


@contextmanager
def device_of(target: ScriptedTarget, **options: object) -> Iterator[BlockDevice]:
    with _opened(target.uri(**options)) as device:
        yield device


def _opened(uri: str) -> BlockDevice:
    """Open a device; retry if a slow machine exceeds the short timeouts."""
    until = time.monotonic() + OPENING_S
    while True:
        try:
            return open_device(uri, writable=True)
        except DeviceTimeoutError:
            if time.monotonic() > until:
                raise


def check_typed(error: BaseException, target: ScriptedTarget) -> None:
    """Check that an error is a DlfsError that names the target."""
    assert isinstance(error, DeviceError | NotFoundError), repr(error)
    names = (f"127.0.0.1:{target.port}", f"traddr=127.0.0.1 trsvcid={target.port}")
    assert any(name in str(error) for name in names), str(error)


def transfer(
    device: BlockDevice, kind: Kind, blocks: Sequence[tuple[int, NDArray[np.uint8]]]
) -> dict[int, DlfsError]:
    """Run operations eight at a time; return the errors of failed operations by their number.

    A lost device makes no queue pair: then all operations fail with that error.
    """
    failed: dict[int, DlfsError] = {}
    done = 0
    try:
        queue = device.queue_pair(8)
    except DeviceLostError as error:
        return dict.fromkeys(range(len(blocks)), error)
    with queue:
        waiting = list(enumerate(blocks))
        while done < len(blocks):
            while waiting and queue.submit(kind, waiting[0][1][1], waiting[0][1][0], waiting[0][0]):
                waiting.pop(0)
            for tag, result in queue.poll(-1):
                done += 1
                if result < 0:
                    failed[tag] = operation_error(device.uri, kind, blocks[tag][0], BLOCK, result)
                else:
                    assert result == blocks[tag][1].nbytes
    return failed


def read_checked(device: BlockDevice, target: ScriptedTarget, count: int = 24) -> int:
    """Read blocks at random offsets; check contents and errors; return the count of failures."""
    chance = random.Random(count)
    offsets = [chance.randrange(SIZE_BYTES // BLOCK) * BLOCK for _ in range(count)]
    blocks = []
    for offset in offsets:
        buffer = aligned_buffer(BLOCK, BLOCK)
        buffer[:] = 0xEE
        blocks.append((offset, buffer))
    failed = transfer(device, Kind.READ, blocks)
    for number, (offset, buffer) in enumerate(blocks):
        if number in failed:
            check_typed(failed[number], target)
        else:
            assert buffer.tobytes() == CONTENT[offset : offset + BLOCK], f"wrong bytes at {offset}"
    return len(failed)


def write_checked(
    device: BlockDevice, target: ScriptedTarget, *, length_bytes: int = 16 * KIB, seed: int = 1
) -> int:
    """Write disjoint ranges; check that successes are on media; return the count of failures."""
    chance = random.Random(seed)
    blocks = []
    for offset in range(0, SIZE_BYTES // 2, length_bytes):
        buffer = aligned_buffer(length_bytes, BLOCK)
        buffer[:] = np.frombuffer(chance.randbytes(length_bytes), np.uint8)
        blocks.append((offset, buffer))
    failed = transfer(device, Kind.WRITE, blocks)
    media = target.namespace.contents
    for number, (offset, buffer) in enumerate(blocks):
        if number in failed:
            check_typed(failed[number], target)
        else:
            found = bytes(media[offset : offset + length_bytes])
            assert found == buffer.tobytes(), f"lost a write at {offset}"
    end = len(blocks) * length_bytes
    assert bytes(media[end:]) == CONTENT[end:], "wrote beyond the submitted ranges"
    return len(failed)


def script_of(*faults: Fault, seed: int = 0) -> FaultScript:
    """Make a script and print it, so that a failing test shows it."""
    script = FaultScript(faults, seed=seed)
    print(f"seed {seed}: {faults}")
    return script


def resources() -> tuple[int, int]:
    """Count the open file descriptors and threads of this process, including libdlfs's."""
    return len(os.listdir("/proc/self/fd")), len(own_threads())


def check_nothing_left(before: tuple[int, int]) -> None:
    """Wait until no more is open than ``resources`` counted before.

    Resources of an earlier test may have been closing at that time, so fewer is right too.
    """
    wait_for(lambda: not _grown(before), f"descriptors and threads as before: {before}")


def _grown(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(resources(), before, strict=True))
