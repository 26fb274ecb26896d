"""The clients of tests/service/test_kill.py, which report events to its datagram socket."""

from __future__ import annotations

import os
import random
import socket
import zlib
from functools import partial

import dlfs
from dlfs.errors import LimitError, ServiceLostError

UNRELEASED_MAX = 4
"""Most unreleased batches of a reader."""
ABSENT_S = 10.0
"""Timeout of a reader for a service that is not running; shorter than the test's own timeout."""


def read_forever(address: str, uri: str, seed: int, checks: list[int]) -> None:
    """Read through a service without end; check every byte and report every loss once.

    If the service ends while no call is under way, the next call notices it. That call waits for
    another service and raises if none starts in time.
    """
    report = partial(_report, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), address)
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
                report(f"wrong: {error}")
            if reads:
                report("lost")
            reads = False
            continue
        except LimitError:
            unreleased.clear()
            continue
        while len(unreleased) > UNRELEASED_MAX:
            batch = unreleased.pop(draw.randrange(len(unreleased)))
            for index, view in zip(batch.indices.tolist(), batch, strict=True):
                if zlib.crc32(view) != checks[index]:
                    report(f"wrong: sample {index}")
        if not reads:
            report("reads")
        reads = True


def _report(reports: socket.socket, address: str, word: str) -> None:
    reports.sendto(f"{os.getpid()} {word}".encode(), address)
