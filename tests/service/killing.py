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
KEPT = 4
"""Batches that a reader holds while it goes on."""
ABSENT_S = 10.0
"""How long a reader waits for a service that is not there: less than the test waits for it."""


class Teller:
    """Tells what happens in this process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = address

    def say(self, word: str) -> None:
        self._socket.sendto(f"{os.getpid()} {word}".encode(), self._address)


def read_forever(teller: Teller, uri: str, seed: int, checks: list[int]) -> None:
    """Read through a service without end; every byte is checked, every loss told once.

    A service that ends while no call is under way is missed by the next one only, which waits for
    another service, and raises when there is none in time.
    """
    draw = random.Random(seed)
    epoch, kept, reads = None, [], False
    dataset = dlfs.connect(uri, timeout_s=ABSENT_S)["d"]
    while True:
        try:
            epoch = epoch or dataset.batches(draw.randrange(5, 60), seed=draw.randrange(99))
            batch = next(epoch, None)
            if batch is None:
                epoch.close()
                epoch = None
                continue
            kept.append(batch)
            if draw.random() < 0.3:
                wanted = [draw.randrange(len(checks)) for _ in range(draw.randrange(50))]
                kept.append(dataset.read(wanted))
        except ServiceLostError as error:
            if uri not in str(error):
                teller.say(f"wrong: {error}")
            if reads:
                teller.say("lost")
            reads = False
            continue
        except LimitError:
            kept.clear()
            continue
        while len(kept) > KEPT:
            batch = kept.pop(draw.randrange(len(kept)))
            for index, view in zip(batch.indices.tolist(), batch, strict=True):
                if zlib.crc32(view) != checks[index]:
                    teller.say(f"wrong: sample {index}")
        if not reads:
            teller.say("reads")
        reads = True


def serve_until_ended(teller: Teller, arguments: list[str], log: str) -> None:
    """Be ``dlfs serve``; its words on standard output are for nobody."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.argv = ["dlfs", "serve", *arguments]
    original = node.systemd.notify

    def notify(state: str) -> None:
        original(state)
        if state.startswith("READY=1"):
            teller.say("ready")

    node.systemd.notify = notify
    app()


def main() -> None:
    """Fork what is asked for."""
    address = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        teller = Teller(address)
        kind = order.pop("kind")
        (read_forever if kind == "reader" else serve_until_ended)(teller, **order)
        os._exit(0)


if __name__ == "__main__":
    main()
