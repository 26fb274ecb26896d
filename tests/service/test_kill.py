"""Tests a service and clients that are killed in every order: others continue, nothing leaks.

A round has a service and three clients that read without end and check every byte; some of them are
killed, in an order that the round's seed decides. Clients that survive the service must say so by a
ServiceLostError and go on with the next one. In the end, and whenever a service is alone with its
clients, there is what belongs to those and nothing else: channels, descriptors, threads, mounts,
memory. DLFS_KILL_ROUNDS asks for more rounds than usual.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.mount.mountpoint import find_mount, is_dead
from tests.service.killing import read_forever
from tests.service.serving import SECONDS_MAX, Service, make_samples, make_volume, memory_files
from tests.support.descriptors import own_threads
from tests.support.processes import PROCESSES
from tests.support.waiting import wait_for

ROUNDS = int(os.environ.get("DLFS_KILL_ROUNDS", "20"))
CLIENTS = 3


class Field:
    """A service with its volume, readers and mount, which the test kills and restarts."""

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        samples = make_samples(300)
        self.volume = make_volume(folder / "v.img", samples, label="v")
        self.checks = [zlib.crc32(data) for data in samples.values()]
        self.path = folder / "k.sock"
        self.options = ["--cache", "1MiB"]
        self.mountpoint = folder / "mnt" if mounted else None
        if self.mountpoint is not None:
            self.mountpoint.mkdir()
            self.options += ["--mount", str(self.mountpoint)]
        self.idle_threads = 0  # of a service without clients: its mount may use io_uring, or not
        self.clients: list[int] = []
        self.reports: list[tuple[int, str]] = []
        self.ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ears.bind(str(folder / "ears"))
        self.start_service()

    # ---- processes -------------------------------------------------------------------------------

    def start_service(self) -> None:
        self.service = Service([self.volume], self.path, *self.options).wait_ready()
        self.idle_threads = len(own_threads(self.service.pid))

    def start_client(self, seed: int) -> None:
        arguments = (self.ears.getsockname(), self.service.uri, seed, self.checks)
        PROCESSES.Process(target=read_forever, args=arguments, daemon=True).start()

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Kill a process, and wait until it is gone."""
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            ready, _, _ = select.select([descriptor], [], [], SECONDS_MAX)
        finally:
            os.close(descriptor)
        assert ready, f"process {pid} did not end"
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), f"process {pid} to be reaped")

    def hear(self, word: str, pid: int | None = None) -> int:
        """Wait until a process says a word; which one it was."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            for position, (who, said) in enumerate(self.reports):
                assert not said.startswith("wrong"), said
                if said == word and pid in (None, who):
                    del self.reports[position]
                    return who
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.ears], [], [], max(0.0, left))
            assert ready, (
                f"waited {SECONDS_MAX} s for {word!r}; log: {self.service.log.read_text()[-2000:]}"
            )
            who_said, _, said = self.ears.recv(1000).decode().partition(" ")
            self.reports.append((int(who_said), said))

    def forget(self, pid: int) -> None:
        """Drop the reports of a process."""
        self.reports = [(who, said) for who, said in self.reports if who != pid]

    # ---- rounds ----------------------------------------------------------------------------------

    def round(self, seed: int) -> None:
        draw = random.Random(seed)
        while len(self.clients) < CLIENTS:
            self.start_client(draw.randrange(1 << 30))
            self.clients.append(self.hear("reads"))
        victims = [self.service.pid, *self.clients]
        draw.shuffle(victims)
        del victims[draw.randrange(1, len(victims) + 1) :]
        for victim in victims:
            self.kill(victim)
            self.forget(victim)
        self.clients = [pid for pid in self.clients if pid not in victims]
        if self.service.pid in victims:
            for pid in self.clients:
                self.hear("lost", pid)
                self.forget(pid)
            self.service.close()
            self.start_service()
            for pid in self.clients:
                self.hear("reads", pid)
        wait_for(self.is_tidy, f"round {seed} to leave nothing: {self.what_there_is()}")

    def what_there_is(self) -> tuple[list[dict[str, Any]], list[str], int]:
        pid = self.service.pid
        return self.service.clients(), memory_files(pid), len(own_threads(pid))

    def is_tidy(self) -> bool:
        """Return True if the service has only its living clients, with one or two channels each."""
        clients, files, threads = self.what_there_is()
        channels = sum(client["channels"] for client in clients)
        return (
            sorted(client["pid"] for client in clients) == sorted(self.clients)
            and len(files) <= 2 + 1 + channels
            and threads <= self.idle_threads + 3 * channels + 40
        )

    def close(self) -> None:
        for pid in self.clients:
            with contextlib.suppress(ProcessLookupError):
                self.kill(pid)
        self.service.close()
        self.ears.close()


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    mounted = os.access("/dev/fuse", os.R_OK | os.W_OK)
    made = Field(tmp_path, mounted=mounted)
    yield made
    made.close()
    if made.mountpoint is not None and find_mount(made.mountpoint) is not None:
        subprocess.run(["fusermount3", "-uz", str(made.mountpoint)], check=True)


def shared_memory(volume: str) -> list[str]:
    """Return the names of files that a volume has in /dev/shm, where other tests have theirs."""
    with dlfs.open(volume) as opened:
        (dataset,) = opened.datasets()
    root = Path("/dev/shm") / f"dlfs-{os.geteuid()}"
    return [path.name for path in root.glob(f"*{dataset.uuid.hex}*")]


@pytest.mark.slow
def test_killed_in_every_order(field: Field) -> None:
    for seed in range(ROUNDS):
        field.round(seed)
    for pid in field.clients:
        with open(f"/proc/{pid}/maps") as maps:  # what dead services had is unmapped
            assert sum("memfd:dlfs" in line for line in maps) <= 2 * 8
        field.kill(pid)
    field.clients.clear()
    if field.mountpoint is not None:
        assert not is_dead(field.mountpoint)
    field.service.stop()
    assert field.mountpoint is None or find_mount(field.mountpoint) is None
    assert shared_memory(field.volume) == []
