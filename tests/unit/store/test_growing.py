"""Volumes that are grown: refusals, opening by the record of URIs, and writing to all groups."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

import dlfs
from dlfs._native import abi
from dlfs._native.checksums import crc32c
from dlfs.base.units import KIB, MIB
from dlfs.format.constants import (
    JOINING_OFFSET_BYTES,
    LOCATION_RECORD_OFFSET_BYTES,
    SUPERBLOCK_BYTES,
)
from dlfs.format.geometry import superblock_offsets
from dlfs.format.joining import JoiningRecord
from dlfs.format.superblock import Superblock, encode_superblock
from tests.golden import c_reader
from tests.support.files import write_at
from tests.support.volumes import new_volume, read_dataset, write_dataset

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
    write_dataset(volume, name, samples)
    return samples


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
        assert read_dataset(reader, "first") == first
        reader.refresh()
        assert read_dataset(reader, "second") == second
        assert len(reader.members) == 2 * replicas
        assert list(volume.verify()) == []
    with dlfs.open(old[0]) as volume:  # the others are found by the record of URIs
        assert (read_dataset(volume, "first"), read_dataset(volume, "second")) == (first, second)
        assert volume.uri == info.uri
    found = c_reader.read_volume([new[0]])
    assert found == {(b"first", 1): first, (b"second", 1): second}


def test_a_member_that_is_elsewhere_is_named(files: list[str], tmp_path: Path) -> None:
    with make(files[:1]) as volume:
        samples = fill(volume, "first", 3)
        uuid = volume.grow(files[1], size_bytes=SIZE).members[1].uuid
    moved = Path(files[1]).rename(tmp_path / "moved")
    with pytest.raises(dlfs.NotFoundError, match=f"member {uuid} was there: add the URI"):
        dlfs.open(files[0])
    with dlfs.open([files[0], moved]) as volume:
        assert read_dataset(volume, "first") == samples
    Path(files[1]).write_bytes(bytes(SIZE))
    with pytest.raises(dlfs.FormatError, match=r"no DLFS volume.*add the URI"):
        dlfs.open(files[0])


def test_without_the_record_all_members_are_named(files: list[str]) -> None:
    with make(files[:1]) as volume:
        volume.grow(files[1], size_bytes=SIZE)
    write_at(files[0], LOCATION_RECORD_OFFSET_BYTES + 20, b"x")
    with pytest.raises(dlfs.NotFoundError, match="name every member"):
        dlfs.open(files[0])
    with dlfs.open(files[:2]) as volume:
        assert len(volume.members) == 2


def test_devices_that_cannot_be_members_are_refused(files: list[str], tmp_path: Path) -> None:
    other = new_volume(str(tmp_path / "other"), size_bytes=SIZE, chunk_bytes=CHUNK)
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
    monkeypatch.setattr("dlfs.store.growing.GROUPS_MAX", 5)
    with dlfs.open(new_volume(tmp_path / "first", size_bytes=SIZE, chunk_bytes=CHUNK)) as volume:
        for number in range(1, 5):
            volume.grow(str(tmp_path / f"{number}"), size_bytes=1 * MIB + 2 * CHUNK)
        with pytest.raises(dlfs.LimitError, match="5 groups"):
            volume.grow(str(tmp_path / "last"), size_bytes=SIZE)
        samples = fill(volume, "data", 60)
        assert read_dataset(volume, "data") == samples
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
        assert read_dataset(volume, "data") == samples
    new = str(tmp_path / "new")
    report = dlfs.repair(files[:3], replacements={3: new}, unproven=lambda _reason: None)
    assert report.damaged == ()
    Path(files[2]).unlink()
    with dlfs.open(files[0]) as volume:  # the record of URIs has the new device
        assert volume.members[3].uri == new
        assert read_dataset(volume, "data") == samples


def leave_joining_record(file: str, volume: dlfs.Volume) -> None:
    """Leave the record of an interrupted growth on a device that is then formatted."""
    Path(file).write_bytes(bytes(SIZE))
    write_at(file, JOINING_OFFSET_BYTES, JoiningRecord(volume.uuid, uuid4(), 1).encode())
    dlfs.format_volume(file, chunk_bytes=CHUNK, force=True)


def leave_location_record(file: str, volume: dlfs.Volume) -> None:
    """Use a device for something else after it was removed."""
    volume.grow(file, size_bytes=SIZE)
    volume.shrink([1])
    write_at(file, 4096, b"another file system")


def leave_swap_area(file: str, volume: dlfs.Volume) -> None:
    """Use a device as swap space after it was removed; the first KiB of that is unused."""
    volume.grow(file, size_bytes=SIZE)
    volume.shrink([1])
    write_at(file, 0, bytes(1024) + b"\1".ljust(3062) + b"SWAPSPACE2")


def test_a_torn_superblock_of_an_interrupted_growth_is_overwritten(files: list[str]) -> None:
    with make(files[:1]) as volume:
        with open(files[1], "w+b") as opened:
            opened.truncate(SIZE)
            opened.seek(JOINING_OFFSET_BYTES)
            opened.write(JoiningRecord(volume.uuid, uuid4(), 1).encode())
            opened.seek(superblock_offsets(SIZE)[1] + 512)  # its first sector was not written
            opened.write(b"member")
        assert len(volume.grow(files[1]).members) == 2


@pytest.mark.parametrize("leave", [leave_joining_record, leave_location_record, leave_swap_area])
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
    for offset in superblock_offsets(SIZE):
        write_at(files[1], offset, bytes(SUPERBLOCK_BYTES))
    with pytest.raises(dlfs.FormatError, match="superblocks are lost"):
        dlfs.open(files[:2])
    assert dlfs.repair(files[:2]).damaged == ()
    with dlfs.open(files[:2]) as volume:
        assert read_dataset(volume, "data") == samples


def test_a_removed_device_that_is_gone_is_no_error(files: list[str]) -> None:
    with make(files[:1]) as volume:
        samples = fill(volume, "data", 9)
        volume.grow(files[1], size_bytes=SIZE)
        volume.shrink([0])
    Path(files[0]).unlink()
    with dlfs.open(files[:2]) as volume:
        assert volume.uri == files[1]
        assert read_dataset(volume, "data") == samples
        assert len(volume.grow(files[2], size_bytes=SIZE).members) == 2
    with pytest.raises(dlfs.NotFoundError):
        dlfs.open(files[0])


def test_records_of_other_volumes_are_not_followed(files: list[str]) -> None:
    with make(files[:1]) as volume:
        samples = fill(volume, "data", 9)
        volume.grow(files[1], size_bytes=SIZE)
    with make(files[2:3]) as other:
        for number in range(3):
            fill(other, f"{number}", 1)
        other.grow(files[3], size_bytes=SIZE)
        other.shrink([0])
        assert other.generation > volume_generation(files[:2])
    with dlfs.open([files[0], files[2]]) as volume:  # what is left of the other is no member
        assert volume.uri == ",".join(files[:2])
        assert read_dataset(volume, "data") == samples


def volume_generation(uris: list[str]) -> int:
    with dlfs.open(uris) as volume:
        return volume.generation


def write_superblock(file: str, superblock: Superblock, *patches: tuple[str, int, int]) -> None:
    """Write all copies of a superblock with other values at some offsets."""
    block = bytearray(encode_superblock(superblock))
    for form, offset, value in patches:
        struct.pack_into(form, block, offset, value)
    struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
    for offset in superblock_offsets(superblock.member_bytes):
        write_at(file, offset, block)


def expect_refused(uris: list[str], message: str) -> None:
    """Check that a volume is refused, also by the interface for C."""
    with pytest.raises(dlfs.FormatError, match=message):
        dlfs.open(uris)
    with pytest.raises(c_reader.Failed) as caught:
        c_reader.read_volume(uris)
    assert caught.value.code == abi.E_FORMAT


def test_malformed_tables_of_groups_are_refused(files: list[str]) -> None:
    with make(files[:1]) as volume:
        superblock = volume.session.superblock
    geometry = superblock.geometry
    first = geometry.groups[0]
    write_superblock(files[0], superblock, ("<I", 88, 0))
    expect_refused(files[:1], "expected 1..20 groups of members, got 0")
    second = replace(first, first_chunk=first.end_chunk + 1)
    grown = replace(
        superblock,
        geometry=geometry.with_groups([first, second]),
        member_uuids=(superblock.member_uuids[0], uuid4()),
    )
    rows = (1 << 63) // CHUNK  # their offsets do not fit into 64 bits
    write_superblock(files[0], grown, ("<Q", 3584 + 24 + 8, rows))
    expect_refused(files[:1], "rows in group 1")


def test_a_lagging_member_that_is_too_small_is_refused(files: list[str]) -> None:
    with make(files[:2]) as volume:
        fill(volume, "data", 3)
        newest = volume.session.superblock
    (group,) = newest.geometry.groups
    small = replace(
        newest,
        member_number=1,
        member_bytes=SIZE - 20 * CHUNK,
        generation=newest.generation - 1,
        catalog_runs=(replace(newest.catalog_runs[0], first_chunk=0),),
        geometry=replace(newest.geometry, groups=(replace(group, row_count=group.row_count - 20),)),
    )
    with open(files[1], "r+b") as opened:
        opened.write(bytes(1 * MIB))
    write_superblock(files[1], small)
    expect_refused(files[:2], "expected room for")
