"""Volumes that are grown: refusals, opening by the record of URIs, and writing to all groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

import dlfs
from dlfs.format.constants import (
    JOINING_OFFSET_BYTES,
    LOCATION_RECORD_OFFSET_BYTES,
    SUPERBLOCK_BYTES,
)
from dlfs.format.geometry import superblock_offsets
from dlfs.format.joining import JoiningRecord
from dlfs.units import KIB, MIB

SIZE = 2 * MIB
CHUNK = 16 * KIB


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"member{number}") for number in range(4)]


def make(files: list[str], *, replicas: int = 1) -> dlfs.Volume:
    dlfs.format_volume(files, size_bytes=SIZE, chunk_bytes=CHUNK, replicas=replicas)
    return dlfs.open(files)


def fill(volume: dlfs.Volume, name: str, count: int) -> dict[bytes, bytes]:
    samples = {b"%d" % i: bytes([i]) * CHUNK for i in range(count)}
    with volume.writer(name) as writer:
        for path, data in samples.items():
            writer.add(path, data)
    return samples


def read(volume: dlfs.Volume, name: str) -> dict[bytes, bytes]:
    with volume[name] as dataset, dataset.read(range(len(dataset))) as batch:
        return dict(zip(dataset.paths(), batch.to_list(), strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_new_datasets_use_the_new_members(files: list[str], replicas: int) -> None:
    old, new = files[:replicas], files[replicas : 2 * replicas]
    with make(old, replicas=replicas) as volume, dlfs.open(old) as reader:
        first = fill(volume, "first", 30)
        reader.refresh()
        before = volume.capacity_bytes
        info = volume.grow(new, size_bytes=SIZE)
        assert info.uri == volume.uri == ",".join([*old, *new])
        assert volume.capacity_bytes == 2 * before
        second = fill(volume, "second", 60)
        assert read(reader, "first") == first
        reader.refresh()
        assert read(reader, "second") == second
        assert len(reader.members) == 2 * replicas
        assert list(volume.verify()) == []
    with dlfs.open(old[0]) as volume:  # the others are found by the record of URIs
        assert (read(volume, "first"), read(volume, "second")) == (first, second)
        assert volume.uri == info.uri


def test_a_member_that_is_elsewhere_is_named(files: list[str], tmp_path: Path) -> None:
    with make(files[:1]) as volume:
        samples = fill(volume, "first", 3)
        uuid = volume.grow(files[1], size_bytes=SIZE).members[1].uuid
    moved = Path(files[1]).rename(tmp_path / "moved")
    with pytest.raises(dlfs.NotFoundError, match=f"member {uuid} was there: add the URI"):
        dlfs.open(files[0])
    with dlfs.open([files[0], moved]) as volume:
        assert read(volume, "first") == samples
    Path(files[1]).write_bytes(bytes(SIZE))
    with pytest.raises(dlfs.FormatError, match=r"no DLFS volume.*add the URI"):
        dlfs.open(files[0])


def test_without_the_record_all_members_are_named(files: list[str]) -> None:
    with make(files[:1]) as volume:
        volume.grow(files[1], size_bytes=SIZE)
    with open(files[0], "r+b") as file:
        file.seek(LOCATION_RECORD_OFFSET_BYTES + 20)
        file.write(b"x")
    with pytest.raises(dlfs.NotFoundError, match="name every member"):
        dlfs.open(files[0])
    with dlfs.open(files[:2]) as volume:
        assert len(volume.members) == 2


def test_devices_that_cannot_be_members_are_refused(files: list[str], tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    dlfs.format_volume(other, size_bytes=SIZE, chunk_bytes=CHUNK)
    with make(files[:2], replicas=2) as volume:
        generation = volume.generation
        with pytest.raises(dlfs.UsageError, match="at least 2 new devices, got 1"):
            volume.grow(files[2], size_bytes=SIZE)
        with pytest.raises(dlfs.UsageError, match="is a member of the volume already"):
            volume.grow([files[2], files[0]], size_bytes=SIZE)
        with pytest.raises(dlfs.ExistsError, match=r"is a member of volume .* already"):
            volume.grow([files[2], other], size_bytes=SIZE)
        with pytest.raises(dlfs.UsageError, match="no such file"):
            volume.grow(files[2:4])
        with pytest.raises(dlfs.UsageError, match="expected at least"):
            volume.grow(files[2:4], size_bytes=1 * MIB)
        assert not Path(files[2]).exists()
        volume.refresh()
        assert volume.generation == generation
        assert len(volume.grow([files[2], other], size_bytes=SIZE, force=True).members) == 4


def test_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlfs.resizing.growing.GROUPS_MAX", 5)
    first = str(tmp_path / "first")
    dlfs.format_volume(first, size_bytes=SIZE, chunk_bytes=CHUNK)
    with dlfs.open(first) as volume:
        for number in range(1, 5):
            volume.grow(str(tmp_path / f"{number}"), size_bytes=1 * MIB + 2 * CHUNK)
        with pytest.raises(dlfs.LimitError, match="5 groups"):
            volume.grow(str(tmp_path / "last"), size_bytes=SIZE)
        samples = fill(volume, "data", 60)
        assert read(volume, "data") == samples
        assert list(volume.verify()) == []


def test_uris_that_are_too_long_are_refused_before_anything_is_written(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(files[:1]) as volume:
        fill(volume, "first", 10)
        Path(files[1]).write_bytes(b"\1" * SIZE)
        before = [Path(file).read_bytes() for file in files[:2]]
        monkeypatch.setattr("dlfs.format.locations.LOCATION_RECORD_BYTES_MAX", 100)
        with pytest.raises(dlfs.LimitError, match="record the URIs of 2 members: expected at most"):
            volume.grow(files[1], force=True)
    for file, content in zip(files, before, strict=False):
        after = Path(file).read_bytes()
        assert after[: 128 * KIB] == content[: 128 * KIB]
        assert after[192 * KIB :] == content[192 * KIB :], "more than the lock record differs"


def test_a_lost_member_of_a_later_group_is_repaired(files: list[str], tmp_path: Path) -> None:
    with make(files[:2], replicas=2) as volume:
        volume.grow(files[2:4], size_bytes=3 * MIB)
        samples = fill(volume, "data", 90)
    Path(files[3]).unlink()
    with dlfs.open(files[:3]) as volume:
        assert read(volume, "data") == samples
    new = str(tmp_path / "new")
    report = dlfs.repair(files[:3], replacements={3: new}, unproven=lambda _reason: None)
    assert report.damaged == ()
    Path(files[2]).unlink()
    with dlfs.open([*files[:2], new]) as volume:
        assert read(volume, "data") == samples


def leave_joining_record(file: str, volume: dlfs.Volume) -> None:
    """Leave the record of an interrupted growth on a device that is then formatted."""
    Path(file).write_bytes(bytes(SIZE))
    with open(file, "r+b") as opened:
        opened.seek(JOINING_OFFSET_BYTES)
        opened.write(JoiningRecord(volume.uuid, uuid4(), 1).encode())
    dlfs.format_volume(file, chunk_bytes=CHUNK, force=True)


def leave_location_record(file: str, volume: dlfs.Volume) -> None:
    """Use a device for something else after it was removed."""
    volume.grow(file, size_bytes=SIZE)
    volume.shrink([1])
    with open(file, "r+b") as opened:
        opened.seek(4096)
        opened.write(b"another file system")


def test_a_torn_superblock_of_an_interrupted_growth_is_overwritten(files: list[str]) -> None:
    with make(files[:1]) as volume:
        with open(files[1], "w+b") as opened:
            opened.truncate(SIZE)
            opened.seek(JOINING_OFFSET_BYTES)
            opened.write(JoiningRecord(volume.uuid, uuid4(), 1).encode())
            opened.seek(superblock_offsets(SIZE)[1] + 512)  # its first sector was not written
            opened.write(b"member")
        assert len(volume.grow(files[1]).members) == 2


@pytest.mark.parametrize("leave", [leave_joining_record, leave_location_record])
def test_records_do_not_permit_to_overwrite_later_data(
    files: list[str], leave: Callable[[str, dlfs.Volume], None]
) -> None:
    with make(files[:1]) as volume:
        leave(files[1], volume)
        before = Path(files[1]).read_bytes()
        with pytest.raises(dlfs.ExistsError):
            volume.grow(files[1])
        assert Path(files[1]).read_bytes() == before


def test_lost_superblocks_of_a_grown_volume_are_repaired(files: list[str]) -> None:
    with make(files[:1]) as volume:
        volume.grow(files[1], size_bytes=SIZE)
        samples = fill(volume, "data", 90)
    with open(files[1], "r+b") as file:
        for offset in superblock_offsets(SIZE):
            file.seek(offset)
            file.write(bytes(SUPERBLOCK_BYTES))
    with pytest.raises(dlfs.FormatError, match="superblocks are lost"):
        dlfs.open(files[:2])
    assert dlfs.repair(files[:2]).damaged == ()
    with dlfs.open(files[:2]) as volume:
        assert read(volume, "data") == samples
