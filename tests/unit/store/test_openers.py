"""A volume that a process has open is not formatted, with force or without."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import LockedError
from tests.support.scripts import hear, running

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "v.img"
    dlfs.format_volume([str(path)], size_bytes=16 * MIB)
    with dlfs.open(str(path)) as opened, opened.writer("photos") as writer:
        writer.add(b"a", b"bytes of a")
    return path


def test_a_volume_that_this_process_reads_is_refused(volume: Path) -> None:
    before = volume.read_bytes()
    with dlfs.open(str(volume)) as opened:
        with pytest.raises(LockedError, match=r"format .*v\.img: this process has it open; end"):
            dlfs.format_volume([str(volume)], size_bytes=32 * MIB, force=True)
        opened.refresh()
        with opened["photos"] as dataset:
            assert dataset[0] == b"bytes of a"
    assert volume.read_bytes() == before


def test_a_volume_that_other_processes_read_is_refused_under_any_name(volume: Path) -> None:
    code = f"import sys, dlfs; v = dlfs.open({str(volume)!r}); print(flush=True); sys.stdin.read()"
    link = volume.with_name("link.img")
    link.symlink_to(volume)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(running(code)) for _ in range(4)]
        assert [hear(reader) for reader in readers] == [""] * 4
        told = rf"process {readers[0].pid} \(python.*\), .* and 1 more have it open"
        with pytest.raises(LockedError, match=told):
            dlfs.format_volume([str(link)], force=True)
    dlfs.format_volume([str(link)], force=True)
    with dlfs.open(str(volume)) as opened:
        assert opened.datasets() == []
