"""Standard streams that are closed, full or of another encoding, and what a script sees of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlfs

DLFS = f"{sys.executable} -m dlfs.cli"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
FULL = "No space left on device"
CLOSED = "Bad file descriptor"
CHANGED = "the command has made its changes"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line in which ``dlfs`` is this one."""
    return subprocess.run(
        ["bash", "-c", f'dlfs() {{ {DLFS} "$@"; }}; {command}'],
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )


def datasets(volume: Path) -> list[str]:
    with dlfs.open(str(volume)) as opened:
        return [f"{info.name}@{info.version}" for info in opened.datasets()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "x").write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("verb", "redirection", "unbuffered"),
    [
        ("ls VOLUME small", ">/dev/full", ""),
        ("ls VOLUME small --json", ">/dev/full", "1"),
        ("ls -l VOLUME", ">&-", ""),
        ("cat VOLUME small top", ">&-", "1"),
        ("info VOLUME", ">/dev/full", "1"),
        ("--help", ">/dev/full", ""),
        ("ls --help", ">&-", "1"),
        ("--version", ">&-", ""),
        ("import --formats", ">/dev/full", ""),
    ],
)
def test_output_that_cannot_be_written(volume, verb, redirection, unbuffered) -> None:
    command = "dlfs " + verb.replace("VOLUME", str(volume))
    done = shell(f"{command} {redirection}", PYTHONUNBUFFERED=unbuffered)
    reason, code = (CLOSED, 7) if redirection == ">&-" else (FULL, 6)
    assert done.stderr.decode() == f"dlfs: write the output: {reason}\n"
    assert done.returncode == code


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_change_whose_output_is_lost_says_so(volume, source, unbuffered) -> None:
    for number, redirection in enumerate((">/dev/full", ">&-"), 1):
        command = f"dlfs import {source} {volume} --name new --json {redirection}"
        done = shell(command, PYTHONUNBUFFERED=unbuffered)
        assert done.returncode in (6, 7)
        assert CHANGED in done.stderr.decode()
        assert f"new@{number}" in datasets(volume)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_a_change_without_output_succeeds(volume, source, redirection) -> None:
    done = shell(f"dlfs import {source} {volume} --name new {redirection}")
    assert (done.returncode, done.stdout) == (0, b"")
    assert datasets(volume) == ["new@1", "small@1"]


def test_errors_without_stderr_keep_their_codes(volume) -> None:
    for redirection in ("2>&-", "2>/dev/full"):
        assert shell(f"dlfs nosuch {redirection}").returncode == 2
        assert shell(f"dlfs ls {volume} nosuch {redirection}").returncode == 3


def test_a_closed_stdin(volume, tmp_path) -> None:
    assert shell(f"dlfs rm {volume} small <&-").returncode == 2
    assert shell(f"dlfs import - {volume} --name x <&-").returncode == 2
    done = shell("dlfs key import x <&-", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 2
    assert b"closed standard input" in done.stderr


def test_no_device_gets_the_number_of_a_closed_stream(volume) -> None:
    code = (
        "import os\n"
        "from dlfs.cli.streams import prepare_streams\n"
        "prepare_streams()\n"
        "import dlfs\n"
        f"with dlfs.open({str(volume)!r}) as opened:\n"
        "    targets = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        "os._exit(targets != ['/dev/null'] * 3)\n"
    )
    closed = shell(f'exec {sys.executable} -c "$CODE" <&- >&- 2>&-', CODE=code)
    assert closed.returncode == 0


def test_names_are_utf8_in_every_locale(tmp_path) -> None:
    uri = str(tmp_path / "volume.img")
    dlfs.format_volume(uri, size_bytes=16 << 20, label="ünits")
    with dlfs.open(uri) as opened, opened.writer("größe") as writer:
        writer.add("ü.txt", b"u")
        writer.add(b"bad\xff.txt", b"b")
    for verb in (f"ls -l {uri}", f"ls {uri} größe", f"info {uri}", f"stat {uri} größe ü.txt"):
        plain, other = shell(f"dlfs {verb}"), shell(f"dlfs {verb}", **ASCII)
        assert plain.returncode == other.returncode == 0, other.stderr
        assert plain.stdout == other.stdout
    found = json.loads(shell(f"dlfs ls {uri} größe --json", **ASCII).stdout)
    assert [entry["path"] for entry in found["entries"]] == ["bad\udcff.txt", "ü.txt"]


@pytest.mark.parametrize("zone", ["XYZ-25:99", "nonsense"])
def test_dates_in_odd_time_zones(volume, zone) -> None:
    done = shell(f"dlfs ls -l {volume}", TZ=zone)
    assert done.returncode == 0, done.stderr
    assert b"small@1" in done.stdout
