"""The native server: opens without requests, older kernels, refusals."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlfs
from dlfs._native.fuse import is_built
from dlfs.base.units import KIB, MIB
from dlfs.errors import NativeError, UsageError
from dlfs.mount.mountpoint import find_mount, unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.server import choose_server
from tests.fuse.mounting import (
    SECONDS_MAX,
    Mount,
    add_dataset,
    errno_of,
    lacks_uring,
    mounted,
    run_cli,
    served_by,
    stopped,
    wait_for_exit,
)
from tests.fuse.test_semantics import damage
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(not is_built(), reason="built without the native server"),
]


NATIVE = pytest.mark.parametrize("server", ["native", "uring"], indirect=True)


@pytest.fixture(params=["native", "uring"])
def native_mount(
    request: pytest.FixtureRequest, own_volume: Path, tmp_path: Path
) -> Iterator[Mount]:
    if request.param == "uring" and (reason := lacks_uring()):
        pytest.skip(reason)
    options = served_by(request.param)
    with mounted(own_volume, tmp_path / "mnt", tmp_path / "log", **options) as mount:
        expected = "io_uring" if request.param == "uring" else "/dev/fuse"
        assert mount.transport == expected, mount.log.read_text()
        yield mount


def test_cached_entries_and_bytes_need_no_server(native_mount: Mount) -> None:
    folder = os.open(native_mount / "train/b", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(folder) == ["c"]
        with open(
            "c", "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)
        ) as file:
            good = file.read()
        with stopped(native_mount):
            again = os.open("c", os.O_RDONLY, dir_fd=folder)
            assert os.read(again, 1000) == good == b"second" * 100
            os.close(again)
            listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
            assert os.listdir(listing) == ["c"]
            os.close(listing)
    finally:
        os.close(folder)


def test_a_removed_name_is_listed_no_more(own_volume: Path, native_mount: Mount) -> None:
    add_dataset(own_volume, "younger", {b"x": b"x"})  # so that the root's times stay as they are
    wait_for(lambda: os.listdir(native_mount.directory) == ["train", "younger"], "the dataset")
    with dlfs.open(str(own_volume)) as volume:
        volume.remove("train")
    wait_for(lambda: os.listdir(native_mount.directory) == ["younger"], "the removal")


@pytest.mark.parametrize("listed", [True, False])
def test_files_in_path_order(own_volume: Path, native_mount: Mount, listed: bool) -> None:
    """The kernel knows listed files, so the server pushes them into the kernel's cache."""
    files = {b"%04d" % i: b"%d" % i * (i % 300) for i in range(600)}
    add_dataset(own_volume, "many", files)
    damage(own_volume, "many", b"0333")
    wait_for(lambda: (native_mount / "many").exists(), "the dataset")
    if listed:
        assert os.listdir(native_mount / "many") == [os.fsdecode(name) for name in files]
    for name, data in files.items():
        path = native_mount / "many" / os.fsdecode(name)
        if name == b"0333":
            assert errno_of(path.read_bytes) == errno.EIO
        else:
            assert path.read_bytes() == data
    assert "'0333'" in native_mount.log.read_text()


def test_an_empty_dataset(own_volume: Path, native_mount: Mount) -> None:
    add_dataset(own_volume, "empty", {})
    wait_for(lambda: (native_mount / "empty").exists(), "the dataset")
    assert os.listdir(native_mount / "empty") == []
    assert errno_of(lambda: os.stat(native_mount / "empty/x")) == errno.ENOENT


@NATIVE
def test_a_device_that_hangs_holds_no_mount(server: str, tmp_path: Path) -> None:
    files = {b"a": b"first" * 1000, b"b": b"second" * 1000}
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(24 * MIB, block_bytes=4096)])
    with ScriptedTarget([subsystem]) as target:
        dlfs.format_volume(target.uri(), chunk_bytes=4 * KIB)
        write_dataset(target.uri(), "train", files)
        limit_ms = 2000 * SECONDS_MAX  # longer than any wait of this test
        uri = target.uri(timeout_ms=limit_ms, reconnect_ms=limit_ms)
        with (
            mounted(uri, tmp_path / "mnt", tmp_path / "log", **served_by(server)) as mount,
            ThreadPoolExecutor(1) as pool,
        ):
            assert (mount / "train/a").read_bytes() == files[b"a"]
            folder = os.open(mount / "train", os.O_RDONLY | os.O_DIRECTORY)
            target.kill()
            opened = os.open("b", os.O_RDONLY, dir_fd=folder)
            reading = pool.submit(os.pread, opened, 6000, 0)
            absent = errno_of(lambda: os.stat("none", dir_fd=folder))
            assert absent == errno.ENOENT  # others need not wait for the device
            os.kill(mount.pid, signal.SIGTERM)
            wait_for(lambda: find_mount(mount.directory) is None, "the end of the mount")
            assert not reading.done()
            target.restart()
            failed = reading.exception()
            assert failed is not None or reading.result() == files[b"b"]
            assert failed is None or isinstance(failed, OSError)
            os.close(opened)
            os.close(folder)
            wait_for_exit(mount.pid)


@pytest.mark.parametrize("server", ["native", "pyfuse3"])
def test_a_server_that_ends_late_leaves_the_next_mount(
    own_volume: Path, server: str, tmp_path: Path
) -> None:
    with mounted(own_volume, tmp_path / "mnt", tmp_path / "log", fuse=server) as old:
        opened = os.open(old / "train/a", os.O_RDONLY)  # so that it serves on, out of sight
        try:
            unmount(old.directory, lazy=True)
            with mounted(own_volume, tmp_path / "mnt", tmp_path / "next", fuse=server) as mount:
                os.kill(old.pid, signal.SIGTERM)
                wait_for_exit(old.pid)
                assert find_mount(mount.directory) is not None
                assert (mount / "train/a").read_bytes() == b"first" * 100
        finally:
            os.close(opened)


def test_the_choice() -> None:
    assert choose_server(MountOptions()) == "native"
    assert choose_server(MountOptions(fuse="pyfuse3")) == "pyfuse3"
    assert choose_server(MountOptions(incoming="/staging")) == "native"
    with pytest.raises(UsageError, match="'other'"):
        MountOptions(fuse="other")


def test_without_the_library(own_volume: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DLFS_FUSE_LIBRARY", str(tmp_path / "none.so"))
    (tmp_path / "mnt").mkdir()
    done = run_cli("mount", "--fuse", "native", own_volume, tmp_path / "mnt")
    assert done.returncode
    assert "--fuse=pyfuse3" in done.stderr
    from dlfs._native import fuse

    fuse.fuse_library.cache_clear()
    with pytest.raises(NativeError, match="built without it"):
        fuse.fuse_library()
    assert choose_server(MountOptions()) == "pyfuse3"
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(NativeError, match="load"):
        fuse.fuse_library()
    assert choose_server(MountOptions()) == "pyfuse3"
