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


def test_tar_reads_all(world: World, tmp_path: Path) -> None:
    run("tar", "-C", world.dataset, "-cf", tmp_path / "all.tar", ".")
    with tarfile.open(tmp_path / "all.tar", errors="surrogateescape") as archive:
        members = {os.fsencode(m.name)[2:]: m for m in archive.getmembers() if m.isfile()}
        assert set(members) == set(world.files)
        for path, member in members.items():
            data = archive.extractfile(member)
            assert data is not None
            assert data.read() == world.files[path]
