"""Golden volumes, which have every feature: package, C interface and independent decoder agree.

Damaged variants are made here, from the golden volumes, with the error that each must give.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import dlfs
from dlfs._native.checksums import crc32c
from dlfs._native.library import error_for
from dlfs.base.units import KIB
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    FormatError,
    NotFoundError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.format.catalog import Catalog, DatasetRecord, decode_catalog
from dlfs.format.geometry import ChunkRun, DataSpace, superblock_offsets
from dlfs.format.journal import find_term
from dlfs.format.location import LOCATION
from dlfs.format.run_arrays import to_runs
from dlfs.format.superblock import Superblock, decode_superblock
from dlfs.store.space import count_chunks
from tests.golden import c_reader, decoder, lookup, make
from tests.support.unfinished import LATER_TAG, TERM, steps_of

HERE = Path(__file__).parent
PIECE_BYTES = 64 * KIB


KINDS = tuple(make.MEMBER_SIZES)
ONE_COPY_AND_TWO = pytest.mark.parametrize("kind", ["three", "groups"], indirect=True)
"""Marks tests of damage: to a volume whose chunks have one copy, and to one whose have two."""

Contents = dict[tuple[bytes, int], dict[bytes, bytes]]
AllColumns = dict[tuple[bytes, int], dict[str, list[Any]]]


@functools.cache
def archived(kind: str) -> dict[str, bytes]:
    """Return the members of a golden volume, by file name."""
    with tarfile.open(HERE / f"{kind}.tar.xz") as tar:
        files = {info.name: tar.extractfile(info) for info in tar}
        return {name: file.read() for name, file in sorted(files.items()) if file is not None}


def unpack(kind: str, folder: Path) -> list[str]:
    """Make the members of a golden volume, with holes where they have zeros: nearly everywhere."""
    for name, data in archived(kind).items():
        with (folder / name).open("wb") as file:
            file.truncate(len(data))
            for offset in range(0, len(data), PIECE_BYTES):
                piece = data[offset : offset + PIECE_BYTES]
                if piece != bytes(len(piece)):
                    file.seek(offset)
                    file.write(piece)
    return [str(folder / name) for name in archived(kind)]


def read_all(members: Sequence[str]) -> Contents:
    """Everything on a volume, by the code under test."""
    found: Contents = {}
    with dlfs.open(list(members)) as volume:
        for info in volume.datasets():
            with volume.dataset(info.name, info.version) as dataset:
                paths = dataset.paths()
                with dataset.read(range(len(dataset))) as batch:
                    samples = dict(zip(paths, batch.to_list(), strict=True))
                assert {path: dataset.get(path) for path in paths} == samples
            found[os.fsencode(info.name), info.version] = samples
    return found


@dataclass
class Image:
    """A golden volume's bytes, and where its parts lie."""

    members: list[str]

    def __post_init__(self) -> None:
        self.superblock = max(self.copies(0), key=lambda sb: sb.generation)
        raw = self.read(self.superblock.catalog_runs, 0, self.superblock.catalog_bytes)
        self.catalog: Catalog = decode_catalog(raw, self.superblock, "golden")

    def copies(self, member: int) -> list[Superblock]:
        found = []
        for offset in self.offsets(member):
            with open(self.members[member], "rb") as file:
                file.seek(offset)
                block = file.read(4096)
            if block.strip(b"\0"):
                found.append(decode_superblock(block, self.members[member]))
        return found

    def offsets(self, member: int) -> tuple[int, int, int]:
        return superblock_offsets(Path(self.members[member]).stat().st_size)

    def dataset(self, name: bytes, version: int) -> DatasetRecord:
        for record in self.catalog.datasets:
            if (record.name, record.version) == (name, version):
                return record
        raise AssertionError(name)

    def read(self, runs: tuple[ChunkRun, ...], address: int, length: int) -> bytes:
        parts = []
        for piece in DataSpace(self.superblock.geometry, runs).member_ranges(address, length):
            with open(self.members[piece.member], "rb") as file:
                file.seek(piece.offset_bytes)
                parts.append(file.read(piece.length_bytes))
        return b"".join(parts)

    def write(self, member: int, offset: int, data: bytes) -> None:
        with open(self.members[member], "r+b") as file:
            file.seek(offset)
            file.write(data)

    @property
    def replicas(self) -> int:
        return self.superblock.geometry.replicas

    def flip(self, runs: tuple[ChunkRun, ...], address: int, copy: int | None = None) -> None:
        """Flip one bit of a space, in one copy or in all."""
        byte = self.read(runs, address, 1)
        space = DataSpace(self.superblock.geometry, runs)
        for number in range(self.replicas) if copy is None else [copy]:
            member, offset = space.resolve(address, number)
            self.write(member, offset, bytes([byte[0] ^ 16]))

    def patch_superblocks(
        self,
        form: str,
        at: int,
        *values: object,
        only: int | None = None,
        members: Iterable[int] | None = None,
    ) -> None:
        """Change a field in every copy that there is, with the right checksum.

        ``only`` and ``members`` restrict it to the copies of a generation and to some members.
        """
        for member in range(len(self.members)) if members is None else members:
            for offset in self.offsets(member):
                with open(self.members[member], "rb") as file:
                    file.seek(offset)
                    block = bytearray(file.read(4096))
                (generation,) = struct.unpack_from("<Q", block, 104)
                if block.strip(b"\0") and only in (None, generation):
                    struct.pack_into("<" + form, block, at, *values)
                    struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
                    self.write(member, offset, bytes(block))

    def patch_catalog(self, form: str, at: int, *values: object) -> None:
        """Change a field of the catalog, with the right checksums."""
        runs, length = self.superblock.catalog_runs, self.superblock.catalog_bytes
        raw = bytearray(self.read(runs, 0, length))
        struct.pack_into("<" + form, raw, at, *values)
        place = DataSpace(self.superblock.geometry, runs)
        for copy in range(self.replicas):
            done = 0
            for piece in place.member_ranges(0, length, copy):
                part = raw[done : done + piece.length_bytes]
                self.write(piece.member, piece.offset_bytes, bytes(part))
                done += piece.length_bytes
        self.patch_superblocks("I", 136, crc32c(bytes(raw)))


