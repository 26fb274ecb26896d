"""Repair: what was lost, stale or damaged is whole again, and any other member can then be lost."""

from __future__ import annotations

import random
from pathlib import Path
from uuid import UUID, uuid4

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, open_device
from dlfs.format.constants import JOINING_BYTES, JOINING_OFFSET_BYTES
from dlfs.format.geometry import DataSpace, superblock_offsets
from dlfs.format.joining import JoiningRecord
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import Generation, load_generation
from tests.support.devices import Faults, FaultyDevice
from tests.support.files import write_at
from tests.support.volumes import (
    flip_copies,
    new_volume,
    read_dataset,
    read_datasets,
    write_dataset,
)

MEMBERS = 3
MEMBER_BYTES = 4 * MIB
SAMPLES = {
    f"d{i % 3}/{i:03}".encode(): random.Random(i).randbytes(i * 173 % 9000) for i in range(120)
} | {b"large": random.Random(-1).randbytes(300_000)}
EXPECTED = {"data": SAMPLES, "empty": {}}


def fill(uris: list[str], name: str = "data") -> None:
    write_dataset(uris, name, SAMPLES)


def read_all(uris: list[str]) -> dict[str, dict[bytes, bytes]]:
    return {name: samples for (name, _), samples in read_datasets(uris).items()}


def check_whole(uris: list[str]) -> None:
    """Nothing is wrong, everything is there, and any one member can be lost."""
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []
        assert [m.state for m in volume.members] == ["current"] * MEMBERS
        order = list(volume.uri.split(","))
    for number in range(MEMBERS):
        assert read_all(order[:number] + order[number + 1 :]) == EXPECTED
    with dlfs.open(uris) as volume:
        with volume.writer("after") as writer:
            writer.add("x", b"after the repair")
        volume.remove("after")
    for uri in uris:
        with open_device(uri) as device:
            assert not any(device.read(JOINING_OFFSET_BYTES, JOINING_BYTES))


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / f"member{i}") for i in range(MEMBERS)]
    dlfs.format_volume(
        made, size_bytes=MEMBER_BYTES, chunk_bytes=16 * KIB, block_bytes=512, replicas=2
    )
    fill(made)
    with dlfs.open(made) as volume:
        volume.writer("empty").seal()
    return made


def load(uris: list[str]) -> Generation:
    devices = open_members(uris)
    generation = load_generation(devices)
    close_devices(devices)
    return generation


# ---- a member is replaced ------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(MEMBERS))
@pytest.mark.parametrize("named", [True, False])
def test_a_lost_member_is_replaced(
    uris: list[str], tmp_path: Path, number: int, named: bool
) -> None:
    old = load(uris)
    Path(uris[number]).unlink()
    new = [*uris[:number], str(tmp_path / "new"), *uris[number + 1 :]]
    given = uris if named else uris[:number] + uris[number + 1 :]
    told: list[tuple[int, int]] = []
    report = dlfs.repair(
        given,
        replacements={number: new[number]},
        progress=lambda done, total: told.append((done, total)),
    )
    assert (report.uri, report.replaced, report.damaged) == (",".join(new), (number,), ())
    assert report.uuid == old.superblock.volume_uuid
    assert report.generation == old.superblock.generation + 2
    assert report.written_bytes > 300_000
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 0
    uuids = load(new).superblock.member_uuids
    assert [a == b for a, b in zip(uuids, old.superblock.member_uuids, strict=True)] == [
        i != number for i in range(MEMBERS)
    ]
    check_whole(new)


def test_a_member_that_is_replaced_while_it_is_there_gives_what_no_other_has(
    uris: list[str], tmp_path: Path
) -> None:
    generation = load(uris)
    space = spaces(generation)[2]
    for address in taken_addresses(uris):
        for copy in range(2):
            if space.resolve(address, copy)[0] != 1 and space.resolve(address, 1 - copy)[0] == 1:
                flip_copies(generation, space, address, copy)
    before = Path(uris[1]).read_bytes()
    new = str(tmp_path / "new")
    report = dlfs.repair(uris, replacements={1: new})
    assert (report.damaged, report.replaced) == ((), (1,))
    assert Path(uris[1]).read_bytes() == before
    check_whole([uris[0], new, uris[2]])


