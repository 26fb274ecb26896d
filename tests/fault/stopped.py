"""Writers that are stopped at random moments and continue after their successor has finished.

Each round stops one writer (SIGSTOP), waits until its successor has taken over the lease, written
and released the lease, and continues the first writer (SIGCONT). None of its blocks may land.
``DLFS_STOPPED_ROUNDS`` sets the number of rounds of each kind, ``DLFS_STOPPED_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from dlfs.base.units import MIB
from dlfs.block import open_device
from dlfs.block.lease import LeaseTimes
from tests.support.scripts import hear, running, tell
from tests.support.stopping import stop_process
from tests.support.writers import format_times

ROUNDS = int(os.environ.get("DLFS_STOPPED_ROUNDS", "1"))
SEED = int(os.environ.get("DLFS_STOPPED_SEED", "20190923"))

HERE, THERE = uuid.UUID(int=0x1111), uuid.UUID(int=0x2222)
FIRST_BYTE, LAST_BYTE = MIB, 2 * MIB
OLD, NEW = b"\1", b"\2"

# The writer takes the lease for each line of input and writes until a write is refused. With a
# clock that "stands still", like that of a stopped virtual machine, it never sees its deadline.
WRITER = """
import random, sys
from dlfs.block import Kind, SharedNamespaceDevice, aligned_buffer, open_device
from dlfs.block.lease import LeaseTimes
from dlfs.errors import DeviceError

uri, times, first, last, clock, seed = sys.argv[1:]
numbers = [float(number) for number in times.split(",")]

class Times(LeaseTimes):
    expiry_s = LeaseTimes(*numbers).expiry_s

if clock == "stands still":
    numbers[1] = 600.0
SharedNamespaceDevice.lease_times = Times(*numbers)
chance = random.Random(int(seed))
buffer = aligned_buffer(256 * 1024, 4096)
buffer[:] = 1
for _ in sys.stdin:
    try:
        with open_device(uri, writable=True) as device:
            device.lock_exclusive("a writer that is stopped")
            print("writing", flush=True)
            with device.queue_pair(8) as queue:
                while True:
                    size = chance.choice([4096, 65536, 262144])
                    offset = chance.randrange(int(first), int(last) - size, 4096)
                    if not queue.submit(Kind.WRITE, buffer[:size], offset, 0):
                        if any(result < 0 for _, result in queue.poll(-1)):
                            break
    except DeviceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    print("over", flush=True)
"""


@dataclass(frozen=True)
class Scene:
    """One target, and the URIs of both writers.

    Attributes:
        times: Times of both leases.
        writer_uri: URI of the writer that is stopped.
        successor_uri: URI of the writer that takes over.
        contents: Returns the bytes from ``FIRST_BYTE`` to ``LAST_BYTE``.
        cut: Ends all connections, by a reset where its argument is true. It is called in some of
            the rounds; None where only the target does so itself.
    """

    times: LeaseTimes
    writer_uri: str
    successor_uri: str
    contents: Callable[[], bytes]
    cut: Callable[[bool], None] | None = None


def _writer(scene: Scene, clock: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    arguments = [
        scene.writer_uri,
        format_times(scene.times),
        *map(str, (FIRST_BYTE, LAST_BYTE)),
        clock,
        str(SEED),
    ]
    return running(WRITER, *arguments)


def _ask(process: subprocess.Popen[bytes]) -> str:
    tell(process)
    return hear(process)


def _take_over(scene: Scene) -> None:
    """Wait until the stopped writer's lease expires, overwrite its data, and release the lease."""
    with open_device(scene.successor_uri, writable=True) as device:
        device.lock_exclusive("its successor")
        device.write(FIRST_BYTE, NEW * (LAST_BYTE - FIRST_BYTE))
        device.flush()


def _play_round(scene: Scene, process: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Stop the writer at a random moment, and check that it writes nothing after it continues.

    Returns:
        False if the writer got no lease, since the machine was too slow.
    """
    answer = _ask(process)
    if answer == "over":
        return False
    assert answer == "writing"
    threading.Event().wait(chance.random() * 0.05)  # a random moment, not a condition
    stop_process(process.pid)
    try:
        if scene.cut is not None and chance.random() < 0.5:
            scene.cut(chance.random() < 0.5)
        _take_over(scene)
    finally:
        process.send_signal(signal.SIGCONT)
    assert hear(process) == "over"
    assert scene.contents().strip(NEW) == b""
    return True


def play(scene: Scene, *, clock: str, host: str) -> None:
    """Run all rounds of one kind.

    Args:
        scene: The target; its times are also those of ``SharedNamespaceDevice`` in this process.
        clock: "goes on" or "stands still": the clock that the stopped writer checks its lease by.
        host: "same host" or "another host": that of the successor. Part of the seed.
    """
    chance = random.Random(f"{SEED} {clock} {host}")
    played = 0
    with _writer(scene, clock) as process:
        while played < ROUNDS:  # pytest-timeout ends it
            print(f"seed {SEED}, round {played}")
            played += _play_round(scene, process, chance)
