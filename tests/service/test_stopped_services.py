"""A service that is stopped (SIGSTOP): each call of a client ends, and goes on after SIGCONT."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import dlfs
from dlfs.base.deadlines import CALL_TIMEOUT_MS
from dlfs.errors import ServiceLostError
from dlfs.service import client
from tests.service.serving import Service, make_samples, make_volume
from tests.support.stopping import stop_process

SAMPLES = make_samples(1500)
ANSWER_S = 1.0
CONNECT_S = 3.0
BOUND_S = 20.0
"""Far below the times of users, and longer than a busy machine takes for an answer."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service without memory for the whole dataset, whose answers are awaited for a second."""
    monkeypatch.setattr(client, "ANSWER_GRACE_S", ANSWER_S - CALL_TIMEOUT_MS / 1000)
    uri = make_volume(tmp_path / "v.img", SAMPLES)
    with closing(Service([uri], tmp_path / "s", "--cache", "1MiB")) as made:
        yield made.wait_ready()
        os.kill(made.pid, signal.SIGCONT)
        made.stop()


def test_calls_end_while_a_service_is_stopped(service: Service) -> None:
    with (
        dlfs.connect(service.uri, timeout_s=CONNECT_S) as volume,
        volume.dataset("d") as dataset,
        dataset.batches(16, seed=1) as epoch,
    ):
        seen = [len(next(epoch))]
        dataset.read([1]).release()  # a channel is open
        stop_process(service.pid)
        calls = {
            "next": lambda: next(epoch),
            # Of all chunks, because a client reads what the service has in memory by itself.
            "read": lambda: dataset.read(range(0, len(dataset), 15)),
            "part": lambda: dataset.read_into(5, bytearray(9), offset_bytes=1),
        }
        for name, call in calls.items():
            began = time.monotonic()
            with pytest.raises(ServiceLostError):
                call()
            assert time.monotonic() - began < BOUND_S, name
        os.kill(service.pid, signal.SIGCONT)
        seen.extend(map(len, epoch))
        assert sum(seen) == len(SAMPLES)
        assert dataset.get("class1/00001") == SAMPLES[b"class1/00001"]


def test_an_answer_of_many_bytes_is_awaited_longer(service: Service) -> None:
    with dlfs.connect(service.uri, timeout_s=CONNECT_S) as volume, volume.dataset("d") as dataset:
        largest = [index for index in range(len(dataset)) if dataset.path(index) > b"sizes/06"]
        dataset.read([1]).release()
        stop_process(service.pid)
        began = time.monotonic()
        with pytest.raises(ServiceLostError):
            dataset.read(largest)
        assert time.monotonic() - began > ANSWER_S + 0.5  # 4 s for each MiB
