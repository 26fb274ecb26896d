"""Tests in a separate process: signals, pipes, terminals, imports, completion."""

from __future__ import annotations

import array
import fcntl
import os
import pty
import random
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import dlfs
from tests.support.files import write_at
from tests.support.volumes import write_dataset
from tests.unit.cli.terminal import _follow

DLFS = [sys.executable, "-m", "dlfs.cli"]


def test_help_does_not_wait_for_numpy() -> None:
    code = (
        "import sys\n"
        "from dlfs.cli.commands import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'dlfs.volume.volume', 'dlfs._native') if m in sys.modules])\n"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", [["ls", "small"], ["info"], ["ls", "small", "--json"]])
def test_a_reader_that_goes_away_is_no_error(volume, verb) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*DLFS, verb[0], volume, *verb[1:]],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def pending_bytes(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe."""
    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


@pytest.mark.parametrize(
    "arguments", [["cat", "VOLUME", "big", "x"], ["ls", "VOLUME", "many", "-R"]]
)
def test_every_byte_is_written_although_a_write_is_interrupted(tmp_path, arguments) -> None:
    uri = str(tmp_path / "volume.img")
    data = random.Random(1).randbytes(200_000)
    names = [f"{n:05}/{'n' * 50}" for n in range(4000)]
    dlfs.format_volume(uri, size_bytes=16 << 20)
    with dlfs.open(uri) as volume:
        with volume.writer("big") as writer:
            writer.add("x", data)
        write_dataset(volume, "many", dict.fromkeys(names, b""))
    command = [*DLFS, *(uri if word == "VOLUME" else word for word in arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as done:
        assert done.stdout is not None
        pipe = done.stdout.fileno()
        while pending_bytes(pipe) < fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            assert done.poll() is None
        done.send_signal(signal.SIGSTOP)  # the write that waits for the reader returns early
        done.send_signal(signal.SIGCONT)
        found = done.stdout.read()
    assert done.returncode == 0
    assert found == (data if arguments[0] == "cat" else "".join(f"{n}\n" for n in names).encode())


def test_progress_is_shown_on_a_terminal_only(volume, tmp_path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_bytes(bytes(1 << 20))
    ours, theirs = pty.openpty()
    command = [*DLFS, "import", tmp_path / "source", volume, "--name", "bar"]
    with subprocess.Popen(command, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as done:
        shown = _follow(ours, done.pid, b"")
    os.close(theirs)
    os.close(ours)
    assert b"import bar" in shown
    assert b"imported bar@1" in shown
    quiet = subprocess.run([*DLFS, "verify", volume], capture_output=True, check=True)
    assert quiet.stderr.count(b"\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_data_goes_to_a_file_beside_a_progress_bar(volume, options) -> None:
    write_at(volume, 100, b"damage")
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [*DLFS, "verify", volume, *options], stdout=subprocess.PIPE, stderr=theirs
    )
    with done:
        shown = _follow(ours, done.pid, b"")
        assert done.stdout is not None
        found = done.stdout.read()
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 4
    assert b"expected CRC32C" in found
    assert b"1 bad" in shown
    assert b"expected CRC32C" not in shown


def ask_on_terminal(volume: Path, answer: bytes) -> int:
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        [*DLFS, "rm", volume, "small"], stdin=theirs, capture_output=True, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert b"Remove small@1 (6 samples" in done.stderr
    assert done.stdout == b""
    return done.returncode


def test_rm_asks_on_a_terminal(volume, run) -> None:
    assert ask_on_terminal(volume, b"n\n") == 1
    assert run("ls", volume).out == b"small@1\n"
    assert ask_on_terminal(volume, b"y\n") == 0
    assert run("ls", volume).out == b""


def test_datasets_complete(volume) -> None:
    environment = {
        **os.environ,
        "_DLFS_COMPLETE": "complete_bash",
        "COMP_WORDS": f"dlfs ls {volume} sm",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(DLFS, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["small"]
    environment["COMP_WORDS"] = f"dlfs ls {volume}.not sm"
    done = subprocess.run(DLFS, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == []
