"""An import by workers that runs is not taken over, nor are its members changed under it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset.parts_writer import PartsWriter
from dlfs.errors import LockedError
from dlfs.ingest.workers.by_workers import coordinating
from tests.support.files import write_files
from tests.support.parts import COUNTS, ORIGIN, Worker, open_parts
from tests.support.waiting import wait_for

CHUNK_BYTES = 16 * KIB
RUNS = "the import of 'x' by workers runs, of process {pid} on {host}: wait for its end, or end"


@pytest.fixture
def members(tmp_path: Path) -> list[str]:
    members = [str(tmp_path / name) for name in "ab"]
    dlfs.format_volume(members, size_bytes=6 * MIB, chunk_bytes=CHUNK_BYTES, replicas=2)
    with dlfs.open(members) as volume:
        volume.grow([str(tmp_path / name) for name in "cd"], size_bytes=4 * MIB)
    return [*members, *(str(tmp_path / name) for name in "cd")]


def import_again(volume: dlfs.Volume, _place: Path) -> None:
    with coordinating(volume, "x"):
        pass


def import_plainly(volume: dlfs.Volume, _place: Path) -> None:
    volume.step_writer("x", ORIGIN)


def abandon(volume: dlfs.Volume, _place: Path) -> None:
    volume.abandon("x")


def grow(volume: dlfs.Volume, place: Path) -> None:
    volume.grow([str(place / name) for name in "ef"], size_bytes=4 * MIB)


def shrink(volume: dlfs.Volume, _place: Path) -> None:
    volume.shrink([2])


def repair(volume: dlfs.Volume, place: Path) -> None:
    dlfs.repair([member.uri for member in volume.members], replacements={1: str(place / "new")})


CHANGES = [import_again, import_plainly, abandon, grow, shrink, repair]


def finish(volume: dlfs.Volume, parts: PartsWriter) -> None:
    parts.commit(reserve=50)
    worker = Worker(volume, parts, "a")
    for part in range(len(COUNTS)):
        parts.commit(worker.write(part).reports())
    worker.end()
    assert parts.seal().sample_count == sum(COUNTS)


@pytest.mark.parametrize("change", CHANGES)
def test_an_import_that_runs_goes_on(
    tmp_path: Path, members: list[str], change: Callable[[dlfs.Volume, Path], None]
) -> None:
    text = RUNS.format(pid=os.getpid(), host=socket.gethostname())
    with dlfs.open(members) as volume, coordinating(volume, "x"), open_parts(volume) as parts:
        parts.commit(reserve=20)
        before = sorted(os.listdir(tmp_path))
        with dlfs.open(members) as other, pytest.raises(LockedError, match=text):
            change(other, tmp_path)
        assert set(os.listdir(tmp_path)) - set(before) <= {"new"}
        finish(volume, parts)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_dead_coordinator_left_does_not_refuse(
    tmp_path: Path, members: list[str], change: Callable[[dlfs.Volume, Path], None]
) -> None:
    with dlfs.open(members) as volume:
        with coordinating(volume, "x"):
            open_parts(volume).commit(reserve=20)
        change(volume, tmp_path)


def test_another_coordinator_that_has_committed_nothing(members: list[str]) -> None:
    with (
        dlfs.open(members) as volume,
        coordinating(volume, "x"),
        dlfs.open(members) as other,
        pytest.raises(LockedError, match="'y' by workers: another import by workers into this"),
        coordinating(other, "y"),
    ):
        pass


# ---- commands ------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dlfs.cli", *arguments]


@contextmanager
def waiting_import(folder: Path, volume: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    """An import whose workers have not come yet."""
    arguments = ["import", str(folder), volume, "--name", "x", "--join-file", str(file)]
    with subprocess.Popen(command(*arguments), text=True, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: file.exists() or process.poll() is not None, "the file")
            yield process
        finally:
            process.kill()


def test_the_same_command_a_second_time_is_refused(tmp_path: Path, members: list[str]) -> None:
    folder = write_files(tmp_path / "folder", {f"{n}": bytes(n) for n in range(20)})
    uri, file = ",".join(members), tmp_path / "join"
    again = command("import", str(folder), uri, "--name", "x", "--workers", "1")
    with waiting_import(folder, uri, file) as first:
        for arguments in (again, command("import", "--resume", uri)):
            second = subprocess.run(arguments, text=True, capture_output=True, check=False)
            assert second.returncode == 5, second.stderr
            text = " ".join(second.stderr.split())
            assert f"by workers runs, of process {first.pid} on" in text
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = subprocess.run(again, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with dlfs.open(members) as volume:
        assert len(volume["x"]) == 20