@pytest.fixture(autouse=True)
def _own_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden volumes have fixed UUIDs: another process that reads the same one, such as a second
    run of these tests, would share its directory, which is whole, with a damaged volume of ours."""
    monkeypatch.setattr("dlfs.connection.connection.SHARED_ROOT", tmp_path)
    monkeypatch.setenv("DLFS_MEMORY", "32MiB")  # of which there is less to describe


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(kind: str, tmp_path: Path) -> Image:
    return Image(unpack(kind, tmp_path))


# ---- what is right ---------------------------------------------------------------------------


def test_the_current_code_reads_golden_volumes(kind: str, image: Image) -> None:
    assert read_all(image.members) == make.contents(kind)
    with dlfs.open(image.members) as volume:
        assert volume.label == make.LABELS[kind]


def test_the_c_interface_reads_golden_volumes(kind: str, image: Image) -> None:
    assert c_reader.read_volume(image.members[::-1]) == make.contents(kind)


def test_the_independent_decoder_reads_golden_volumes(kind: str, image: Image) -> None:
    assert decoder.read_volume(image.members[::-1]) == make.contents(kind)


def test_the_current_code_writes_golden_volumes(kind: str, image: Image, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    for fresh, golden in zip(make.write(kind, tmp_path / "fresh"), image.members, strict=True):
        assert Path(fresh).read_bytes() == Path(golden).read_bytes(), "see make.py"


def test_empty_directories(image: Image, kind: str) -> None:
    expected = {
        (name, version): sorted(make.EMPTY_DIRECTORIES.get(name, []), key=lambda path: path + b"/")
        for name, version in make.contents(kind)
    }
    assert decoder.read_empty(image.members) == expected
    with dlfs.open(image.members) as volume:
        for name, version in expected:
            with volume.dataset(name, version) as dataset:
                assert dataset.empty_directories() == expected[name, version]


def test_the_decoder_reads_fields(kind: str, image: Image) -> None:
    found = decoder.read_fields(image.members)
    assert found.pop((b"scenes", 1)) == make.FIELDS
    assert not any(found.values())
    with dlfs.open(image.members) as volume, volume["scenes"] as dataset:
        assert dict(dataset.fields) == make.FIELD_TYPES
        for path, fields in make.FIELDS.items():
            with dataset.read([dataset.index(path)], fields=["label"]) as batch:
                assert batch["label"].tobytes() == fields["label"]


def test_the_search_tree_is_as_specified(image: Image) -> None:
    for record in image.catalog.datasets:
        entries = image.read(record.directory_runs, 0, record.entries_bytes)
        names = image.read(record.directory_runs, record.entries_bytes, record.names_bytes)
        (empty_count,) = struct.unpack_from("<Q", entries, 192)
        paths = decoder.decode_names(names, record.sample_count, empty_count)[0]
        tree = lookup.Tree(entries, paths)
        assert [tree.find(path) for path in paths] == list(range(len(paths)))
        assert tree.find(b"no/such/path") is None
        by_hash = sorted((tree.hash(path), index) for index, path in enumerate(paths))
        assert tree.indices() == [index for _, index in by_hash]


def test_samples_are_packed_as_specified(image: Image) -> None:
    size = image.superblock.geometry.chunk_bytes
    for record in image.catalog.datasets:
        taken: set[int] = set()
        for address, length in locations(image, record):
            chunks = range(address // size, (address + max(length, 1) - 1) // size + 1)
            if length > size:
                assert address % size == 0
                assert not taken & set(chunks)
            elif length:
                assert len(chunks) == 1
            if length:
                taken |= set(chunks) if length > size else set()


def locations(image: Image, record: DatasetRecord) -> list[tuple[int, int]]:
    """(address, length) of each sample, in storage order."""
    entries = image.read(record.directory_runs, 0, record.entries_bytes)
    at = struct.unpack_from("<Q", entries, 112)[0]
    found = []
    for index in range(record.sample_count):
        _, low, high = struct.unpack_from("<IIQ", entries, at + LOCATION.itemsize * index)
        found.append((high & (1 << 56) - 1, low | high >> 56 << 32))
    return sorted(found)


def test_the_unfinished_import_is_read_by_its_record(kind: str, image: Image) -> None:
    (found,) = decoder.read_unfinished(image.members).items()
    name, (steps, tags) = found
    assert name == b"grown"
    assert steps == list(steps_of(make.UNFINISHED))
    assert tags[LATER_TAG[0]] == LATER_TAG[1]
    assert b'"source": "a test"' in tags[1]
    with dlfs.open(image.members) as volume:
        (info,) = volume.unfinished()
        assert (info.name, info.origin["source"]) == ("grown", "a test")
        (record,) = volume.session.catalog.unfinished
        is_grown = kind == "groups"  # afterwards, which ends an import by workers
        assert count_chunks(record.granted_runs) == (0 if is_grown else make.GRANTED)
        assert find_term(record.tags) == (None if is_grown else TERM)


def test_bad_records_are_reported_with_the_version_that_left_them_out(
    kind: str, image: Image
) -> None:
    first = ["a\udcff", "record 1", "ä"]
    want = {
        1: (2, {"malformed": 2}, [[*first, None]]),
        3: (3, {"malformed": 2, "cut short": 1}, [[*first, 1], ["b", "record 2", "ended", None]]),
    }
    want[4] = 3, want[3][1], [[*first, 1], ["b", "record 2", "ended", 3]]
    assert decoder.read_bad_records(image.members) == {
        (b"grown", version): found for version, found in want.items()
    }
    with dlfs.open(image.members) as volume:
        for info in volume.versions("grown"):
            count, reasons, records = want[info.version]
            with volume.dataset(info.name, info.version) as dataset:
                found = dataset.bad_records()
            assert info.bad_count == found.count == count
            assert found.reasons == reasons
            listed = [[one.source, one.record, one.reason, one.version] for one in found.records]
            assert listed == records


def test_superblocks_are_of_this_version(kind: str, image: Image) -> None:
    for member in range(len(image.members)):
        for offset in image.offsets(member):
            with open(image.members[member], "rb") as file:
                file.seek(offset)
                fields = struct.unpack_from("<HHIQQ", file.read(4096), 8)
            assert fields == (1, 0, 4096, 0, 0)


def test_attributes_of_golden_volumes(kind: str, image: Image) -> None:
    for read in (decoder.read_attributes, read_columns):
        assert same(read(image.members), expected_columns(kind))


def test_the_location_record_names_the_members_of_a_grown_volume(kind: str, image: Image) -> None:
    uuids = [uuid.bytes for uuid in image.superblock.member_uuids]
    expected = {uuid: f"/golden/{Path(image.members[n]).name}" for n, uuid in enumerate(uuids)}
    for member in image.members:
        found = decoder.decode_locations(
            Path(member).read_bytes(), image.superblock.volume_uuid.bytes
        )
        assert found == (expected if kind == "groups" else {})


@pytest.mark.parametrize("kind", ["groups"], indirect=True)
def test_groups_of_members(image: Image) -> None:
    groups = image.superblock.geometry.groups
    assert [(group.member_count, group.evacuating) for group in groups] == [(3, False), (2, True)]
    assert groups[0].first_chunk > 0
    runs = to_runs(image.catalog.used_runs)
    used = [[group.has(run) for run in runs] for group in groups]
    assert all(any(of_group) for of_group in used)


def test_a_version_that_was_removed_is_not_given_again(kind: str, image: Image) -> None:
    expected = [0] * 512
    for name, version in make.REMOVED.items():
        slot = decoder.crc32c(name) % 512
        expected[slot] = max(expected[slot], version)
    for member in range(len(image.members)):
        for copy in image.copies(member):
            if copy.generation == image.superblock.generation:
                assert list(copy.removed) == expected
    assert list(
        decoder.Volume([Path(m).read_bytes() for m in image.members]).superblock.removed
    ) == (expected)
    if image.replicas > 1:
        image.write(0, image.offsets(0)[0], bytes(4096))
        dlfs.repair(image.members)
    with dlfs.open(image.members) as volume:
        present = {b"again": 3, b"grown": 4, b"numbers": 2, b"new": 0}
        for name, version in {**make.REMOVED, **present}.items():
            with volume.writer(name) as writer:
                writer.add("x", b"x")
            assert volume[name].version == version + 1


def test_appended_versions_share_chunks(kind: str, image: Image) -> None:
    chunks = {n: chunks_of(image, image.dataset(b"grown", n)) for n in (1, 3, 4)}
    assert chunks[1] < chunks[3] < chunks[4]
    contents = make.contents(kind)
    for removed in (3, 4):
        with dlfs.open(image.members) as volume:
            volume.remove("grown", removed)
            assert not list(volume.verify())
        del contents[b"grown", removed]
        assert decoder.read_volume(image.members) == contents
        assert c_reader.read_volume(image.members) == contents


def chunks_of(image: Image, record: DatasetRecord) -> set[int]:
    """Chunks that hold samples of a dataset."""
    runs = record.split_data_runs(image.superblock.geometry.chunk_bytes)[0]
    return {chunk for run in runs for chunk in range(run.first_chunk, run.end_chunk)}


@pytest.mark.parametrize("kind", ["groups"], indirect=True)
@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("place", [9, 4096 + 100, 3 * 4096])
def test_damaged_attributes_are_read_from_the_other_copy(
    kind: str, image: Image, copy: int, place: int
) -> None:
    extent = image.dataset(b"numbers", 2).attribute_extent
    assert extent is not None
    image.flip(image.dataset(b"numbers", 2).data_runs, extent.address + place, copy)
    assert same(read_columns(image.members), expected_columns(kind))
    with dlfs.open(image.members) as volume:
        assert [finding.kind for finding in volume.verify()] == ["attributes"]
    dlfs.repair(image.members)
    assert same(decoder.read_attributes(image.members), expected_columns(kind))


def read_columns(members: Sequence[str]) -> AllColumns:
    """Every column on a volume, by the code under test."""
    found: AllColumns = {}
    with dlfs.open(list(members)) as volume:
        for info in volume.datasets():
            with volume.dataset(info.name, info.version) as dataset:
                columns = {name: dataset.column(name).tolist() for name in dataset.columns}
            found[os.fsencode(info.name), info.version] = columns
    return found


def expected_columns(kind: str) -> AllColumns:
    contents = make.contents(kind)
    return {
        (name, version): make.columns(name, samples)
        for (name, version), samples in contents.items()
    }


def same(got: AllColumns, expected: AllColumns) -> bool:
    """Return True if columns and values are equal; NaN equals NaN."""

    def plain(columns: AllColumns) -> str:
        return repr({
            key: {name: [getattr(v, "item", lambda v=v: v)() for v in values]
                  for name, values in dataset.items()}
            for key, dataset in sorted(columns.items())
        })  # fmt: skip

    return plain(got) == plain(expected)


@pytest.mark.parametrize("kind", ["groups"], indirect=True)
def test_any_member_of_a_volume_with_replicas_can_be_missing(kind: str, image: Image) -> None:
    for number in range(len(image.members)):
        left = image.members[:number] + image.members[number + 1 :]
        assert read_all(left) == make.contents(kind)
        assert decoder.read_volume(left) == make.contents(kind)
        assert c_reader.read_volume(left) == make.contents(kind)


@pytest.mark.parametrize("kind", ["groups"], indirect=True)
@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_copy_is_read_from_the_other(kind: str, image: Image, copy: int) -> None:
    for record in image.catalog.datasets:
        for runs in (image.superblock.catalog_runs, record.directory_runs, record.data_runs):
            if runs:
                image.flip(runs, 40, copy)
    assert read_all(image.members) == make.contents(kind)
    assert c_reader.read_volume(image.members) == make.contents(kind)
    with pytest.raises(decoder.Malformed, match="the copies of chunk"):
        decoder.read_volume(image.members)
    dlfs.repair(image.members)
    assert decoder.read_volume(image.members) == make.contents(kind)


@ONE_COPY_AND_TWO
@pytest.mark.parametrize("copy", [0, 1, 2])
@pytest.mark.parametrize("damage", [b"\0" * 4096, b"\xff" * 4096, b"DLFSVOL1"])
def test_one_damaged_superblock_copy_does_no_harm(
    kind: str, image: Image, copy: int, damage: bytes
) -> None:
    for member in range(len(image.members)):
        image.write(member, image.offsets(member)[copy] + (8 if len(damage) == 8 else 0), damage)
    assert read_all(image.members) == make.contents(kind)
    assert decoder.read_volume(image.members) == make.contents(kind)
    assert c_reader.read_volume(image.members) == make.contents(kind)


def test_a_newer_minor_version_is_read(kind: str, image: Image) -> None:
    image.patch_superblocks("H", 10, 7)
    assert read_all(image.members) == make.contents(kind)
    assert c_reader.read_volume(image.members) == make.contents(kind)


@pytest.mark.parametrize("kind", ["groups"], indirect=True)
def test_what_only_newer_code_may_write_is_read_and_not_written(kind: str, image: Image) -> None:
    image.patch_superblocks("Q", 24, 4)
    assert read_all(image.members) == make.contents(kind)
    with pytest.raises(UsageError, match="read but not write"):
        dlfs.repair(image.members)
    with dlfs.open(image.members) as volume, pytest.raises(UsageError, match="read but not write"):
        volume.writer("more")


# ---- what is wrong ---------------------------------------------------------------------------


def no_superblock(image: Image) -> None:
    for member in range(image.replicas):
        for offset in image.offsets(member):
            image.write(member, offset, bytes(4096))


def chunks_with_two_owners(image: Image) -> None:
    # The last free run gets one chunk more to the front.
    catalog = image.catalog
    last = catalog.free[-1]
    at = image.superblock.catalog_bytes - len(catalog.text) - 16
    image.patch_catalog("QQ", at, last.first_chunk - 1, last.chunk_count + 1)


def truncated(image: Image) -> None:
    for member in image.members[-image.replicas :]:
        os.truncate(member, Path(member).stat().st_size // 2)


def in_directory(part: str, offset: int) -> Callable[[Image], None]:
    """Damage of one bit in a directory; offset is from the start of the named section."""

    def damage(image: Image) -> None:
        record = image.dataset(b"numbers", 2)
        entries = image.read(record.directory_runs, 0, record.entries_bytes)
        field = {"tables": 80, "locations": 112, "order": 120, "leaves": 128, "separators": 144}
        if part == "names":
            start = record.entries_bytes
        else:
            start = struct.unpack_from("<Q", entries, field[part])[0] if part in field else 0
        image.flip(record.directory_runs, start + offset)

    return damage


def in_sample(image: Image) -> None:
    record = image.dataset(b"odd \xff", 1)
    address, length = max(locations(image, record), key=lambda place: place[1])
    image.flip(record.data_runs, address + length // 2)


def in_attributes(offset: int) -> Callable[[Image], None]:
    """Damage of one bit in an attribute segment; offset is from its start."""

    def damage(image: Image) -> None:
        record = image.dataset(b"numbers", 2)
        assert record.attribute_extent is not None
        image.flip(record.data_runs, record.attribute_extent.address + offset)

    return damage


ATTRIBUTE_DAMAGES = {"magic": 0, "crc": 8, "uuid": 20, "count": 56, "form": 64, "name": 400,
                     "checksums": 700, "number": 4096 + 5, "text": 60 * 4096}  # fmt: skip


@ONE_COPY_AND_TWO
@pytest.mark.parametrize("offset", ATTRIBUTE_DAMAGES.values(), ids=ATTRIBUTE_DAMAGES)
def test_damaged_attributes_are_reported(image: Image, offset: int) -> None:
    record = image.dataset(b"numbers", 2)
    assert record.attribute_extent is not None
    in_attributes(min(offset, record.attribute_extent.segment_bytes - 4096))(image)
    with pytest.raises(FormatError, match="the attributes of dataset 'numbers' version 2, on "):
        read_columns(image.members)
    with pytest.raises(decoder.Malformed):
        decoder.read_attributes(image.members)
    with dlfs.open(image.members) as volume:
        (finding,) = volume.verify()
        assert (finding.kind, finding.dataset, finding.version) == ("attributes", "numbers", 2)
        with volume.dataset("numbers", 2) as dataset:  # the samples are whole
            assert len(dataset[:].to_list()) == len(dataset)


DAMAGES: list[tuple[str, Callable[[Image], None], type[Exception], str]] = [
    ("no superblock", no_superblock, FormatError, "superblock"),
    ("major version", lambda i: i.patch_superblocks("H", 8, 2), VersionError, "version 1, got 2"),
    ("draft", lambda i: i.patch_superblocks("I", 92, 0), VersionError, "import it again"),
    ("incompat", lambda i: i.patch_superblocks("Q", 16, 8), VersionError, "newer"),
    ("replicas", lambda i: i.patch_superblocks("I", 120, 5), FormatError, "replicas"),
    ("chunk size", lambda i: i.patch_superblocks("I", 72, 0), FormatError, "chunk of a power"),
    ("rows", lambda i: i.patch_superblocks("Q", 3592, 1 << 40), FormatError, "rows|group 1 from"),
    ("groups", lambda i: i.patch_superblocks("I", 88, 21), FormatError, "groups of members"),
    ("members", lambda i: i.patch_superblocks("I", 68, 65), FormatError, "members"),
    ("catalog bit", lambda i: i.flip(i.superblock.catalog_runs, 70), ChecksumError, "catalog"),
    ("catalog magic", lambda i: i.patch_catalog("4s", 0, b"XXXX"), FormatError, "DLFSCAT1"),
    ("catalog count", lambda i: i.patch_catalog("I", 48, 1 << 31), FormatError, "datasets"),
    ("record state", lambda i: i.patch_catalog("H", 64 + 20, 2), FormatError, "state in 0"),
    ("unfinished", lambda i: i.patch_catalog("H", 64 + 20, 1), FormatError, "unfinished"),
    ("two owners", chunks_with_two_owners, FormatError, "owner"),
    ("truncated", truncated, TruncatedError, "member"),
    ("directory header", in_directory("header", 33), FormatError, "directory"),
    ("directory tables", in_directory("tables", 1), ChecksumError, "directory"),
    ("directory locations", in_directory("locations", 160), ChecksumError, "directory"),
    ("directory order", in_directory("order", 7), ChecksumError, "directory"),
    ("directory leaves", in_directory("leaves", 99), ChecksumError, "directory"),
    ("directory separators", in_directory("separators", 8), ChecksumError, "directory"),
    ("name offsets", in_directory("names", 9), ChecksumError, "directory"),
    ("a name", in_directory("names", 400), ChecksumError, "directory"),
    ("sample", in_sample, ChecksumError, "lengths/"),
]


CODES_IN_C: dict[type[Exception], type[Exception]] = {
    VersionError: DeviceError,  # -EPROTONOSUPPORT
}
"""Errors of the C interface that differ from those of the package, by the package's error."""


