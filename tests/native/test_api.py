"""The C interface: its example, built by the command in its head, orders, arguments, devices.

That every released volume is read, and every damage reported, is in ``tests/golden``.
"""

from __future__ import annotations

import ctypes
import errno
import re
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import byref, c_void_p
from pathlib import Path

import pytest

import dlfs
from dlfs._native import abi
from dlfs._native.checksums import crc32c
from dlfs._native.device import NativeDevice
from dlfs._native.library import library
from dlfs.testing.datasets import random_samples
from dlfs.units import KIB, MIB
from tests.golden import c_reader
from tests.native.test_native import ROOT

COUNT = 500
EXAMPLE = ROOT / "native/examples/epoch.c"


def write_volume(members: Sequence[Path], **layout: int) -> None:
    uris = [str(path) for path in members]
    dlfs.format_volume(uris, size_bytes=8 * MIB, **layout)
    with dlfs.open(uris) as volume, volume.writer("numbers") as writer:
        for name, data in random_samples(COUNT).items():
            writer.add(name, data)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("one") / "volume.img"
    write_volume([path])
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[Path]:
    """Three members that hold every chunk twice."""
    folder: Path = tmp_path_factory.mktemp("three")
    members = [folder / f"member{number}.img" for number in range(3)]
    write_volume(members, replicas=2, chunk_bytes=16 * KIB)
    return members


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The example, built by the command in its head."""
    if shutil.which("cc") is None:
        pytest.skip("no cc (package gcc)")
    folder: Path = tmp_path_factory.mktemp("program")
    for name in ("native", "dlfs"):
        (folder / name).symlink_to(ROOT / name)
    lines = re.findall(r"^ \*     (.*)$", EXAMPLE.read_text(), re.MULTILINE)
    command = " ".join(line.rstrip("\\") for line in lines if not line.startswith("./"))
    assert command.startswith("cc ")
    subprocess.run(["sh", "-c", f"{command} -Wall -Wextra -Werror"], cwd=folder, check=True)
    return folder / "epoch"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def expected_lines(members: Sequence[Path], seed: int) -> list[str]:
    """What the example prints, by the Python interface."""
    lines = []
    with dlfs.open([str(path) for path in members]) as volume, volume["numbers"] as dataset:
        for batch in dataset.batches(50, seed=seed):
            for index, view in zip(batch.indices.tolist(), batch, strict=True):
                path = dataset.path(index).decode()
                lines.append(f"{index} {len(view)} {crc32c(bytes(view)):08x} {path}")
    return lines


def test_the_example_reads_an_epoch(program, one):
    done = run(program, "numbers", "7", str(one))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected_lines([one], 7)
    assert len(done.stdout.splitlines()) == COUNT


def test_the_example_does_without_a_member(program, three):
    expected = expected_lines(three, 11)
    for missing in range(3):
        left = [str(path) for number, path in enumerate(three) if number != missing]
        done = run(program, "numbers", "11", *left)
        assert (done.returncode, done.stdout.splitlines()) == (0, expected)
    done = run(program, "numbers", "11", str(three[0]))
    assert done.returncode == 1
    assert "expected 3 members, in 2 copies, got 1" in done.stderr


def test_the_example_says_what_is_wrong(program, one, tmp_path):
    assert run(program).returncode == 2
    (tmp_path / "noise").write_bytes(bytes(MIB))
    for dataset, member, told in (
        ("numbers", str(tmp_path / "none"), "No such file or directory"),
        ("numbers", str(tmp_path / "noise"), "malformed structure"),
        ("nothing", str(one), "there is no dataset 'nothing'"),
    ):
        done = run(program, dataset, "0", member)
        assert (done.returncode, done.stdout) == (1, "")
        assert told in done.stderr


def test_a_damaged_sample_is_a_failure_of_its_batch(program, one, tmp_path):
    damaged = tmp_path / "damaged.img"
    shutil.copy(one, damaged)
    with dlfs.open(str(one)) as volume, volume["numbers"] as dataset:
        info = dataset.stat(77)
    with damaged.open("r+b") as file:
        file.seek(info.offset_bytes)
        byte = file.read(1)[0]
        file.seek(info.offset_bytes)
        file.write(bytes([byte ^ 1]))
    done = run(program, "numbers", "0", str(damaged))
    assert done.returncode == 1
    assert "checksum mismatch" in done.stderr


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
@pytest.mark.parametrize(("world_size", "position"), [(1, 0), (3, 0), (2, 123)])
def test_ranks_and_orders_are_those_of_python(three, shuffle, world_size, position):
    members = [str(path) for path in three]
    kind = {"global": abi.ORDER_GLOBAL, "chunk": abi.ORDER_CHUNK, None: abi.ORDER_STORAGE}[shuffle]
    with (
        dlfs.open(members) as volume,
        volume["numbers"] as dataset,
        c_reader.mounted(members) as (c, mounted),
        c_reader.opened(c, mounted, b"numbers", memory_bytes=MIB, depth=8) as opened,
    ):
        for rank in range(world_size):
            how = {"seed": 5, "epoch": 2, "shuffle": shuffle}
            epoch = dataset.batches(16, rank=rank, world_size=world_size, **how)
            state = {**epoch.state(), "position": position}
            expected = [
                (index, bytes(view))
                for batch in epoch.resume(state)
                for index, view in zip(batch.indices.tolist(), batch, strict=True)
            ]
            c_reader.epoch(
                c,
                opened,
                seed=5,
                epoch=2,
                order=kind,
                position=position,
                rank=rank,
                world_size=world_size,
            )
            got = [pair for batch in c_reader.batches(c, opened, 16) for pair in batch]
            assert got == expected
            assert c_reader.order(c, opened)[position + rank :: world_size] == [i for i, _ in got]


def test_wrong_arguments(one):
    with (
        c_reader.mounted([str(one)]) as (c, volume),
        c_reader.opened(c, volume, b"numbers") as dataset,
    ):
        batch = ctypes.POINTER(abi.Batch)()
        out = (ctypes.c_uint64 * 2)()
        assert c.dlfs_bread(dataset, 1, byref(batch)) == -errno.EINVAL  # no epoch yet
        assert c.dlfs_order(dataset, 0, 1, out) == -errno.EINVAL
        for wrong in (
            {"world_size": 0},
            {"rank": 1},
            {"position": COUNT + 1},
            {"order": 9},
            {"plan": 9},
            {"reserved": 1},
        ):
            with pytest.raises(c_reader.Failed, match=str(-errno.EINVAL)):
                c_reader.epoch(c, dataset, **{"order": abi.ORDER_GLOBAL, **wrong})
            assert c.dlfs_bread(dataset, 1, byref(batch)) == -errno.EINVAL
        c_reader.epoch(c, dataset, order=abi.ORDER_GLOBAL, position=COUNT)
        assert c.dlfs_bread(dataset, 1, byref(batch)) == abi.E_END
        assert c.dlfs_bread(dataset, 0, byref(batch)) == -errno.EINVAL
        assert c.dlfs_order(dataset, COUNT - 1, 2, out) == -errno.EINVAL
        assert c.dlfs_find(dataset, b"none") == abi.E_NOT_FOUND
        assert c.dlfs_find(dataset, b"n" * 5000) == abi.E_NOT_FOUND
        text = ctypes.create_string_buffer(4096)
        for call in (
            c.dlfs_path(dataset, COUNT, text, 4096),
            c.dlfs_path(dataset, 0, text, 4095),
            c.dlfs_length(dataset, COUNT),
            c.dlfs_read(dataset, COUNT, text, 4096),
        ):
            assert call == -errno.EINVAL
        longest = max(range(COUNT), key=lambda index: c.dlfs_length(dataset, index))
        assert c.dlfs_read(dataset, longest, text, 10) == -errno.ERANGE
        assert c.dlfs_unmount(volume) == -errno.EBUSY
        for version, depth, told in ((2, 0, "no dataset"), (1, 1 << 20, "a reader of dataset")):
            with (
                pytest.raises(c_reader.Failed, match=told),
                c_reader.opened(c, volume, b"numbers", version, depth=depth),
            ):
                pass
    for members in ([], ["x"] * 65):
        with pytest.raises(c_reader.Failed, match=r"expected 1\.\.64 members"):
            c_reader.read_volume(members)
    assert c.dlfs_close(None) == c.dlfs_unmount(None) == 0


def test_devices_that_the_caller_opened(three):
    c = c_reader.interface()
    devices = [NativeDevice.open_file(str(path), uri=str(path)) for path in three]
    handles = (c_void_p * 3)(devices[2].handle, None, devices[0].handle)
    volume = c_void_p()
    assert c.dlfs_mount_devices(handles, 3, None, 0, byref(volume)) == 0
    with c_reader.opened(c, volume, b"numbers") as dataset:
        assert c_reader.read_dataset(c, dataset) == random_samples(COUNT)
        stats = abi.ReaderStats()
        library().dlfs_reader_get_stats(c.dlfs_dataset_reader(dataset), byref(stats))
        assert stats.samples >= 2 * COUNT
        directory = c.dlfs_dataset_directory(dataset)
        assert library().dlfs_directory_count(directory) == COUNT
    assert c.dlfs_unmount(volume) == 0
    for device in devices:
        device.close()  # they are still the caller's
