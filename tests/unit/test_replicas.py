"""A volume with two copies of everything: read although a member is lost, in any way."""

from __future__ import annotations

import logging
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, MemoryDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.format.geometry import DataSpace, superblock_offsets
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import Generation, load_generation
from dlfs.volume.volume import Volume
from tests.support.devices import Faults, FaultyDevice
from tests.support.files import write_at
from tests.support.volumes import flip_copies, write_dataset

MEMBERS = 3
MEMBER_BYTES = 4 * MIB
SAMPLES = {
    f"d{i % 3}/{i:03}".encode(): random.Random(i).randbytes(i * 173 % 9000) for i in range(120)
} | {b"large": random.Random(-1).randbytes(300_000)}


def fill(uris: list[str], name: str = "data") -> None:
    write_dataset(uris, name, SAMPLES)


def read_all(volume: Volume) -> dict[bytes, bytes]:
    with volume.dataset("data") as dataset:
        samples = dict(zip(dataset.paths(), dataset[:].to_list(), strict=True))
        assert dataset.get(b"d1/001") == SAMPLES[b"d1/001"]
    return samples


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / f"member{i}") for i in range(MEMBERS)]
    dlfs.format_volume(
        made, size_bytes=MEMBER_BYTES, chunk_bytes=16 * KIB, block_bytes=512, replicas=2
    )
    fill(made)
    return made


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "dlfs")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# ---- opening -------------------------------------------------------------------------------------


def remove(path: str) -> None:
    Path(path).unlink()


def overwrite(path: str) -> None:
    for offset in superblock_offsets(MEMBER_BYTES):
        write_at(path, offset, b"x" * 4096)