@ONE_COPY_AND_TWO
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [row[1:] for row in DAMAGES],
    ids=[row[0].replace(" ", "-") for row in DAMAGES],
)
def test_damage_is_reported(
    image: Image, damage: Callable[[Image], None], error: type[Exception], message: str
) -> None:
    damage(image)
    with pytest.raises(error, match=message):
        read_all(image.members)
    with pytest.raises((decoder.Malformed, struct.error)):
        decoder.read_volume(image.members)
    with pytest.raises(c_reader.Failed) as failed:
        c_reader.read_volume(image.members)
    assert isinstance(error_for(failed.value.code, ""), CODES_IN_C.get(error, error))
    assert any(member in str(failed.value) for member in image.members)
    assert damage in (no_superblock, truncated) or " at byte " in str(failed.value)
    if message == "import it again":
        assert message in str(failed.value)


@pytest.mark.parametrize("last", [True, False], ids=["last-member", "all-members"])
def test_an_older_copy_is_not_read_instead_of_one_with_unknown_features(
    image: Image, last: bool
) -> None:
    newest = image.superblock.generation
    assert [sb.generation for sb in image.copies(0)].count(newest - 1) == 1
    members = range(len(image.members) - 1 if last else 0, len(image.members))
    image.patch_superblocks("Q", 104, newest + 1, only=newest, members=members)
    image.patch_superblocks("Q", 16, 8, only=newest + 1, members=members)
    with pytest.raises(VersionError, match="a newer dlfs made this volume"):
        read_all(image.members)
    with pytest.raises(decoder.Malformed):
        decoder.read_volume(image.members)
    with pytest.raises(c_reader.Failed, match="a newer dlfs made this volume") as failed:
        c_reader.read_volume(image.members)
    assert failed.value.code == -errno.EPROTONOSUPPORT


