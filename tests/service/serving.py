"""A node service as a process of its own, and volumes to serve."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs._native.library import library
from dlfs.base.units import KIB, MIB
from dlfs.service.control import ControlConnection
from dlfs.service.protocol import GetStatistics, Statistics
from tests.support.descriptors import open_names
from tests.support.files import flip_bit
from tests.support.processes import DlfsProcess

SECONDS_MAX = 100
"""Longest wait for a condition, in seconds; slow test machines need it."""


def make_samples(count: int = 600, seed: int = 1) -> dict[bytes, bytes]:
    """Return samples of all kinds of lengths, in path order."""
    draw = random.Random(seed)
    samples = {
        b"class%d/%05d" % (n % 5, n): draw.randbytes(draw.randrange(6000)) for n in range(count)
    }
    for length in (0, 1, 511, 512, 4096, 70_000, 150_000):
        samples[b"sizes/%06d" % length] = draw.randbytes(length)
    return dict(sorted(samples.items()))


def make_volume(
    path: Path, samples: dict[bytes, bytes], *, label: str = "", name: str = "d"
) -> str:
    """Make a volume of one file with one dataset; its URI."""
    with path.open("wb") as file:
        file.truncate(32 * MIB)
    dlfs.format_volume(str(path), label=label, chunk_bytes=64 * KIB)
    add_dataset(str(path), samples, name)
    return str(path)


def add_dataset(uri: str, samples: dict[bytes, bytes], name: str = "d") -> None:
    """Write one more dataset, or version, to a volume."""
    with dlfs.open(uri) as volume, volume.writer(name) as writer:
        for number, (path, data) in enumerate(samples.items()):
            attributes = {"number": number, "name": path.decode()[::-1]}
            writer.add(path, data, attributes=attributes)
        writer.add_directory("class1/empty/nested")


def damage(uri: str, *indices: int) -> None:
    """Flip a bit of samples on media."""
    with dlfs.open(uri) as volume, volume.dataset() as dataset:
        places = [dataset.stat(index) for index in indices]
    for place in places:
        flip_bit(place.member, place.offset_bytes)


class Hurry:
    """A clock that a pause moves beyond every timeout.

    A client waits for a running service as long as a slow machine needs, and fails at once if no
    service is running.

    Args:
        monkeypatch: puts it in place of ``dlfs.service.control``'s until the test ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._skipped_s = 0.0
        monkeypatch.setattr("dlfs.service.control.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    def sleep(self, _seconds: float) -> None:
        self._skipped_s += 10 * SECONDS_MAX


class Service:
    """``dlfs serve`` as a process of its own.

    Args:
        volumes: URIs.
        socket: path to listen on.
        options: of the command line.
        program: what a Python of its own runs as the command ``dlfs``; by default, a process that
            has imported it runs it.

    Attributes:
        uri: for ``dlfs.connect``.
        socket: as given.
        log: what it writes to stderr.
        process: it.
        pid: of it.
    """

    def __init__(
        self,
        volumes: list[str],
        socket: Path,
        *options: str,
        program: tuple[str, ...] = (),
    ) -> None:
        self.uri = f"unix:{socket}"
        self.socket = socket
        self.log = socket.with_suffix(".log")
        arguments = ["serve", *volumes, "--socket", str(socket), "--json", *options]
        self.process: subprocess.Popen[bytes] | DlfsProcess
        if not program:
            self.process = DlfsProcess(*arguments, log=self.log)
        else:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, *program, *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,  # select sees what a buffer would hide
                )
        self.pid = self.process.pid

    def wait_ready(self) -> Service:
        """Wait until clients can connect."""
        assert self.process.stdout is not None
        received = b""
        while not received.endswith(b"}\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], SECONDS_MAX)
            line = self.process.stdout.readline() if ready else b""
            assert line, f"the service did not start: {self.log.read_text()}"
            received += line
        assert json.loads(received)["uri"] == self.uri
        return self

    def stop(self) -> None:
        """End the service; check that it exits with 0, removes its socket and logs no traceback."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS_MAX) == 0, self.log.read_text()
        assert not self.socket.exists()
        assert "Traceback" not in self.log.read_text()

    def kill(self) -> None:
        """Kill the service, so that it cannot clean up."""
        self.process.kill()
        self.process.wait(SECONDS_MAX)

    def close(self) -> None:
        """Kill the service if it still runs, and close its pipe."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def connection(self) -> ControlConnection:
        """Open a connection to the service, as a client does."""
        return ControlConnection(str(self.socket))

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics of the service."""
        connection = self.connection()
        try:
            return connection.request(GetStatistics(), Statistics)[0].values
        finally:
            connection.close()

    def clients(self) -> list[dict[str, Any]]:
        """Return the statistics of its clients, except the connection of this call."""
        return self.snapshot()["clients"][:-1] if self.process.poll() is None else []


def memory_files(pid: int) -> list[str]:
    """Return the names of the memory files (memfd) of DLFS that a process has open."""
    return [name for name in open_names(pid) if name.startswith("/memfd:dlfs")]


def be_stranger(results: Connection, uri: str, groups: tuple[int, ...]) -> None:
    """Connect as another user; send the label of the volume, or the error."""
    library()  # while our files can be read
    os.setgroups(groups)
    os.setgid(54321)
    os.setuid(54321)
    try:
        results.send(dlfs.connect(uri, timeout_s=SECONDS_MAX).label)
    except dlfs.DeviceError as error:
        results.send(f"{error.errno} {error}")
