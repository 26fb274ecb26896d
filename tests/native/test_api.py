"""The C interface: its example, built by the command in its head, orders, URIs, options, failures.

That golden volumes are read, and every damage reported, is in ``tests/golden``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
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
from dlfs.base.units import KIB, MIB
from dlfs.block.host import host_identity, host_nqn
from tests.golden import c_reader
from tests.native.test_native import ROOT, compile_target, configure
from tests.support.datasets import random_samples
from tests.support.files import flip_bit
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume, write_dataset

COUNT = 500
EXAMPLE = ROOT / "native/examples/epoch.c"


def write_volume(members: Sequence[Path], **layout: int) -> None:
    uris = new_volume([str(path) for path in members], size_bytes=8 * MIB, **layout)
    write_dataset(uris, "numbers", random_samples(COUNT))


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


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """The example with all of libdlfs, under ASan and UBSan."""
    folder = configure("address")
    compile_target(folder, "example_epoch")
    return folder / "tests" / "example_epoch"


def damage(image: Path, dataset_name: str, index: int) -> dlfs.SampleInfo:
    """Flip one bit of the first byte of a sample."""
    with dlfs.open(str(image)) as volume, volume[dataset_name] as dataset:
        info = dataset.stat(index)
    flip_bit(image, info.offset_bytes)
    return info


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
    info = damage(damaged, "numbers", 77)
    done = run(program, "numbers", "0", str(damaged))
    assert done.returncode == 1
    assert f"{damaged} at byte {info.offset_bytes}, {info.length_bytes} bytes" in done.stderr
    assert "checksum mismatch" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_is_clean_under_the_sanitizers(sanitized, one, three, tmp_path):
    damaged = tmp_path / "damaged.img"
    shutil.copy(one, damaged)
    damage(damaged, "numbers", 77)
    for members in ([one], three, three[1:]):
        done = run(sanitized, "numbers", "7", *map(str, members))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == expected_lines([one] if members == [one] else three, 7)
    with nvme_target([one]) as target:
        done = run(sanitized, "numbers", "7", target.uri())
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == expected_lines([one], 7)
    for dataset, uri in (
        ("numbers", str(damaged)),
        ("nothing", str(one)),
        ("numbers", str(tmp_path / "none")),
        ("numbers", "spdk:trtype=PCIe traddr=0000:5e:00.0"),
        ("numbers", "nvme-tcp://h"),
        ("numbers", "x" * 9000),
    ):
        done = run(sanitized, dataset, "0", uri)
        assert (done.returncode, done.stderr.count("epoch: ")) == (1, 1), done.stderr
        assert "Sanitizer" not in done.stderr


# ---- URIs ----------------------------------------------------------------------------------------


def nvme_target(images: Sequence[Path], **how: object) -> ScriptedTarget:
    """A target with a namespace for each image, numbered from 1."""
    spaces = [
        Namespace(image.stat().st_size, nsid=number, path=image)
        for number, image in enumerate(images, 1)
    ]
    return ScriptedTarget([Subsystem(DEFAULT_NQN, spaces, **how)])


@pytest.mark.parametrize("options", ["", "&hdgst=1&ddgst=1", "&path=127.0.0.1:1&reconnect_ms=0"])
def test_members_over_nvme_tcp(program, three, options):
    expected = expected_lines(three, 3)
    with nvme_target(three[:2]) as target:
        uris = [target.uri(nsid=2) + options, f"file:{three[2]}", target.uri(nsid=1) + options]
        done = run(program, "numbers", "3", *uris)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == expected
        assert target.violations == []
        done = run(program, "numbers", "3", *uris[:2])
        assert (done.returncode, done.stdout.splitlines()) == (0, expected)


def test_c_and_python_are_one_host_to_a_target(one):
    identities = []
    with nvme_target([one], hosts=[host_nqn()]) as target:
        for opened in (c_reader.mounted([target.uri()]), dlfs.open(target.uri())):
            with opened:
                identities += [bytes(known) for known in target.subsystems[0].hosts_connected()]
        other = target.uri() + "&hostnqn=nqn.2024-01.org.example:stranger"
        with pytest.raises(c_reader.Failed, match="open nvme-tcp://") as failed:
            c_reader.read_volume([other])
    assert failed.value.code == -errno.EACCES
    assert set(identities) == {host_identity(None, None)[1].bytes}


def test_a_member_that_is_lost_is_named(three):
    with nvme_target(three[:1]) as target:
        uris = [target.uri(reconnect_ms=0, connect_ms=500), *map(str, three[1:])]
        target.kill()
        with c_reader.mounted(uris) as (c, volume), c_reader.opened(c, volume, b"numbers") as data:
            assert c_reader.read_dataset(c, data) == random_samples(COUNT)
        with pytest.raises(c_reader.Failed) as failed:
            c_reader.read_volume(uris[:2])
        assert failed.value.code == abi.E_LOST
        for told in ("got 1 that can be read; missing: number 0, 2", f"open {uris[0]}: "):
            assert told in str(failed.value)


@pytest.mark.parametrize(
    ("uri", "code", "told"),
    [
        ("", errno.EINVAL, "expected a path or a URI, got ''"),
        ("nvme-tcp://host/disk0?nsid=1", errno.EINVAL, "expected an NQN"),
        ("ftp://host/x", errno.EINVAL, "a file of that name is ./ftp://host/x"),
        ("unix:/run/dlfs.sock", errno.EINVAL, "a service is read-only and no device"),
        ("mem:64MiB", errno.ENOTSUP, "mem: needs the Python package"),
        ("nvme-tcp+discover://host", errno.ENOTSUP, "discover: needs the Python package"),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0", errno.ENOTSUP, "spdk: needs the Python package"),
    ],
)
def test_a_wrong_uri_is_no_missing_member(three, uri, code, told):
    with pytest.raises(c_reader.Failed) as failed:
        c_reader.read_volume([*map(str, three[:2]), uri])
    assert failed.value.code == -code
    assert told in str(failed.value)


def test_a_host_that_is_none(one):
    uri = f"nvme-tcp://none.invalid/{DEFAULT_NQN}?nsid=1"
    with pytest.raises(c_reader.Failed, match=r"none\.invalid") as failed:
        c_reader.read_volume([uri])
    assert failed.value.code in (abi.E_NOT_FOUND, abi.E_LOST)  # no resolver: E_LOST


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 70_000, MIB])
def test_a_file_that_is_no_volume(tmp_path, size):
    path = tmp_path / "noise"
    path.write_bytes(b"x" * size)
    for opened in (dlfs.open, lambda uri: c_reader.read_volume([uri])):
        with pytest.raises((dlfs.FormatError, c_reader.Failed), match="no DLFS volume") as caught:
            opened(str(path))
        assert f"open {path}: " in str(caught.value)
        assert getattr(caught.value, "code", abi.E_FORMAT) == abi.E_FORMAT


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(c_reader.Failed, match="a regular file or a block device") as caught:
            c_reader.read_volume([str(path)])
        assert caught.value.code == -errno.ENOTBLK


def test_a_file_whose_name_looks_like_a_uri(one, tmp_path, monkeypatch):
    shutil.copy(one, tmp_path / "a:b, c")
    monkeypatch.chdir(tmp_path)
    expected = c_reader.read_volume([str(one)])
    for uri in ("./a:b, c", "file:a%3Ab%2C%20c", str(tmp_path / "a:b, c")):
        assert c_reader.read_volume([uri]) == expected


# ---- options, epochs, failures -------------------------------------------------------------------


def test_fields_of_zero_are_defaults(one):
    with c_reader.mounted([str(one)]) as (c, volume):
        dataset = c_void_p()
        for options in (None, byref(c_reader.OpenOptions())):
            assert c.dlfs_open(volume, b"numbers", options, None, 0, byref(dataset)) == 0
            c_reader.epoch(c, dataset)  # all zeros: storage order, one rank
            got = [index for batch in c_reader.batches(c, dataset, 64) for index, _ in batch]
            assert sorted(got) == list(range(COUNT))
            assert got == c_reader.order(c, dataset)
            with dlfs.open(str(one)) as in_python, in_python["numbers"] as numbers:
                batches = numbers.batches(64, shuffle=None)
                assert got == [index for batch in batches for index in batch.indices.tolist()]
            assert c.dlfs_close(dataset) == 0


def test_reserved_fields_are_checked(one):
    with c_reader.mounted([str(one)]) as (c, volume):
        with (
            pytest.raises(c_reader.Failed, match="expected reserved = 0, got 7") as failed,
            c_reader.opened(c, volume, b"numbers", reserved=7),
        ):
            pass
        assert failed.value.code == -errno.EINVAL
        with c_reader.opened(c, volume, b"numbers") as dataset:
            assert c.dlfs_begin(dataset, byref(c_reader.Epoch(reserved=1))) == -errno.EINVAL


def test_an_epoch_is_ended(one):
    batch = ctypes.POINTER(abi.Batch)()
    out = (ctypes.c_uint64 * 1)()
    with (
        c_reader.mounted([str(one)]) as (c, volume),
        c_reader.opened(c, volume, b"numbers") as dataset,
    ):
        c.dlfs_end(None)
        c.dlfs_end(dataset)  # there is none
        for _ in range(3):
            c_reader.epoch(c, dataset, seed=9, order=abi.ORDER_GLOBAL)
            assert c.dlfs_bread(dataset, 10, byref(batch)) == 0
            c.dlfs_end(dataset)
            c.dlfs_end(dataset)
            offsets = ctypes.cast(batch.contents.offsets, ctypes.POINTER(ctypes.c_int64))
            lengths = ctypes.cast(batch.contents.lengths, ctypes.POINTER(ctypes.c_int64))
            indices = ctypes.cast(batch.contents.indices, ctypes.POINTER(ctypes.c_uint64))
            for i in range(10):  # the batch is the caller's still
                sample = ctypes.string_at((batch.contents.base or 0) + offsets[i], lengths[i])
                assert sample == c_reader.read(c, dataset, indices[i])
            library().dlfs_batch_release(batch)
            another = ctypes.POINTER(abi.Batch)()
            assert c.dlfs_bread(dataset, 1, byref(another)) == -errno.EINVAL
            assert c.dlfs_order(dataset, 0, 1, out) == -errno.EINVAL
        c_reader.epoch(c, dataset, seed=9, order=abi.ORDER_GLOBAL)  # dlfs_close ends this one


@pytest.mark.parametrize("over_nvme", [False, True])
def test_a_failure_names_what_python_names(one, tmp_path, over_nvme):
    damaged = tmp_path / "damaged.img"
    shutil.copy(one, damaged)
    info = damage(damaged, "numbers", 77)
    with contextlib.ExitStack() as stack:
        uri = stack.enter_context(nvme_target([damaged])).uri() if over_nvme else str(damaged)
        volume = stack.enter_context(dlfs.open(uri))
        with pytest.raises(dlfs.ChecksumError) as in_python:
            volume["numbers"].read([77])
        c, mounted = stack.enter_context(c_reader.mounted([uri]))
        dataset = stack.enter_context(c_reader.opened(c, mounted, b"numbers"))
        buffer, failure = ctypes.create_string_buffer(info.length_bytes), abi.Failure()
        code = c.dlfs_read_sample(dataset, 77, buffer, info.length_bytes, byref(failure))
        assert code == failure.code == abi.E_CHECKSUM
        assert (failure.index, failure.member) == (77, 0)
        assert failure.offset_bytes == info.offset_bytes
        told = c_reader.describe(c, dataset, failure)
        where = f"{uri} at byte {info.offset_bytes}, {info.length_bytes} bytes: expected CRC32C "
        assert told.startswith(f"sample 77 '{info.path.decode()}' of dataset 'numbers': {where}")
        assert told[told.index(where) :] in str(in_python.value)
        c_reader.epoch(c, dataset)
        with pytest.raises(c_reader.Failed) as of_batch:
            list(c_reader.batches(c, dataset, COUNT))
        assert str(of_batch.value) == f"{abi.E_CHECKSUM}: {told}"
        assert c.dlfs_read(dataset, 77, buffer, info.length_bytes) == abi.E_CHECKSUM


def test_failures_that_are_no_damage(one):
    buffer, failure = ctypes.create_string_buffer(1 << 20), abi.Failure()
    with (
        c_reader.mounted([str(one)]) as (c, volume),
        c_reader.opened(c, volume, b"numbers") as dataset,
        dlfs.open(str(one)) as in_python,
    ):
        info = max(map(in_python["numbers"].stat, range(COUNT)), key=lambda stat: stat.length_bytes)
        code = c.dlfs_read_sample(dataset, info.index, buffer, 1, byref(failure))
        assert code == failure.code == -errno.ERANGE
        told = c_reader.describe(c, dataset, failure)
        assert f"{one} at byte {info.offset_bytes}, {info.length_bytes} bytes: " in told
        code = c.dlfs_read_sample(dataset, COUNT, buffer, 1, byref(failure))
        assert code == failure.code == -errno.EINVAL
        for wrong in ({}, {"index": COUNT}, {"member": 1}, {"code": 0}):
            failure = abi.Failure(**{"code": -errno.EINVAL, "index": COUNT, **wrong})
            assert c.dlfs_describe_failure(dataset, byref(failure), None, 0) == -errno.EINVAL
        assert c.dlfs_describe_failure(dataset, None, None, 0) == -errno.EINVAL
        assert c.dlfs_read_sample(dataset, COUNT, buffer, 1, None) == -errno.EINVAL


def test_a_message_is_untouched_on_success(three, tmp_path):
    c, volume, dataset = c_reader.interface(), c_void_p(), c_void_p()
    uris = [str(tmp_path / "none"), *map(str, three[1:])]
    members = (ctypes.c_char_p * 3)(*map(str.encode, uris))
    message = ctypes.create_string_buffer(b"as it was", c_reader.MESSAGE_BYTES)
    assert c.dlfs_mount(members, 3, message, len(message), byref(volume)) == 0
    assert c.dlfs_open(volume, b"numbers", None, message, len(message), byref(dataset)) == 0
    assert message.value == b"as it was"
    assert c.dlfs_close(dataset) == c.dlfs_unmount(volume) == 0


def test_a_failure_without_a_message_is_the_same_code(one, tmp_path):
    c, volume = c_reader.interface(), c_void_p()
    for uri, code in (("", -errno.EINVAL), (str(tmp_path / "none"), -errno.ENOENT)):
        members = (ctypes.c_char_p * 1)(uri.encode())
        short = ctypes.create_string_buffer(b"x" * 10)
        assert c.dlfs_mount(members, 1, None, 0, byref(volume)) == code
        assert c.dlfs_mount(members, 1, short, 5, byref(volume)) == code
        assert len(short.value) == 4
    assert not volume


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
            {"rank": 1},
            {"rank": 2, "world_size": 2},
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
        for version, depth, told in (
            (2, 0, "no dataset"),
            (1, 1 << 20, "make a reader of dataset"),
        ):
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