def test_a_missing_member(tmp_path: Path) -> None:
    members = unpack("three", tmp_path)
    with pytest.raises(NotFoundError, match="expected 3 members, got 2"):
        read_all(members[:2])
    with pytest.raises(c_reader.Failed, match=r"got 2 that can be read; missing: number 2$"):
        c_reader.read_volume(members[:2])
    with pytest.raises(c_reader.Failed, match=r"number 2: open .*/none: No such file"):
        c_reader.read_volume([*members[:2], str(tmp_path / "none")])


def test_a_member_given_twice(tmp_path: Path) -> None:
    members = unpack("three", tmp_path)
    with pytest.raises(UsageError):
        read_all([*members, members[0]])
    with pytest.raises(c_reader.Failed, match="each member once, got number 0"):
        c_reader.read_volume([*members, members[0]])


def test_a_copy_of_a_member(tmp_path: Path) -> None:
    members = unpack("three", tmp_path)
    Path(members[1]).write_bytes(Path(members[0]).read_bytes())
    with pytest.raises(UsageError, match="each member once"):
        read_all(members)
    with pytest.raises(c_reader.Failed, match="each member once, got number 0"):
        c_reader.read_volume(members)


def test_a_member_of_another_volume(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    members = unpack("three", tmp_path)
    image = Image(unpack("one", tmp_path / "one"))
    assert image.superblock.volume_uuid != UUID(int=0)
    with pytest.raises(UsageError, match="a member of volume"):
        read_all([*members[:2], *image.members])
    with pytest.raises(c_reader.Failed, match="another volume"):
        c_reader.read_volume([*members[:2], *image.members])
