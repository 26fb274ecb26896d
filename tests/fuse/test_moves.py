"""Files of a mount, open ones too, are read without a failure while their dataset is moved."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from tests.fuse.mounting import mounted, served_by
from tests.support.descriptors import open_names
from tests.support.nvme import ScriptedTarget
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for
from tests.unit.store.test_following import overwrite, reuse_chunks

pytestmark = pytest.mark.fuse


def drop_kernel_cache(file: int) -> None:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def test_rule_35_files_of_a_dataset_that_is_moved(tmp_path: Path, server: str) -> None:
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    dlfs.format_volume(old, size_bytes=6 * MIB, chunk_bytes=16 * KIB)
    samples = {f"{i:03}": random.Random(i).randbytes(9000) for i in range(60)}
    samples["large"] = random.Random(99).randbytes(2 * MIB + 5)
    write_dataset(old, "d", samples)
    with mounted(old, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:
        wrong: list[str] = []
        moved = threading.Event()

        def read_all() -> None:
            while not moved.is_set():
                for path, data in samples.items():
                    with open(mount / f"d/{path}", "rb") as file:
                        drop_kernel_cache(file.fileno())
                        wrong.extend([path] if file.read() != data else [])

        reader = threading.Thread(target=read_all)
        with open(mount / "d/large", "rb", buffering=0) as file:
            inode = os.fstat(file.fileno()).st_ino
            start = file.read(1000)
            reader.start()
            try:
                with dlfs.open(old) as volume:
                    volume.grow(new, size_bytes=6 * MIB)
                    reuse_chunks(volume)
                    volume.remove("other")
                    volume.shrink([0])
                overwrite(str(old))
            finally:
                moved.set()
                reader.join()
            drop_kernel_cache(file.fileno())
            assert start + file.read(5 * MIB) == samples["large"]
        assert wrong == []
        for path, data in samples.items():
            assert (mount / f"d/{path}").read_bytes() == data
        assert (mount / "d/large").stat().st_ino == inode


def test_a_device_that_left_is_closed_without_a_request(tmp_path: Path, server: str) -> None:
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    dlfs.format_volume(old, size_bytes=6 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(old) as volume, volume.writer("d") as writer:
        writer.add("a", b"b")
    with mounted(old, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount:

        def is_open(path: Path) -> bool:
            return str(path) in open_names(mount.pid)

        assert (mount / "d/a").read_bytes() == b"b"
        assert is_open(old)
        with dlfs.open(old) as volume:
            volume.grow(new, size_bytes=6 * MIB)
            volume.shrink([0])
        wait_for(lambda: is_open(new) and not is_open(old), "the device that left to be closed")
        assert (mount / "d/a").read_bytes() == b"b"


def test_a_dataset_is_opened_first_while_its_node_is_away(tmp_path: Path, server: str) -> None:
    """The first read waits for the node, as those of a dataset do that is open."""
    with ScriptedTarget() as target:
        dlfs.format_volume(target.uri(), chunk_bytes=16 * KIB)
        with dlfs.open(target.uri()) as volume, volume.writer("d") as writer:
            writer.add("a", b"b")
        with mounted(
            target.uri(), tmp_path / "mnt", tmp_path / "log", **served_by(server)
        ) as mount:
            assert os.listdir(mount.directory) == ["d"]
            target.kill()
            returns = threading.Timer(1, target.restart)
            returns.start()
            try:
                assert (mount / "d/a").read_bytes() == b"b"
            finally:
                returns.join()
