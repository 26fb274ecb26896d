"""Tests a training with PyTorch through a service that is killed in mid-epoch and resumed.

It resumes with the samples that were left, and the service releases the killed clients.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.ingest.importer import import_dataset, open_source
from examples.demo.digits import write_digits
from tests.service.serving import SECONDS_MAX, Service
from tests.support.stopping import stop_process
from tests.support.waiting import wait_for

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from examples.demo.trainer import load_checkpoint, train  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

EPOCHS = 2
COUNT = 1797
BATCH = 64


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("digits")
    volume = str(folder / "volume.img")
    write_digits(folder / "digits")
    dlfs.format_volume(volume, size_bytes=32 * MIB)
    with (
        dlfs.open(volume) as opened,
        contextlib.closing(open_source(str(folder / "digits"))) as source,
    ):
        import_dataset(opened, source, "digits", seed=1)
    return volume


@pytest.fixture(autouse=True)
def _no_trainer_is_left() -> Iterator[None]:
    yield
    for process in multiprocessing.active_children():
        process.kill()


class Trainer(NamedTuple):
    """A training in a process of its own, and what it says."""

    process: BaseProcess
    said: TextIO


def train_and_say(mouth: socket.socket, volume: str, folder: Path, workers: int) -> None:
    os.dup2(mouth.fileno(), 1)
    train(volume, folder, EPOCHS, workers)


def start(volume: str, folder: Path, workers: int) -> Trainer:
    folder.mkdir(exist_ok=True)
    ears, mouth = socket.socketpair()
    with ears, mouth:
        # The pipe holds a few lines; a trainer whose output is not read blocks.
        mouth.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        process = PROCESSES.Process(target=train_and_say, args=(mouth, volume, folder, workers))
        process.start()
        return Trainer(process, ears.makefile("r"))


def finish(trainer: Trainer) -> list[str]:
    lines = trainer.said.read().splitlines()
    trainer.said.close()
    trainer.process.join(SECONDS_MAX)
    assert trainer.process.exitcode == 0
    return lines


def kill_at(trainer: Trainer, line: str, service: Service) -> None:
    """SIGKILL the trainer once it has reported a step.

    See that its workers have read from the service, that they end by themselves, and that the
    service keeps nothing of them.
    """
    assert any(output.strip() == line for output in trainer.said)
    process = trainer.process
    stop_process(process.pid)  # so that the epoch does not end meanwhile
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = {int(child) for child in children}
    readers = {client["pid"] for client in service.clients() if client["channels"]}
    assert len(workers & readers) >= 2
    process.kill()
    process.join(SECONDS_MAX)
    trainer.said.close()
    wait_for(lambda: not any(map(is_running, workers)), "the workers end")
    wait_for(lambda: service.clients() == [], "the service to forget them")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie: the process has ended, but its parent has not reaped it.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_training_that_is_killed_and_resumed_is_an_uninterrupted_one(
    serve: Callable[..., Service], digits: str, tmp_path: Path
) -> None:
    service = serve(digits)
    whole = tmp_path / "whole"
    lines = finish(start(digits, whole, workers=2))
    assert float(lines[-1].removeprefix("accuracy ")) > 0.8

    parts = tmp_path / "parts"
    kill_at(start(service.uri, parts, workers=2), f"0 {10 * BATCH}", service)
    first = load_checkpoint(parts)
    assert 10 * BATCH <= first["loader"]["position"] < COUNT
    assert len(first["order"]) == first["loader"]["position"]
    kill_at(start(service.uri, parts, workers=3), f"1 {5 * BATCH}", service)
    assert finish(start(service.uri, parts, workers=1))[-1] == lines[-1]
    service.stop()

    expected, got = load_checkpoint(whole), load_checkpoint(parts)
    assert len(got["order"]) == EPOCHS * COUNT
    assert got["order"] == expected["order"]
    assert got["loader"] == expected["loader"]
    for name, weights in expected["model"].items():
        assert torch.equal(got["model"][name], weights), name
    with dlfs.open(digits) as volume, volume.dataset("digits") as dataset:
        order = [dataset.sequence(seed=7, epoch=epoch).indices() for epoch in range(EPOCHS)]
    assert got["order"] == [int(index) for indices in order for index in indices]


def test_the_demo_trains(digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.demo.__main__ import train_with_torch

    with dlfs.open(digits) as volume, volume.dataset("digits") as dataset:
        train_with_torch(dataset, Path(digits), tmp_path / "training")
    assert "in the order of an uninterrupted run" in capsys.readouterr().out
