"""Rounds of everything that clients do leave nothing behind in the service."""

from __future__ import annotations

import os
from operator import le
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import NotFoundError
from dlfs.service.client import attach, detach
from tests.service.serving import Service, add_dataset, make_samples, make_volume
from tests.support.descriptors import own_threads
from tests.support.scripts import hear, running
from tests.support.waiting import wait_for

SAMPLES = make_samples(60)
READER = """
import dlfs, sys
dataset = dlfs.connect(sys.argv[1], volume="first", timeout_s=100).dataset("d")
next(iter(dataset.batches(4)))
print("reading", flush=True)
sys.stdin.readline()
"""


def do_everything(service: Service, other: str) -> None:
    """Read, fork, kill a client, attach, write, detach, and ask for what is not there."""
    with dlfs.connect(service.uri, volume="first") as volume, volume.dataset("d") as dataset:
        assert sum(map(len, dataset.batches(16, seed=1))) == len(SAMPLES)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    with running(READER, service.uri) as process:
        assert hear(process) == "reading"
    attach(service.uri, other)
    add_dataset(other, SAMPLES, "new")
    with dlfs.connect(service.uri, volume="second") as volume, volume.dataset("new") as dataset:
        assert len(dataset[3])
    detach(service.uri, "second")
    with dlfs.open(other) as volume:
        volume.remove("new")
    with pytest.raises(NotFoundError):
        dlfs.connect(service.uri, volume="none")


def held(service: Service) -> list[int]:
    """Number of a service's descriptors, and of its threads."""
    return [len(os.listdir(f"/proc/{service.pid}/fd")), len(own_threads(service.pid))]


def test_rounds_of_everything_leave_nothing_behind(tmp_path: Path) -> None:
    first = make_volume(tmp_path / "first.img", SAMPLES, label="first")
    other = make_volume(tmp_path / "second.img", SAMPLES, label="second")
    service = Service([first], tmp_path / "socket").wait_ready()
    try:
        for _ in range(3):
            do_everything(service, other)
        wait_for(lambda: not service.clients(), "the ends of all clients")
        before = held(service)
        for _ in range(4):
            do_everything(service, other)
        wait_for(
            lambda: all(map(le, held(service), before)),
            f"descriptors and threads as before: {before}",
        )
        service.stop()
    finally:
        service.close()
