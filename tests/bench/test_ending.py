"""A benchmark that is told to end undoes what it began: real programs, real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import dlfs
from bench.dlio.stage import find_dlio
from bench.errors import Unavailable
from bench.process import INTERRUPTED, ROOT
from bench.serving import mount_dlfs
from dlfs.base.units import MIB
from dlfs.mount.mountpoint import find_mount
from dlfs.mount.supervise.background import mount_volume
from tests.support.waiting import wait_for

TOLD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CASES = ("bench", "--cases", "mount-4k", "--seconds", "60")
PEERS = ("bench.peers", "--only", "dlfs-mount", "--sizes", "4k")

# It waits for a file that says that its child has cleaned up; the child needs its while for that,
# and is told again meanwhile.
PARENT = """
import pathlib, subprocess, sys
from bench.process import run_program, started

def main():
    try:
        with started([sys.executable, "-c", sys.argv[1], sys.argv[2]]) as child:
            child.wait()
    finally:
        print("cleaned up" if pathlib.Path(sys.argv[2]).exists() else "too early")

run_program(main)
"""
CHILD = """
import pathlib, signal, sys
from bench.process import run_program

def main():
    try:
        print("begun", flush=True)
        signal.pause()
    finally:
        signal.raise_signal(signal.SIGTERM)
        sum(range(10_000_000))
        pathlib.Path(sys.argv[1]).touch()

run_program(main)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program in a session of its own, and ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, words)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# The signal arrives before the constructor of Popen has returned, and once the child has begun.
INTERRUPTED_START = """
import signal, subprocess
start = subprocess.Popen.__init__

def start_and_interrupt(self, *words, **options):
    start(self, *words, stdout=subprocess.PIPE, **options)
    assert self.stdout.read(6) == b"begun\\n"
    signal.raise_signal(signal.{name})

subprocess.Popen.__init__ = start_and_interrupt
"""


@pytest.mark.parametrize("number", TOLD)
def test_a_program_that_is_interrupted_as_it_starts_another_ends_that_first(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = start(
        "-c", INTERRUPTED_START.format(name=number.name) + PARENT, CHILD, tmp_path / "x"
    )
    said, errors = process.communicate()
    assert (said, errors, process.returncode) == ("cleaned up\n", "", INTERRUPTED)


FAILED_START = """
import signal
from bench.process import run_program, started

def main():
    try:
        with started(["/there/is/none"]):
            pass
    except FileNotFoundError:
        print("not found", flush=True)
        signal.raise_signal(signal.SIGTERM)
        print("held back")

run_program(main)
"""


def test_a_program_that_cannot_be_started_holds_no_signal_back(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("-c", FAILED_START)
    said, errors = process.communicate()
    assert (said, errors, process.returncode) == ("not found\n", "", INTERRUPTED)


@pytest.mark.parametrize("number", TOLD)
def test_who_waits_for_a_program_ends_it_first(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = start("-c", PARENT, CHILD, tmp_path / "removed")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    said, errors = process.communicate()
    assert (said, errors, process.returncode) == ("cleaned up\n", "", INTERRUPTED)


def test_what_is_to_be_ignored_is(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start("-c", ignoring + CHILD, tmp_path / "removed")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    assert not select.select([process.stdout], [], [], 0)[0]
    process.terminate()
    process.communicate()
    assert process.returncode == INTERRUPTED


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Tell a program to end, as a terminal tells all of them for Ctrl-C; check that it does."""
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    errors = process.communicate()[1]
    assert process.returncode == INTERRUPTED, errors
    wait_for(lambda: is_gone(process.pid), "the last of what it started to end")


def is_gone(group: int) -> bool:
    """Whether nobody is left in a process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("number", "words", "point"),
    [
        (signal.SIGTERM, CASES, "dlfs-bench/*/mnt"),
        (signal.SIGINT, CASES, "dlfs-bench/*/mnt"),
        (signal.SIGTERM, PEERS, "dlfs-bench-peers/*/*/mount"),
    ],
)
def test_a_benchmark_leaves_no_mount_and_no_data(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    number: signal.Signals,
    words: tuple[str, ...],
    point: str,
) -> None:
    (tmp_path / "data").mkdir()
    options = ("--size", "1MiB", "--dir", tmp_path / "data", "--results", tmp_path / "results")
    process = start("-m", *words, *options)
    mounts: list[Path] = []

    def is_mounted() -> bool:
        assert process.poll() is None, process.communicate()
        mounts[:] = [path for path in (tmp_path / "data").glob(point) if find_mount(path)]
        return bool(mounts)

    wait_for(is_mounted, "a mount")
    end(process, number)
    assert find_mount(mounts[0]) is None
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.fuse
def test_dlio_leaves_no_service_and_no_data(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    try:
        find_dlio()
    except Unavailable as reason:
        pytest.skip(str(reason))
    words = ("--workloads", "unet3d-npz", "--files", "4", "--rounds", "1")
    process = start("-m", "bench.dlio", *words, "--dir", tmp_path, "--results", tmp_path / "r")
    log = tmp_path / "dlio" / "unet3d-npz" / "generate-unet3d-npz.log"
    wait_for(lambda: log.exists() or process.poll() is not None, "DLIO to write into the mount")
    end(process, signal.SIGTERM)
    assert not (tmp_path / "dlio").exists()


@pytest.mark.fuse
def test_a_signal_as_a_mount_is_ready_leaves_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount_and_interrupt(*words: Any, **options: Any) -> NoReturn:
        mount_volume(*words, **options)
        assert find_mount(tmp_path / "mnt") is not None
        raise KeyboardInterrupt

    monkeypatch.setattr("dlfs.mount.supervise.background.mount_volume", mount_and_interrupt)
    volume = tmp_path / "volume"
    dlfs.format_volume(volume, size_bytes=4 * MIB)
    with (
        pytest.raises(KeyboardInterrupt),
        mount_dlfs(str(volume), tmp_path / "mnt", tmp_path / "log"),
    ):
        pass
    assert find_mount(tmp_path / "mnt") is None
