"""Imports by workers that are killed, stopped and continued, and whose coordinator is killed.

``DLFS_IMPORT_STOPS`` is the number of rounds in which a worker is stopped (2 by default),
``DLFS_IMPORT_KILLS`` that of kills in one import: at most, of workers (6) and coordinators (1).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.ingest.workers import by_workers
from tests.support.equal_imports import (
    STEP_BYTES,
    contents,
    import_folder,
    make_folder,
    make_volume,
)
from tests.support.waiting import wait_for

STOPS = int(os.environ.get("DLFS_IMPORT_STOPS", "2"))
KILLS = os.environ.get("DLFS_IMPORT_KILLS")
SPAWN = get_context("spawn")
SHORT_STEP = STEP_BYTES // 2


def children(pid: int) -> list[int]:
    """Return the worker processes of a process."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                command = Path(entry.path, "cmdline").read_bytes()
                if int(stat[1]) == pid and b"dlfs.ingest.workers.process" in command:
                    found.append(int(entry.name))
    return found


@contextmanager
def repeating(act: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Do something again and again while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(pause_s):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    plain = make_volume(tmp_path_factory.mktemp("plain") / "plain.img")
    import_folder(plain, folder, step_bytes=SHORT_STEP)
    return contents(plain)


@pytest.fixture
def volume(tmp_path: Path, expected: tuple[Any, ...]) -> Iterator[str]:
    """An empty volume; in the end it is as that of an import without workers."""
    made = make_volume(tmp_path / "workers.img")
    yield made
    assert contents(made) == expected
    assert not children(os.getpid())


def test_a_worker_is_killed_every_second(folder: Path, volume: str) -> None:
    most = int(KILLS or 6)
    kills = 0

    def kill() -> None:
        nonlocal kills
        found = children(os.getpid())
        if found and kills < most:
            kills += 1
            with suppress(ProcessLookupError):
                os.kill(random.choice(found), signal.SIGKILL)

    with repeating(kill, 1.0):
        import_folder(volume, folder, 2, step_bytes=SHORT_STEP)
    print(f"{kills} workers were killed")


@pytest.mark.parametrize("number", range(STOPS))
def test_a_worker_is_stopped_and_continued(
    folder: Path, volume: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_workers, "RENEW_S", 0.3)
    monkeypatch.setattr(by_workers, "VALID_S", 3.0)
    stopped: list[int] = []

    def stop() -> None:
        if (found := children(os.getpid())) and not stopped:
            stopped.append(random.choice(found))
            os.kill(stopped[0], signal.SIGSTOP)

    with repeating(stop, 0.6 + 0.05 * (number % 20)):
        import_folder(volume, folder, 2, step_bytes=SHORT_STEP)
    if stopped:
        with pytest.raises(ProcessLookupError):  # it was killed, and its process waited for
            os.kill(stopped[0], signal.SIGCONT)


def test_a_killed_coordinator_takes_its_workers_along_and_is_resumed(
    folder: Path, volume: str
) -> None:
    kept = 0
    for number in range(int(KILLS or 1)):
        if not (found := kill_coordinator(folder, volume, kept)):
            break  # it was complete
        kept = found
        print(f"kill {number + 1} after {kept} samples")
    else:
        assert import_folder(volume, folder, 2, step_bytes=SHORT_STEP).kept_count == kept
    assert kept


def kill_coordinator(folder: Path, volume: str, kept: int) -> int:
    """Kill an import when it has more samples than before; return how many there are."""
    process = SPAWN.Process(
        target=import_folder, args=(volume, folder, 2), kwargs={"step_bytes": SHORT_STEP}
    )
    process.start()
    assert process.pid is not None
    wait_for(lambda: imported(volume) > kept or not process.is_alive(), "a step")
    workers = children(process.pid)
    process.kill()
    process.join()
    wait_for(lambda: not any(map(is_running, workers)), "the end of the workers")
    return imported(volume)


def imported(volume: str) -> int:
    """Return the number of samples that an unfinished import has."""
    with dlfs.open(volume) as opened:
        return sum(info.sample_count for info in opened.unfinished())


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
