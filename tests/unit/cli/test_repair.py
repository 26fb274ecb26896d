"""``dlfs repair`` and what ``dlfs info`` and ``dlfs format`` say of copies."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.cli.exits import ExitCode
from dlfs.format.geometry import DataSpace
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import load_generation
from tests.support.files import write_at
from tests.support.volumes import write_dataset

Run = Callable[..., Any]


@pytest.fixture
def uris(tmp_path: Path, run: Run) -> list[str]:
    made = [str(tmp_path / f"member{i}") for i in range(2)]
    done = run("format", ",".join(made), "--size", "4MiB", "--replicas", "2", "--chunk", "16KiB")
    assert done.code == 0, done.err
    write_dataset(made, "data", {f"{i}": bytes([i]) * 1000 for i in range(40)})
    return made


def test_a_degraded_volume_is_shown_and_repaired(uris: list[str], run: Run, tmp_path: Path) -> None:
    volume = ",".join(uris)
    Path(uris[1]).unlink()
    done = run("info", volume, "--json")
    found = done.json
    assert (done.code, found["replicas"]) == (0, 2)
    assert [m["state"] for m in found["members"]] == ["current", "missing"]
    assert "no such file" in found["members"][1]["reason"]
    done = run("info", volume)
    assert done.code == 0
    assert "missing" in done.out.decode()
    assert "2 of each chunk" in done.out.decode()
    assert f"member 1 ({found['members'][1]['uuid']}) is missing" in done.err
    assert run("verify", volume).code == ExitCode.DAMAGE
    assert run("rm", volume, "data", "--yes").code == ExitCode.DEVICE
    done = run("repair", volume)
    assert done.code == ExitCode.DEVICE
    assert "expected a device in place of every lost member" in done.err
    assert "'dlfs repair VOLUME --member 1 --with DEVICE'" in done.err
    new = str(tmp_path / "new")
    replacing = ("repair", volume, "--member", "1", "--with", new, "--json")
    assert "or --assume-newest" in run(*replacing).err
    done = run(*replacing, "--assume-newest")
    report = done.json
    assert (done.code, report["replaced"], report["damaged"]) == (0, [1], [])
    assert report["uri"] == f"{uris[0]},{new}"
    assert run("verify", report["uri"]).code == 0
    assert "repaired" in run("repair", report["uri"]).err


UNPROVEN = (
    "generation 2 may not be the newest: it is that of 1 of 2 members, which are an older copy "
    "where member 0 has a newer generation"
)


@pytest.fixture
def old(uris: list[str]) -> bytes:
    """The content of member 1, which is that before the newest generation."""
    content = Path(uris[1]).read_bytes()
    with dlfs.open(uris) as volume, volume.writer("newer") as writer:
        writer.add("a", b"1")
    Path(uris[1]).write_bytes(content)
    return content


def test_an_older_copy_alone_is_not_taken_for_the_newest(
    uris: list[str], old: bytes, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "stale" not in run("info", uris[0]).err
    assert UNPROVEN in run("info", uris[1]).err
    assert run("info", uris[1], "--json").json["unproven"] == UNPROVEN
    assert run("info", ",".join(uris), "--json").json["unproven"] is None
    assert UNPROVEN in run("verify", uris[1], "--json").out.decode()
    with dlfs.open(uris[1]):
        assert any(UNPROVEN in record.getMessage() for record in caplog.records)
    new = tmp_path / "new"
    repairing = ("repair", uris[1], "--member", "0", "--with", str(new))
    done = run(*repairing)
    assert done.code == ExitCode.USAGE
    assert UNPROVEN in done.err
    assert not new.exists()
    assert Path(uris[1]).read_bytes() == old
    assert run(*repairing, "--assume-newest").code == 0


def ask_on_terminal(answer: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``dlfs repair`` with a terminal as its input, which holds an answer."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    command = [sys.executable, "-m", "dlfs.cli", "repair", *arguments]
    try:
        return subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("answer", [b"n\n", b"\n", b"yes, please\n", b"\x04"])
def test_what_may_be_an_older_copy_is_left_alone_without_a_yes(
    uris: list[str], old: bytes, tmp_path: Path, answer: bytes
) -> None:
    new = tmp_path / "new"
    done = ask_on_terminal(answer, uris[1], "--member", "0", "--with", str(new))
    assert (done.returncode, done.stdout) == (1, "")
    asked = " ".join(done.stderr.split())  # in lines as long as the terminal's
    assert asked == f"{UNPROVEN}. Make this the volume's state for good? [y/N] nothing was repaired"
    assert not new.exists()
    assert Path(uris[1]).read_bytes() == old


def test_what_may_be_an_older_copy_is_repaired_after_a_yes(
    uris: list[str], old: bytes, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    done = ask_on_terminal(b"y\n", uris[1], "--member", "0", "--with", str(new))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("[y/N]") == 1
    assert f"repaired {new},{uris[1]}: " in done.stderr
    with dlfs.open([str(new), uris[1]]) as volume:
        assert [info.name for info in volume.datasets()] == ["data"]


def test_wrong_command_lines(uris: list[str], run: Run, tmp_path: Path) -> None:
    volume = ",".join(uris)
    for message, arguments in (
        ("repair: expected both --member and --with, or neither", (volume, "--member", "1")),
        ("repair: expected both --member and --with, or neither", (volume, "--with", "x")),
        ("expected a member 0..1, got 9", (volume, "--member", "9", "--with", "x")),
        (f"it is a member already: {uris[0]}", (volume, "--member", "1", "--with", uris[0])),
        ("may not be the newest", (uris[0], "--member", "1", "--with", uris[0])),
    ):
        done = run("repair", *arguments)
        assert done.code == ExitCode.USAGE
        assert message in " ".join(done.err.split())
    assert not (tmp_path / "x").exists()
    done = run("format", str(tmp_path / "x"), "-s", "4MiB", "--replicas", "2")
    assert done.code == ExitCode.USAGE
    assert "replicas" in done.err
    Path(uris[0]).unlink()
    Path(uris[1]).unlink()
    done = run("repair", volume)
    assert done.code == ExitCode.NOT_FOUND
    assert uris[0] in done.err


def test_what_is_beyond_repair(uris: list[str], run: Run) -> None:
    devices = open_members(uris)
    generation = load_generation(devices)
    close_devices(devices)
    (record,) = generation.catalog.datasets
    space = DataSpace(generation.geometry, record.data_runs)
    for copy in range(2):
        member, offset = space.resolve(500, copy)
        write_at(uris[member], offset, b"xyz")
    done = run("repair", ",".join(uris))
    assert done.code == ExitCode.DAMAGE
    assert "cannot be repaired: sample" in done.err


def test_a_damaged_superblock_is_repaired_without_replicas(run: Run, tmp_path: Path) -> None:
    volume = tmp_path / "volume.img"
    assert run("format", volume, "--size", "4MiB").code == 0
    write_at(volume, 64 * 1024, b"damage" * 100)  # slot B, which holds generation 1
    assert run("verify", volume).code == ExitCode.DAMAGE
    done = run("repair", volume, "--json")
    assert (done.code, done.json["written_bytes"]) == (0, 4096), done.err
    assert run("verify", volume).code == 0
    done = run("repair", volume)
    assert (done.code, "all its superblocks are whole" in done.err) == (2, True)
