"""Ordinary programs on a real mount."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.fuse.mounting import World

pytestmark = pytest.mark.fuse


def run(*command: str | Path) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout


def test_diff_finds_no_difference(world: World) -> None:
    assert run("diff", "-r", world.source, world.dataset) == b""


def test_find_sees_every_file(world: World) -> None:
    found = run("find", world.dataset, "-type", "f", "-printf", "%P\\0").split(b"\0")[:-1]
    assert sorted(found) == sorted(world.files)
    directories = run("find", world.dataset, "-mindepth", "1", "-type", "d", "-printf", "%P\\0")
    assert len(directories.split(b"\0")) - 1 == sum(
        len(names) for _, names, _ in os.walk(world.source)
    )


def test_copies_are_equal(world: World, tmp_path: Path) -> None:
    run("cp", "-r", "--preserve=timestamps", world.dataset, tmp_path / "copy")
    assert run("diff", "-r", world.source, tmp_path / "copy") == b""


def test_tar_reads_all(world: World, tmp_path: Path) -> None:
    run("tar", "-C", world.dataset, "-cf", tmp_path / "all.tar", ".")
    with tarfile.open(tmp_path / "all.tar", errors="surrogateescape") as archive:
        members = {os.fsencode(m.name)[2:]: m for m in archive.getmembers() if m.isfile()}
        assert set(members) == set(world.files)
        for path, member in members.items():
            data = archive.extractfile(member)
            assert data is not None
            assert data.read() == world.files[path]


def test_du_counts_the_bytes(world: World) -> None:
    total, _ = run("du", "-s", "--apparent-size", "-B1", world.dataset).split(b"\t")
    assert int(total) == sum(map(len, world.files.values()))


def test_getfattr_dumps(world: World) -> None:
    said = run("getfattr", "--absolute-names", "-d", world.dataset / "large")
    assert b'user.dlfs.version="1"' in said
