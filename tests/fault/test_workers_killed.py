"""Imports by workers that are killed, stopped and continued, and whose coordinator is killed.

``DLFS_IMPORT_STOPS`` is the number of rounds in which a worker is stopped (2 by default).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.workers import by_workers
from tests.support.files import write_files
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

STOPS = int(os.environ.get("DLFS_IMPORT_STOPS", "2"))
SPAWN = get_context("spawn")
FILES = 400


def make_folder(path: Path) -> Path:
    drawn = random.Random(3)
    files = {f"{n % 9}/{n:03}": drawn.randbytes(drawn.randint(0, 30_000)) for n in range(FILES)}
    return write_files(path, files)


def import_folder(volume: str, folder: Path, workers: int = 0) -> ImportReport:
    with dlfs.open(volume) as target, closing(open_source(folder)) as source:
        source.buffer_bytes = 64 * KIB
        return import_dataset(target, source, "x", step_bytes=128 * KIB, workers=workers)


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


def check_equal(volume: str, report: ImportReport, folder: Path, plain: str) -> None:
    expected = import_folder(plain, folder).dataset
    info = report.dataset
    assert info.content_digest == expected.content_digest
    assert info.packing_digest == expected.packing_digest
    with dlfs.open(volume) as opened:
        assert not [*opened.verify()]
        assert not opened.unfinished()
        usage = opened.usage()
    with dlfs.open(plain) as opened:
        assert usage.free_bytes == opened.usage().free_bytes  # nothing is left of lost workers
    assert not children(os.getpid())


@pytest.fixture
def volumes(tmp_path: Path) -> tuple[str, str]:
    made = [
        new_volume(tmp_path / name, size_bytes=48 * MIB, chunk_bytes=16 * KIB)
        for name in ("workers.img", "plain.img")
    ]
    return str(made[0]), str(made[1])


def test_a_worker_is_killed_every_second(tmp_path: Path, volumes: tuple[str, str]) -> None:
    folder = make_folder(tmp_path / "folder")
    kills = 0

    def kill() -> None:
        nonlocal kills
        found = children(os.getpid())
        if found and kills < 6:
            kills += 1
            with suppress(ProcessLookupError):
                os.kill(random.choice(found), signal.SIGKILL)

    with repeating(kill, 1.0):
        report = import_folder(volumes[0], folder, workers=2)
    check_equal(volumes[0], report, folder, volumes[1])


@pytest.mark.parametrize("number", range(STOPS))
def test_a_worker_is_stopped_and_continued(
    tmp_path: Path, volumes: tuple[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_workers, "RENEW_S", 0.3)
    monkeypatch.setattr(by_workers, "VALID_S", 3.0)
    folder = make_folder(tmp_path / "folder")
    stopped: list[int] = []

    def stop() -> None:
        if (found := children(os.getpid())) and not stopped:
            stopped.append(random.choice(found))
            os.kill(stopped[0], signal.SIGSTOP)

    with repeating(stop, 0.6 + 0.05 * (number % 20)):
        report = import_folder(volumes[0], folder, workers=2)
    check_equal(volumes[0], report, folder, volumes[1])
    if stopped:
        with pytest.raises(ProcessLookupError):  # it was killed, and its process waited for
            os.kill(stopped[0], signal.SIGCONT)


def test_a_killed_coordinator_takes_its_workers_along_and_is_resumed(
    tmp_path: Path, volumes: tuple[str, str]
) -> None:
    folder = make_folder(tmp_path / "folder")
    process = SPAWN.Process(target=import_folder, args=(volumes[0], folder, 2))
    process.start()
    assert process.pid is not None

    def has_steps() -> bool:
        with dlfs.open(volumes[0]) as volume:
            return any(info.sample_count for info in volume.unfinished())

    wait_for(has_steps, "a step")
    workers = children(process.pid)
    process.kill()
    process.join()
    wait_for(lambda: not any(map(is_running, workers)), "the end of the workers")
    report = import_folder(volumes[0], folder, workers=2)
    assert report.kept_count
    check_equal(volumes[0], report, folder, volumes[1])


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
