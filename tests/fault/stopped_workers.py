"""Granted writers that are stopped at random moments and continue when others write in their place.

Each round stops a worker (SIGSTOP), waits until none of its writes may take effect any more,
overwrites its data, and continues it (SIGCONT). None of its blocks may land. What ends its writes
is either the deadline of its grant, or the reservation of an import, from which another host takes
its registration. ``DLFS_STOPPED_ROUNDS`` and ``DLFS_STOPPED_SEED`` are as for
tests/fault/stopped.py.
"""

from __future__ import annotations

import random
import select
import signal
import subprocess
import threading
import time

from dlfs.block import SharedNamespaceDevice, open_device
from tests.fault.stopped import FIRST_BYTE, LAST_BYTE, NEW, ROUNDS, SEED, Scene
from tests.support.scripts import hear, running, tell
from tests.support.stopping import stop_process
from tests.support.writers import format_times

# For each line "go", the worker asks for a grant ("more") again and again, and writes as long as
# its grants are extended ("yes"). With a clock that "stands still", like that of a stopped virtual
# machine, it never sees its deadline. After "no" it ends.
WORKER = """
import os, random, select, sys, threading
from dlfs.block import Kind, SharedNamespaceDevice, aligned_buffer, boot_clock, open_device
from dlfs.block.lease import LeaseTimes
from dlfs.errors import DeviceError

uri, times, first, last, clock, seed = sys.argv[1:]
SharedNamespaceDevice.lease_times = times = LeaseTimes(*map(float, times.split(",")))
valid_s = 600.0 if clock == "stands still" else times.valid_s
chance = random.Random(int(seed))
buffer = aligned_buffer(256 * 1024, 4096)
buffer[:] = 1

def say(line):
    os.write(1, line.encode() + b"\\n")

def listen(seconds):
    if not select.select([0], [], [], seconds)[0]:
        return None
    return sys.stdin.readline().strip()

def write(device, started, ended):
    while not ended.is_set():
        try:
            with device.queue_pair(8) as queue:
                while not ended.is_set():
                    size = chance.choice([4096, 65536, 262144])
                    offset = chance.randrange(int(first), int(last) - size, 4096)
                    if not queue.submit(Kind.WRITE, buffer[:size], offset, 0):
                        taken = queue.poll(-1)
                        if any(result < 0 for _, result in taken):
                            break
                        started.set()
        except DeviceError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        say("refused")
        ended.wait(0.01)

def work(device):
    device.begin_granted(0)
    writer, started, ended = None, threading.Event(), threading.Event()
    seen = device.incarnation()
    while True:
        incarnation, asked_at = device.incarnation(), boot_clock()
        say("more")
        while (answer := listen(times.renew_s)) is None:
            if device.incarnation() != seen:
                seen = device.incarnation()
                say("reconnected")
        if answer == "no":
            break
        device.extend_grant(asked_at + valid_s, incarnation=incarnation)
        if writer is None:
            writer = threading.Thread(target=write, args=(device, started, ended))
            writer.start()
            started.wait()
            say("writing")
        threading.Event().wait(times.renew_s)
    device.end_granted()
    ended.set()
    if writer is not None:
        writer.join()

while sys.stdin.readline():
    with open_device(uri, writable=True) as device:
        work(device)
    say("over")
"""


class _Confirming(threading.Thread):
    """A thread that confirms every grant that a worker asks for, until it is told to stop."""

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        super().__init__(name="confirming")
        self._worker = worker
        self._stopping = threading.Event()
        self.is_writing = threading.Event()
        self.heard: list[str] = []

    def run(self) -> None:
        assert self._worker.stdout is not None
        while not self._stopping.is_set():
            if not select.select([self._worker.stdout], [], [], 0.01)[0]:
                continue
            line = hear(self._worker)
            self.heard.append(line)
            if line == "more":
                tell(self._worker, "yes")
            else:
                self.is_writing.set()

    def stop(self) -> None:
        """Confirm nothing from now on."""
        self._stopping.set()
        self.join()


def _overwrite(scene: Scene, *, reserved: bool) -> None:
    """Take the import over as another coordinator, and use what the worker was granted."""
    with open_device(scene.successor_uri, writable=True) as device:
        device.lock_exclusive("its successor")
        fence = False
        if reserved:
            fence = device.admit_writers()
        else:
            device.unlock()
            time.sleep(scene.times.expiry_s)  # the protocol's own wait
            device.lock_exclusive("its successor")
        device.write(FIRST_BYTE, NEW * (LAST_BYTE - FIRST_BYTE))
        device.flush()
        if reserved:
            device.dismiss_writers(fence=fence)


def _play_round(
    scene: Scene,
    worker: subprocess.Popen[bytes],
    chance: random.Random,
    *,
    until: str,
    reserved: bool,
) -> None:
    """Stop the worker at a random moment, and check that it writes nothing after it continues.

    Args:
        scene: the target and both hosts.
        worker: the worker's process.
        chance: chooses the moment.
        until: what the worker says when its writes cannot get any further.
        reserved: as for ``play``.
    """
    if reserved:
        with open_device(scene.successor_uri, writable=True) as device:
            device.lock_exclusive("a coordinator")
            device.admit_writers()
    tell(worker, "go")
    confirming = _Confirming(worker)
    confirming.start()
    try:
        assert confirming.is_writing.wait(100)
        threading.Event().wait(chance.random() * 0.05)  # a random moment, not a condition
        stop_process(worker.pid)
    finally:
        confirming.stop()
    assert confirming.heard.count("writing") == 1, confirming.heard
    try:
        if scene.cut is not None and not reserved and chance.random() < 0.5:
            scene.cut(chance.random() < 0.5)
        _overwrite(scene, reserved=reserved)
    finally:
        worker.send_signal(signal.SIGCONT)
    while (line := hear(worker)) != until:
        assert line in ("more", "reconnected", "refused"), line
    assert scene.contents().strip(NEW) == b""
    tell(worker, "no")
    while hear(worker) != "over":
        pass
    assert scene.contents().strip(NEW) == b""


def play(scene: Scene, *, clock: str, host: str, reserved: bool = False) -> None:
    """Run all rounds of one kind.

    Args:
        scene: The target; its times are also those of ``SharedNamespaceDevice`` in this process.
        clock: "goes on" or "stands still": the clock by which the worker checks its grant.
        host: "same host" or "another host": that of the successor. Part of the seed.
        reserved: True if the import has a reservation, which then ends the worker's writes alone:
            the successor, which must be on another host, does not wait for the deadline.
    """
    assert SharedNamespaceDevice.lease_times == scene.times
    chance = random.Random(f"{SEED} {clock} {host} {reserved}")
    until = "reconnected" if clock == "stands still" and not reserved else "refused"
    arguments = [
        scene.writer_uri,
        format_times(scene.times),
        *map(str, (FIRST_BYTE, LAST_BYTE)),
        clock,
        str(SEED),
    ]
    with running(WORKER, *arguments) as worker:
        for played in range(ROUNDS):
            print(f"seed {SEED}, round {played}")
            _play_round(scene, worker, chance, until=until, reserved=reserved)