def truncate(path: str) -> None:
    os.truncate(path, MEMBER_BYTES // 2)


LOSSES = [
    (remove, "missing", "no such file"),
    (overwrite, "degraded", "no DLFS volume"),
    (truncate, "degraded", "expected a member of 4194304 bytes"),
]


@pytest.mark.parametrize("number", range(MEMBERS))
@pytest.mark.parametrize(("lose", "state", "reason"), LOSSES)
def test_one_member_lost_before_opening(
    uris: list[str],
    number: int,
    lose: Callable[[str], None],
    state: str,
    reason: str,
    warnings: Callable[[], list[str]],
) -> None:
    lose(uris[number])
    with dlfs.open(uris) as volume:
        assert read_all(volume) == SAMPLES
        assert [m.state for m in volume.members].count("current") == MEMBERS - 1
        found = volume.members[number]
        assert (found.number, found.uri, found.state) == (number, uris[number], state)
        assert reason in (found.reason or "")
        with pytest.raises(dlfs.DegradedError, match=rf"member {number} .*{reason}.*dlfs repair"):
            volume.writer("more")
        with pytest.raises(dlfs.DegradedError):
            volume.remove("data")
        assert volume.generation == 2
    told = warnings()
    assert len(told) == 1
    assert f"member {number} ({found.uuid}), {uris[number]}: {state}" in told[0]


@pytest.mark.parametrize("number", range(MEMBERS))
def test_one_member_not_given(uris: list[str], number: int) -> None:
    given = uris[:number] + uris[number + 1 :]
    with dlfs.open(given[::-1]) as volume:
        assert read_all(volume) == SAMPLES
        found = volume.members[number]
        assert (found.state, found.reason, found.superblocks) == ("missing", "it was not given", ())
        assert volume.uri == ",".join(given)
        with pytest.raises(dlfs.DegradedError, match=rf"member {number} .*was not given"):
            volume.writer("more")


def test_a_stale_member(uris: list[str]) -> None:
    """It was away during two commits: it lags, and is not read."""
    old = Path(uris[1]).read_bytes()
    fill(uris, "more")
    with dlfs.open(uris) as volume:
        volume.remove("more")
    Path(uris[1]).write_bytes(old)
    with dlfs.open(uris) as volume:
        assert read_all(volume) == SAMPLES
        assert volume.members[1].state == "degraded"
        assert "stale: expected generation 4, got 2" in (volume.members[1].reason or "")
        with pytest.raises(dlfs.DegradedError, match=r"member 1 .*stale"):
            volume.writer("more")


def test_a_member_that_lags_by_one_is_a_crash_and_whole(uris: list[str]) -> None:
    for copy in (0, 2):  # as if only the others got generation 2's superblocks
        write_at(uris[1], superblock_offsets(MEMBER_BYTES)[copy], bytes(4096))
    with dlfs.open(uris) as volume:
        assert [m.state for m in volume.members] == ["current"] * MEMBERS
        assert read_all(volume) == SAMPLES
    fill(uris, "more")
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []


def test_one_generation_with_two_contents_is_refused(uris: list[str], tmp_path: Path) -> None:
    """Copies of all members went on by themselves, and one of theirs stands among the others."""
    for uri in uris:
        shutil.copy(uri, uri + "-copy")
    copies = [uri + "-copy" for uri in uris]
    for each, name in ((uris, "here"), (copies, "there")):
        with dlfs.open(each) as volume, volume.writer(name) as writer:
            writer.add("x", b"x")
    with pytest.raises(dlfs.FormatError, match=r"contradicts .* generation, 3, .*the catalog"):
        dlfs.open([uris[0], copies[1], uris[2]])


def test_two_members_lost_are_too_many(uris: list[str]) -> None:
    with dlfs.open(uris) as volume:
        uuids = [member.uuid for member in volume.members]
    remove(uris[0])
    with pytest.raises(
        dlfs.NotFoundError, match=r"got 1; missing: 0 .*no such file.*; 2 "
    ) as error:
        dlfs.open(uris[:2])
    for part in (str(uuids[0]), str(uuids[2]), uris[0]):
        assert part in str(error.value)
    overwrite(uris[2])
    with pytest.raises(dlfs.NotFoundError, match=r"missing: 0 .*; 2 .*no DLFS volume"):
        dlfs.open(uris)
    remove(uris[1])
    with pytest.raises(dlfs.FormatError, match=r"no DLFS volume"):
        dlfs.open(uris[::-1])
    remove(uris[2])
    with pytest.raises(dlfs.NotFoundError, match=r"member0"):
        dlfs.open(uris)


def test_without_replicas_a_lost_member_is_named(tmp_path: Path) -> None:
    uris = [str(tmp_path / "a"), str(tmp_path / "b")]
    info = dlfs.format_volume(uris, size_bytes=MEMBER_BYTES)
    remove(uris[1])
    with pytest.raises(dlfs.NotFoundError) as error:
        dlfs.open(uris)
    for part in ("expected 2 members, got 1", f"1 ({info.members[1].uuid})", uris[1], "no such"):
        assert part in str(error.value)


def test_a_device_too_many_is_refused(uris: list[str], tmp_path: Path) -> None:
    with pytest.raises(dlfs.NotFoundError, match=r"expected its 3 members alone, got .*/other"):
        dlfs.open([*uris, str(tmp_path / "other")])
    copy = tmp_path / "copy"
    copy.write_bytes(Path(uris[0]).read_bytes())
    with pytest.raises(dlfs.UsageError, match=r"each member once"):
        dlfs.open([*uris[1:], uris[0], str(copy)])


def test_a_member_that_is_back_is_seen_by_refresh(
    uris: list[str], warnings: Callable[[], list[str]]
) -> None:
    away = Path(uris[1]).rename(uris[1] + ".away")
    with dlfs.open(uris) as volume:
        volume.refresh()
        assert volume.members[1].state == "missing"
        away.rename(uris[1])
        volume.refresh()
        assert [m.state for m in volume.members] == ["current"] * MEMBERS
        fill(uris, "more")
    assert len(warnings()) == 1


# ---- damage --------------------------------------------------------------------------------------


def each_part(uris: list[str]) -> tuple[Generation, list[tuple[DataSpace, list[int]]]]:
    """The volume's spaces, with addresses in them whose bytes matter."""
    devices = open_members(uris)
    generation = load_generation(devices)
    close_devices(devices)
    (record,) = generation.catalog.datasets
    geometry = generation.geometry
    with dlfs.open(uris) as volume, volume["data"] as dataset:
        taken = dataset.directory.addresses()[dataset.lengths() > 0].tolist()
    names = record.entries_bytes + 200
    return generation, [
        (DataSpace(geometry, generation.superblock.catalog_runs), [0, 70]),
        (DataSpace(geometry, record.directory_runs), [33, 4100, record.entries_bytes - 1, names]),
        (DataSpace(geometry, record.data_runs), taken[::5]),
    ]


@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_copy_of_anything_does_no_harm(uris: list[str], copy: int) -> None:
    generation, parts = each_part(uris)
    for space, addresses in parts:
        for address in addresses:
            flip_copies(generation, space, address, copy)
    with dlfs.open(uris) as volume:
        assert read_all(volume) == SAMPLES
        with volume["data"] as dataset:
            seen = {}
            for batch in dataset.batches(7):
                for index, data in zip(batch.indices.tolist(), batch, strict=True):
                    seen[dataset.path(index)] = bytes(data)
            assert seen == SAMPLES


def test_damage_of_both_copies_is_an_error(uris: list[str]) -> None:
    generation, parts = each_part(uris)
    space, addresses = parts[2]
    flip_copies(generation, space, addresses[3], 0, 1)
    with dlfs.open(uris) as volume, pytest.raises(dlfs.ChecksumError, match=r"'data'"):
        read_all(volume)
    space, addresses = parts[1]
    flip_copies(generation, space, addresses[1], 0, 1)
    with dlfs.open(uris) as volume, pytest.raises(dlfs.ChecksumError, match=r"directory"):
        read_all(volume)
    space, addresses = parts[0]
    flip_copies(generation, space, addresses[1], 0, 1)
    with pytest.raises(dlfs.ChecksumError, match=r"catalog"):
        dlfs.open(uris)


# ---- lost while it is read -----------------------------------------------------------------------


class Lab:
    """Three faulty members in memory."""

    def __init__(self, replicas: int, faults: Faults) -> None:
        self.names = [f"lab-{uuid.uuid4().hex}" for _ in range(MEMBERS)]
        self.uris = [f"mem:{name}?size={MEMBER_BYTES}" for name in self.names]
        dlfs.format_volume(self.uris, chunk_bytes=16 * KIB, block_bytes=512, replicas=replicas)
        fill(self.uris)
        self.faults = faults
        self.opened: list[FaultyDevice] = []

    def open(self) -> Volume:
        options = OpenOptions(opener=self.opener, memory_bytes=256 * KIB)
        return Volume(LocalConnection(tuple(self.uris), options))

    def opener(self, uri: str, *, writable: bool) -> BlockDevice:
        device = open_device(uri, writable=writable)
        if uri != self.uris[1]:
            return device
        self.opened.append(FaultyDevice(device, self.faults))
        return self.opened[-1]

    def lose(self, lost: bool) -> None:
        for device in self.opened:
            device.lose(lost)


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(replicas: int = 2, faults: Faults | None = None) -> Lab:
        made.append(Lab(replicas, faults or Faults()))
        return made[-1]

    yield make
    for lab in made:
        for name in lab.names:
            MemoryDevice.forget(name)


@pytest.mark.parametrize("lost_polls", [False, True])
def test_a_member_lost_in_an_epoch(
    make_lab: Callable[..., Lab], warnings: Callable[[], list[str]], lost_polls: bool
) -> None:
    lab = make_lab(faults=Faults(lost_polls=lost_polls))
    with lab.open() as volume, volume["data"] as dataset:
        seen = {}
        for number, batch in enumerate(dataset.batches(10, plan="direct")):
            for index, data in zip(batch.indices.tolist(), batch, strict=True):
                seen[dataset.path(index)] = bytes(data)
            if number == 2:
                lab.lose(True)
        assert seen == SAMPLES
        assert dataset.read(range(len(dataset))).to_list() == [SAMPLES[p] for p in dataset.paths()]
        assert dataset.stats()["failovers"] > 0
        assert [m.state for m in volume.members] == ["current", "degraded", "current"]
        assert "gone" in (volume.members[1].reason or "")
        told = warnings()
        assert len(told) == 1
        assert f"member 1 ({volume.members[1].uuid}), {lab.uris[1]} was lost" in told[0]
        volume.refresh()
        assert volume.members[1].state == "missing"
        lab.lose(False)
        while volume.members[1].state != "current":
            volume.refresh()
            dataset.read(range(len(dataset)))
    assert len(warnings()) == 1


def test_without_replicas_a_lost_member_is_a_typed_error(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(replicas=1)
    with lab.open() as volume, volume["data"] as dataset:
        lab.lose(True)
        with pytest.raises(dlfs.DeviceLostError, match=r"at byte \d+") as error:
            dataset.read(range(len(dataset)))
        assert lab.uris[1] in str(error.value)
        with pytest.raises(dlfs.DeviceLostError, match=r"at byte \d+") as error:
            list(dataset.batches(10))
        assert lab.uris[1] in str(error.value)
        lab.lose(False)
        assert read_patiently(dataset) == [SAMPLES[path] for path in dataset.paths()]


def read_patiently(dataset: dlfs.Dataset) -> list[bytes]:
    """A lost member is not asked again at once."""
    while True:
        with suppress(dlfs.DeviceLostError):
            return dataset[:].to_list()


def test_a_member_lost_between_opening_and_reading(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    with lab.open() as volume:
        lab.lose(True)
        with volume["data"] as dataset:
            assert dataset[:].to_list() == [SAMPLES[path] for path in dataset.paths()]


def test_a_volume_is_made_with_as_many_copies_as_it_can_hold(tmp_path: Path) -> None:
    with pytest.raises(dlfs.UsageError, match=r"2 replicas need 2 devices or more, got 1 device"):
        dlfs.format_volume(str(tmp_path / "a"), size_bytes=MEMBER_BYTES, replicas=2)
    assert not (tmp_path / "a").exists()


# ---- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [0, 1])
def test_verify_names_the_member_of_a_damaged_copy(uris: list[str], copy: int) -> None:
    generation, parts = each_part(uris)
    for (space, addresses), kind in zip(parts, ("catalog", "directory", "sample"), strict=True):
        flip_copies(generation, space, addresses[1], copy)
        with dlfs.open(uris) as volume:
            (finding,) = volume.verify()
        member, offset = space.resolve(addresses[1], copy)
        assert (finding.kind, finding.member) == (kind, uris[member])
        if kind != "sample":
            assert finding.offset_bytes == offset
        assert uris[member] in finding.message
        flip_copies(generation, space, addresses[1], copy)
    with dlfs.open(uris) as volume:
        told = []
        assert list(volume.verify(progress=lambda done, total: told.append((done, total)))) == []
    assert told[-1][0] == told[-1][1]


def test_verify_tells_of_damage_in_both_copies(uris: list[str]) -> None:
    generation, parts = each_part(uris)
    space, addresses = parts[2]
    flip_copies(generation, space, addresses[2], 0, 1)
    with dlfs.open(uris) as volume:
        findings = list(volume.verify())
    assert {finding.member for finding in findings} == {
        uris[space.resolve(addresses[2], copy)[0]] for copy in range(2)
    }
    assert len({finding.path for finding in findings}) == 1


@pytest.mark.parametrize("lose", [remove, overwrite])
def test_verify_of_a_degraded_volume(uris: list[str], lose: Callable[[str], None]) -> None:
    lose(uris[2])
    with dlfs.open(uris) as volume:
        (finding,) = volume.verify()
        assert (finding.kind, finding.member) == ("member", uris[2])
        assert str(volume.members[2].uuid) in finding.message
    generation, parts = each_part(uris)
    space, addresses = parts[2]
    there = next(a for a in addresses if space.resolve(a)[0] == 0)
    flip_copies(generation, space, there, 0)
    with dlfs.open(uris) as volume:
        assert [(f.kind, f.member) for f in volume.verify()] == [
            ("member", uris[2]),
            ("sample", uris[0]),
        ]


@pytest.mark.parametrize("lost_polls", [False, True])
def test_verify_tells_of_a_member_that_is_lost_meanwhile(
    make_lab: Callable[..., Lab], lost_polls: bool
) -> None:
    lab = make_lab(faults=Faults(lost_polls=lost_polls))
    with lab.open() as volume:
        (finding,) = volume.verify(progress=lambda _done, _total: lab.lose(True))
    assert (finding.kind, finding.member) == ("member", lab.uris[1])
    assert "was lost while it was verified" in finding.message