def test_the_old_device_is_not_taken_back(uris: list[str], tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    dlfs.repair(uris, replacements={1: new})
    with pytest.raises(dlfs.FormatError, match=r"member1.*was replaced"):
        dlfs.open([*uris, new])
    with dlfs.open(uris) as volume:  # instead of the new one
        assert volume.members[1].state == "degraded"
        assert "was member 1 until generation 3, and was replaced" in str(volume.members[1].reason)
    check_whole([uris[0], new, uris[2]])


def test_a_member_that_was_replaced_is_not_filled_by_one_that_went_on(
    tmp_path: Path,
) -> None:
    here, there, new = (str(tmp_path / name) for name in ("here", "there", "new"))
    dlfs.format_volume([here, there], size_bytes=MEMBER_BYTES, chunk_bytes=16 * KIB, replicas=2)
    fill([here, there])
    dlfs.repair([here], replacements={1: new})
    before = [Path(uri).read_bytes() for uri in (here, there, new)]
    with pytest.raises(dlfs.DegradedError, match=r"member 1 .*was replaced"):
        dlfs.repair([there], replacements={0: here})
    after = [Path(uri).read_bytes() for uri in (here, there, new)]
    assert after[1] == before[1]
    assert after == before


def test_a_repair_that_was_done_is_done_again(uris: list[str], tmp_path: Path) -> None:
    Path(uris[1]).unlink()
    new = str(tmp_path / "new")
    left = [uris[0], uris[2]]
    first = dlfs.repair(left, replacements={1: new})
    again = dlfs.repair(left, replacements={1: new})
    assert (again.written_bytes, again.generation) == (0, first.generation)
    check_whole([uris[0], new, uris[2]])


def test_a_device_that_holds_something_needs_force(uris: list[str], tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.write_bytes(b"something" + bytes(MEMBER_BYTES))
    Path(uris[1]).unlink()
    before = new.read_bytes()
    with pytest.raises(dlfs.ExistsError, match=r"^repair with /.*/new: expected an empty device"):
        dlfs.repair(uris, replacements={1: str(new)})
    assert new.read_bytes() == before
    dlfs.repair(uris, replacements={1: str(new)}, force=True)
    check_whole([uris[0], str(new), uris[2]])


def test_a_member_of_another_volume_needs_force(uris: list[str], tmp_path: Path) -> None:
    other = new_volume(str(tmp_path / "other"), size_bytes=MEMBER_BYTES)
    Path(uris[1]).unlink()
    with pytest.raises(dlfs.ExistsError, match=r"a member of volume"):
        dlfs.repair(uris, replacements={1: other})
    dlfs.repair(uris, replacements={1: other}, force=True)
    check_whole([uris[0], other, uris[2]])


def test_a_wiped_device_takes_its_own_place(uris: list[str]) -> None:
    Path(uris[2]).write_bytes(bytes(MEMBER_BYTES))
    with pytest.raises(dlfs.DegradedError, match=r"in place of every lost member, but member 2 "):
        dlfs.repair(uris)
    dlfs.repair(uris, replacements={2: uris[2]})
    check_whole(uris)


def test_devices_that_cannot_take_a_place(uris: list[str], tmp_path: Path) -> None:
    Path(uris[1]).unlink()
    small = tmp_path / "small"
    small.write_bytes(bytes(MEMBER_BYTES // 2))
    with pytest.raises(dlfs.UsageError, match=r"/small: expected at least \d+ bytes, got 2097152"):
        dlfs.repair(uris, replacements={1: str(small)})
    with pytest.raises(dlfs.UsageError, match=r"expected a member 0\.\.2, got 3"):
        dlfs.repair(uris, replacements={3: str(tmp_path / "new")})
    with pytest.raises(dlfs.UsageError, match=r"is a member already"):
        dlfs.repair(uris, replacements={1: uris[0]})
    with pytest.raises(dlfs.DegradedError, match=r"member 1 .*no such file"):
        dlfs.repair(uris)
    coarse = f"mem:coarse-{tmp_path.name}?size={MEMBER_BYTES}&block=4096"
    with pytest.raises(dlfs.UsageError, match=r"a device block that divides 512"):
        dlfs.repair(uris, replacements={1: coarse})


def test_volumes_without_replicas_have_nothing_to_repair_from(tmp_path: Path) -> None:
    uri = new_volume(str(tmp_path / "a"), size_bytes=MEMBER_BYTES)
    with pytest.raises(dlfs.UsageError, match=r"no replicas"):
        dlfs.repair(uri)


@pytest.fixture
def plain(tmp_path: Path) -> list[str]:
    """A volume of two members without replicas."""
    uris = [str(tmp_path / f"plain{number}") for number in range(2)]
    dlfs.format_volume(uris, size_bytes=MEMBER_BYTES, chunk_bytes=16 * KIB)
    fill(uris)
    return uris


def wreck(uri: str, *copies: int) -> None:
    """Overwrite superblock copies of a member: 0 and 1 at its head, 2 at its tail."""
    offsets = superblock_offsets(Path(uri).stat().st_size)
    for copy in copies:
        write_at(uri, offsets[copy], b"\xa5" * 4096)


@pytest.mark.parametrize("copies", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("member", [0, 1])
def test_damaged_superblocks_are_repaired_without_replicas(
    plain: list[str], member: int, copies: tuple[int, ...]
) -> None:
    wreck(plain[member], *copies)
    with dlfs.open(plain) as volume:
        assert len(list(volume.verify())) >= len(copies)
    report = dlfs.repair(plain)
    assert report.written_bytes >= 4096 * len(copies)
    assert report.damaged == ()
    with dlfs.open(plain) as volume:
        assert list(volume.verify()) == []
        assert read_dataset(volume, "data") == SAMPLES
    with pytest.raises(dlfs.UsageError, match="all its superblocks are whole"):
        dlfs.repair(plain)


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_without_superblocks_is_recognised_by_its_data(
    plain: list[str], member: int
) -> None:
    wreck(plain[member], 0, 1, 2)
    with pytest.raises(dlfs.FormatError, match="expected 2 members, got 1"):
        dlfs.open(plain)
    report = dlfs.repair(plain[::-1])
    assert report.written_bytes == 3 * 4096
    with dlfs.open(plain) as volume:
        assert list(volume.verify()) == []
        assert read_dataset(volume, "data") == SAMPLES
        fill(plain, "more")


def test_a_device_that_is_not_shown_to_be_the_member_is_left_alone(
    plain: list[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\xa5" * Path(plain[1]).stat().st_size)
    with pytest.raises(dlfs.FormatError):
        dlfs.repair([plain[0], str(other)])
    assert set(other.read_bytes()) == {0xA5}
    with dlfs.open(plain) as volume, volume["data"] as dataset:
        info = next(
            dataset.stat(i)
            for i in range(len(dataset))
            if dataset.stat(i).member == plain[1] and dataset.stat(i).length_bytes > 0
        )
    write_at(plain[1], info.offset_bytes, b"??")
    wreck(plain[1], 0, 1, 2)
    before = Path(plain[1]).read_bytes()
    with pytest.raises(dlfs.FormatError, match=r"cannot be shown to be member 1: .*--force"):
        dlfs.repair(plain)
    assert Path(plain[1]).read_bytes() == before
    report = dlfs.repair(plain, force=True)
    assert len(report.damaged) == 1
    with dlfs.open(plain) as volume:
        assert [finding.kind for finding in volume.verify()] == ["sample"]


def test_a_lost_member_of_a_volume_without_replicas_stays_lost(
    plain: list[str], tmp_path: Path
) -> None:
    with pytest.raises(dlfs.NotFoundError, match="expected 2 members"):
        dlfs.repair(plain[0])
    with pytest.raises(dlfs.UsageError, match="no replicas"):
        dlfs.repair(plain, replacements={1: str(tmp_path / "new")})


def test_repair_does_not_wait_for_a_writer(uris: list[str], tmp_path: Path) -> None:
    with dlfs.open(uris) as volume:
        writer = volume.writer("more")
        with pytest.raises(dlfs.LockedError, match=r"writing dataset 'more'"):
            dlfs.repair(uris)
        writer.abort()
    Path(uris[1]).unlink()
    new = str(tmp_path / "new")
    with open_device(uris[2], writable=True) as device:
        device.lock_exclusive("somebody")
        with pytest.raises(dlfs.LockedError, match=r"somebody"):
            dlfs.repair(uris, replacements={1: new})
    dlfs.repair(uris, replacements={1: new})
    check_whole([uris[0], new, uris[2]])


# ---- a member is there ---------------------------------------------------------------------------


def test_a_whole_volume_is_left_alone(uris: list[str]) -> None:
    before = [Path(uri).read_bytes() for uri in uris]
    report = dlfs.repair(uris)
    assert (report.written_bytes, report.generation, report.replaced) == (0, 3, ())
    assert [Path(uri).read_bytes() for uri in uris] == before


def test_a_stale_member_is_brought_up_to_date(uris: list[str]) -> None:
    with dlfs.open(uris) as volume:
        volume.remove("data")
    old = Path(uris[1]).read_bytes()
    fill(uris)
    with dlfs.open(uris) as volume:
        volume.remove("empty")
        volume.writer("empty").seal()
    Path(uris[1]).write_bytes(old)
    with dlfs.open(uris) as volume:
        assert volume.members[1].state == "degraded"
    report = dlfs.repair(uris)
    assert report.written_bytes > 0
    with dlfs.open(uris) as volume:
        assert [info.version for info in volume.datasets()] == [2, 2]
    check_whole(uris)


def spaces(generation: Generation) -> list[DataSpace]:
    geometry = generation.geometry
    runs = [generation.superblock.catalog_runs]
    for record in generation.catalog.datasets:
        runs += [record.directory_runs, record.data_runs]
    return [DataSpace(geometry, each) for each in runs if each]


@pytest.mark.parametrize("member", range(MEMBERS))
def test_a_member_damaged_everywhere(uris: list[str], member: int) -> None:
    """Bits flip in every chunk that a member has of anything, whichever copy it is."""
    generation = load(uris)
    for space in spaces(generation):
        for address in range(9, space.size_bytes, 5000):
            for copy in range(2):
                if space.resolve(address, copy)[0] == member:
                    flip_copies(generation, space, address, copy)
    report = dlfs.repair(uris)
    assert report.damaged == ()
    assert report.written_bytes > 0
    check_whole(uris)


def taken_addresses(uris: list[str]) -> list[int]:
    with dlfs.open(uris) as volume, volume["data"] as dataset:
        small = (dataset.lengths() > 1000) & (dataset.lengths() < 16 * KIB)
        return sorted(int(a) for a in dataset.directory.addresses()[small])


def test_different_samples_damaged_on_all_members(uris: list[str]) -> None:
    """No copy of a chunk is whole, but each sample has one that is."""
    generation = load(uris)
    space = spaces(generation)[2]
    for number, address in enumerate(taken_addresses(uris)):
        flip_copies(generation, space, address + 700, number % 2)
    report = dlfs.repair(uris)
    assert report.damaged == ()
    check_whole(uris)


def test_samples_without_a_valid_copy_are_reported_and_others_repaired(uris: list[str]) -> None:
    generation = load(uris)
    space = spaces(generation)[2]
    addresses = taken_addresses(uris)
    flip_copies(generation, space, addresses[0], 0)
    flip_copies(generation, space, addresses[0], 1)
    flip_copies(generation, space, addresses[5], 1)
    with dlfs.open(uris) as volume, volume["data"] as dataset:
        large = int(dataset.directory.addresses([dataset.index(b"large")])[0])
    flip_copies(generation, space, large + 100_000, 0)
    flip_copies(generation, space, large + 100_000, 1)
    report = dlfs.repair(uris)
    assert len(report.damaged) == 2
    assert "no copy has its CRC32C" in report.damaged[0]
    assert any("'large'" in told for told in report.damaged)
    with dlfs.open(uris) as volume:
        findings = list(volume.verify())
        assert {f.kind for f in findings} == {"sample"}
        assert len({f.path for f in findings}) == 2


def test_a_directory_that_no_copy_has(uris: list[str]) -> None:
    generation = load(uris)
    space = spaces(generation)[1]
    for copy in range(2):
        flip_copies(generation, space, 5000, copy)
    report = dlfs.repair(uris)
    assert len(report.damaged) == 1
    assert "dataset 'data' version 1" in report.damaged[0]
    with dlfs.open(uris) as volume, volume["empty"] as dataset:
        assert len(dataset) == 0


def contents(uris: list[str]) -> list[bytes]:
    """Return the bytes of members from the first chunk on, without superblocks."""
    return [Path(uri).read_bytes()[256 * KIB : -4 * KIB] for uri in uris]


def test_a_sample_whose_parts_are_whole_in_different_copies_is_repaired(uris: list[str]) -> None:
    """One part is whole nowhere: it is reported, and left as it is in both copies."""
    space = spaces(load(uris))[2]
    with dlfs.open(uris) as volume, volume["data"] as dataset:
        large = int(dataset.directory.addresses([dataset.index(b"large")])[0])
    for chunk, copy in ((0, 0), (1, 0), (2, 0), (4, 1), (5, 1), (6, 1)):
        flip_copies(load(uris), space, large + chunk * 16 * KIB + 77, copy)
    first = 9 * 16 * KIB
    for copy in (0, 1):
        flip_copies(load(uris), space, large + first + 77 + copy, copy)
    report = dlfs.repair(uris)
    assert len(report.damaged) == 1
    assert f"version 1, bytes {first} to {first + 16 * KIB - 1} of 300000:" in report.damaged[0]
    assert "'large'" in report.damaged[0]
    assert report.written_bytes == 6 * 512
    for copy in (0, 1):
        flip_copies(load(uris), space, large + first + 77 + copy, copy)
    with dlfs.open(uris) as volume, volume["data"] as dataset:
        assert list(volume.verify()) == []
        assert dataset.get(b"large") == SAMPLES[b"large"]


def test_the_samples_of_a_lost_directory_are_left_as_they_are(
    uris: list[str], tmp_path: Path
) -> None:
    """Without checksums, repair cannot tell which copy is right, but a new device needs one."""
    generation = load(uris)
    directory, data = spaces(generation)[1:3]
    for number, address in enumerate(taken_addresses(uris)[::7]):
        flip_copies(generation, data, address, number % 2)
    flip_copies(generation, directory, 5000, 0)
    flip_copies(generation, directory, 6000, 1)
    before = contents(uris)
    report = dlfs.repair(uris)
    assert (len(report.damaged), report.written_bytes) == (1, 0)
    assert contents(uris) == before
    Path(uris[2]).unlink()
    report = dlfs.repair(uris, replacements={2: str(tmp_path / "new")})
    assert report.written_bytes > 0


def test_a_copy_that_could_not_be_read_now_is_not_lost(uris: list[str]) -> None:
    """A bad copy is not written over one that may be good, and cannot be read for the moment."""
    generation = load(uris)
    space = spaces(generation)[2]
    address = taken_addresses(uris)[0]
    flip_copies(generation, space, address, 0)
    member, offset = space.resolve(address, 1)
    chunk = slice(offset - offset % (16 * KIB), offset + 16 * KIB - offset % (16 * KIB))
    before = Path(uris[member]).read_bytes()[chunk]

    def failing(uri: str, *, writable: bool) -> BlockDevice:
        device = open_device(uri, writable=writable)
        if uri != uris[member]:
            return device
        return FaultyDevice(device, Faults(bad_first_bytes=offset, bad_length_bytes=1))

    report = dlfs.repair(uris, opener=failing)
    assert report.damaged
    after = Path(uris[member]).read_bytes()[chunk]
    assert after[offset % (16 * KIB) :][:512] == before[offset % (16 * KIB) :][:512]
    assert dlfs.repair(uris).damaged == ()
    check_whole(uris)


@pytest.mark.parametrize("copy", range(3))
def test_damaged_superblocks(uris: list[str], copy: int) -> None:
    write_at(uris[1], superblock_offsets(MEMBER_BYTES)[copy] + 100, b"x")
    dlfs.repair(uris)
    check_whole(uris)


# ---- the record ----------------------------------------------------------------------------------


def test_a_joining_record_comes_back_or_is_none() -> None:
    record = JoiningRecord(UUID(int=1), UUID(int=2), 3)
    block = bytearray(record.encode())
    assert len(block) == JOINING_BYTES
    assert JoiningRecord.decode(bytes(block)) == record
    assert JoiningRecord.decode(bytes(block[:-1])) is None
    assert JoiningRecord.decode(bytes(JOINING_BYTES)) is None
    for bit in [0, 64, 96, 128, 256, 2000, 8 * 512 - 1]:
        block[bit // 8] ^= 1 << bit % 8
        assert JoiningRecord.decode(bytes(block)) is None
        block[bit // 8] ^= 1 << bit % 8


def test_a_record_of_another_volume_is_no_leave(uris: list[str], tmp_path: Path) -> None:
    new = tmp_path / "new"
    record = JoiningRecord(uuid4(), uuid4(), 1)
    content = bytearray(MEMBER_BYTES)
    content[JOINING_OFFSET_BYTES : JOINING_OFFSET_BYTES + JOINING_BYTES] = record.encode()
    new.write_bytes(bytes(content))
    Path(uris[1]).unlink()
    with pytest.raises(dlfs.ExistsError):
        dlfs.repair(uris, replacements={1: str(new)})


def test_an_intact_directory_of_another_dataset_is_replaced(uris: list[str]) -> None:
    """A member that missed commits has an older dataset's directory in the same chunks."""
    fill(uris, "other")
    generation = load(uris)
    runs = {record.name: record.directory_runs for record in generation.catalog.datasets}
    spaces = [DataSpace(generation.geometry, runs[name]) for name in (b"other", b"data")]
    assert spaces[0].size_bytes == spaces[1].size_bytes
    chunk_bytes = generation.geometry.chunk_bytes
    for address in range(0, spaces[0].size_bytes, chunk_bytes):
        (source, start), (target, offset) = (space.resolve(address) for space in spaces)
        chunk = Path(generation.devices[source].uri).read_bytes()[start : start + chunk_bytes]
        write_at(generation.devices[target].uri, offset, chunk)
    with dlfs.open(uris) as volume:
        assert {(f.kind, f.dataset) for f in volume.verify()} == {("directory", "data")}
    dlfs.repair(uris)
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []
        volume.remove("other")
    check_whole(uris)
