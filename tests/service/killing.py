"""Processes for tests/service/test_kill.py, forked from this one, which has everything imported.

``python -m tests.service.killing ADDRESS`` reads a line of JSON for each process that is wanted:
its kind and its arguments. Each tells the datagram socket ADDRESS of itself: ``PID WORD``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import zlib

import dlfs
from dlfs.cli.commands import app
from dlfs.errors import LimitError, ServiceLostError
from dlfs.mount import server as serve
from dlfs.service import client
from dlfs.service import process as node

LOADED = client, node, serve
UNRELEASED_MAX = 4
"""Most unreleased batches of a reader."""
ABSENT_S = 10.0
"""Timeout of a reader for a service that is not running; shorter than the test's own timeout."""


class Reporter:
    """Reports events of this process to the test."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = address

    def report(self, word: str) -> None:
        self._socket.sendto(f"{os.getpid()} {word}".encode(), self._address)


def read_forever(reporter: Reporter, uri: str, seed: int, checks: list[int]) -> None:
    """Read through a service without end; check every byte and report every loss once.

    If the service ends while no call is under way, the next call notices it. That call waits for
    another service and raises if none starts in time.
    """
    draw = random.Random(seed)
    epoch, unreleased, reads = None, [], False
    dataset = dlfs.connect(uri, timeout_s=ABSENT_S)["d"]
    while True:
        try:
            epoch = epoch or dataset.batches(draw.randrange(5, 60), seed=draw.randrange(99))
            batch = next(epoch, None)
            if batch is None:
                epoch.close()
                epoch = None
                continue
            unreleased.append(batch)
            if draw.random() < 0.3:
                wanted = [draw.randrange(len(checks)) for _ in range(draw.randrange(50))]
                unreleased.append(dataset.read(wanted))
        except ServiceLostError as error:
            if uri not in str(error):
                reporter.report(f"wrong: {error}")
            if reads:
                reporter.report("lost")
            reads = False
            continue
        except LimitError:
            unreleased.clear()
            continue
        while len(unreleased) > UNRELEASED_MAX:
            batch = unreleased.pop(draw.randrange(len(unreleased)))
            for index, view in zip(batch.indices.tolist(), batch, strict=True):
                if zlib.crc32(view) != checks[index]:
                    reporter.report(f"wrong: sample {index}")
        if not reads:
            reporter.report("reads")
        reads = True


def serve_until_ended(reporter: Reporter, arguments: list[str], log: str) -> None:
    """Run ``dlfs serve`` in this process, with its output in a log file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.argv = ["dlfs", "serve", *arguments]
    original = node.systemd.notify

    def notify(state: str) -> None:
        original(state)
        if state.startswith("READY=1"):
            reporter.report("ready")

    node.systemd.notify = notify
    app()


def main() -> None:
    """Fork a process for each request on standard input."""
    address = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reporter = Reporter(address)
        kind = order.pop("kind")
        (read_forever if kind == "reader" else serve_until_ended)(reporter, **order)
        os._exit(0)


if __name__ == "__main__":
    main()
