"""Writers that are stopped at random moments, and go on when another has written and gone.

Each round stops one writer (SIGSTOP), waits until its successor has taken the lease over, written
and given the lease back, and lets the first go on (SIGCONT). Not one of its blocks may land.
``DLFS_STOPPED_ROUNDS`` sets the number of rounds of each kind, ``DLFS_STOPPED_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.lease import LeaseTimes
from dlfs.testing.nvme import Namespace, ScriptedTarget, Subsystem
from dlfs.units import MIB

ROUNDS = int(os.environ.get("DLFS_STOPPED_ROUNDS", "1"))
SEED = int(os.environ.get("DLFS_STOPPED_SEED", "20190923"))

TIMES = LeaseTimes(renew_s=0.05, valid_s=0.4, late_s=0.6, claim_s=0.2, poll_s=0.01)
OPTIONS = {"timeout_ms": 400, "reconnect_ms": 200, "keepalive_ms": 250}
HERE, THERE = uuid.UUID(int=0x1111), uuid.UUID(int=0x2222)
FIRST_BYTE, LAST_BYTE = MIB, 2 * MIB
OLD, NEW = b"\1", b"\2"

# On each line of its input, the writer takes the lease and writes until that is refused. With a
# clock that "stands still", as that of a stopped virtual machine, it knows of no deadline.
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


@contextmanager
def writer(target: ScriptedTarget, clock: str) -> Iterator[subprocess.Popen[str]]:
    numbers = (TIMES.renew_s, TIMES.valid_s, TIMES.late_s, TIMES.claim_s, TIMES.poll_s)
    arguments = [
        target.uri(hostid=HERE, **OPTIONS),
        ",".join(map(str, numbers)),
        *map(str, (FIRST_BYTE, LAST_BYTE)),
        clock,
        str(SEED),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def take_over(target: ScriptedTarget, host: uuid.UUID) -> None:
    """Wait the stopped writer out, write over all that it wrote, and give the lease back."""
    uri = target.uri(hostid=host, **OPTIONS)
    with open_device(uri, writable=True) as device:
        device.lock_exclusive("its successor")
        device.write(FIRST_BYTE, NEW * (LAST_BYTE - FIRST_BYTE))
        device.flush()


def play_round(
    target: ScriptedTarget, process: subprocess.Popen[str], chance: random.Random, host: uuid.UUID
) -> None:
    """Stop the writer at a random moment of its life, and look what it leaves."""
    assert process.stdout is not None
    if ask(process) != "writing":
        return  # the machine was too slow for its lease
    threading.Event().wait(chance.random() * 0.05)  # the moment, not a condition
    process.send_signal(signal.SIGSTOP)
    try:
        if chance.random() < 0.5:
            target.drop_connections(reset=chance.random() < 0.5)
        take_over(target, host)
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "over\n"
    assert bytes(target.namespace.contents[FIRST_BYTE:LAST_BYTE]).strip(NEW) == b""


@pytest.mark.parametrize("clock", ["goes on", "stands still"])
@pytest.mark.parametrize("host", [HERE, THERE], ids=["same host", "another host"])
def test_a_stopped_writer_writes_nothing_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, clock: str, host: uuid.UUID
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", TIMES)
    chance = random.Random(f"{SEED} {clock} {host}")
    subsystem = Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(2 * MIB)])
    with ScriptedTarget([subsystem]) as target, writer(target, clock) as process:
        for number in range(ROUNDS):
            print(f"seed {SEED}, round {number}")
            play_round(target, process, chance, host)
