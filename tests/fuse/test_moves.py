"""Files of a mount are read on after their dataset was moved to other members."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

import dlfs
from dlfs.units import KIB, MIB
from tests.fuse.mounting import mounted, wait_for
from tests.unit.resizing.test_following import overwrite

pytestmark = pytest.mark.fuse


def test_files_are_read_where_they_are_now(tmp_path: Path, server: str) -> None:
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    dlfs.format_volume(old, size_bytes=4 * MIB, chunk_bytes=16 * KIB)
    samples = {f"{i:03}": random.Random(i).randbytes(9000) for i in range(60)}
    with dlfs.open(old) as volume, volume.writer("d") as writer:
        for path, data in samples.items():
            writer.add(path, data)
    with mounted(old, tmp_path / "mnt", tmp_path / "log", fuse=server) as mount:
        assert (mount / "d/000").read_bytes() == samples["000"]
        with dlfs.open(old) as volume:
            volume.grow(new, size_bytes=4 * MIB)
            volume.shrink([0])
        overwrite(str(old))
        if server == "native":  # until the kernel looks the dataset up again
            wait_for(lambda: is_fresh(mount / "d/001"), "the dataset to be shown anew")
        for path, data in samples.items():
            assert (mount / f"d/{path}").read_bytes() == data


def is_fresh(path: Path) -> bool:
    """Return True if a file can be read again, after its dataset was moved."""
    try:
        path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return False
    return True
