"""An independent reader of DLFS volumes, written from dlfs/format/FORMAT.md alone.

Plain Python, standard library only, nothing of dlfs: ``read_volume([path, ...])`` opens the
members' files and gives ``{(dataset name, version): {path: bytes}}``, and ``read_attributes`` gives
``{(dataset name, version): {column: [value, ...]}}``, having checked every checksum on the way.
They read everything into memory, so they are for small volumes; they are slow, so that they are
easy to compare with the specification. Of a volume with replicas, as many members may be left out
as it survives; the copies on those that are there must be alike.

    python tests/golden/decoder.py member0.img member1.img
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import sys
import zlib
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

BLOCK = 4096
DRAFT = 8
Runs = list[tuple[int, int]]


class Malformed(Exception):
    """The volume is not what FORMAT.md says."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Malformed(what)


# ---- section 1 -----------------------------------------------------------------------------------


def crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


@functools.cache  # the tests decode the same volumes again and again
def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def runs_at(data: bytes, at: int, count: int) -> Runs:
    return [struct.unpack_from("<QQ", data, at + 16 * i) for i in range(count)]


# ---- sections 2 and 3 ----------------------------------------------------------------------------


class Group(NamedTuple):
    base: int
    rows: int
    first_member: int
    members: int
    total: int


class Superblock(NamedTuple):
    volume: bytes
    member: int
    members: list[bytes]
    chunk_bytes: int
    data_offset: int
    groups: list[Group]
    replicas: int
    member_bytes: int
    generation: int
    catalog_runs: Runs
    catalog_bytes: int
    catalog_crc: int
    removed: tuple[int, ...]


def decode_superblock(block: bytes) -> Superblock:
    expect(len(block) == BLOCK and block[:8] == b"DLFSVOL1", "no superblock")
    expect(crc32c(block[:4092]) == struct.unpack_from("<I", block, 4092)[0], "superblock checksum")
    major, _minor, size, incompat = struct.unpack_from("<HHIQ", block, 8)
    group_count, draft = struct.unpack_from("<II", block, 88)
    expect(major == 1 and draft == DRAFT, "superblock version")
    expect(size == BLOCK and incompat == 0, "superblock features")
    removed = struct.unpack_from("<512I", block, 1536)
    number, count, chunk_bytes, block_bytes = struct.unpack_from("<IIII", block, 64)
    (data_offset,) = struct.unpack_from("<Q", block, 80)
    member_bytes, generation = struct.unpack_from("<QQ", block, 96)
    replicas, run_count, catalog_bytes, catalog_crc = struct.unpack_from("<IIQI", block, 120)
    members = [block[512 + 16 * i : 528 + 16 * i] for i in range(count)]
    expect(1 <= count <= 64 and number < count, "superblock members")
    expect(1 <= replicas <= min(4, count), "superblock replicas")
    expect(members[number] == block[48:64] and len(set(members)) == count, "member UUIDs")
    for value, low, high in ((chunk_bytes, 4096, 64 << 20), (block_bytes, 512, 64 << 10)):
        expect(low <= value <= high and value & value - 1 == 0, "superblock sizes")
    expect(data_offset >= 1 << 20 and data_offset % chunk_bytes == 0, "data offset")
    expect(1 <= group_count <= 20, "number of groups")
    entries = [struct.unpack_from("<QQIH", block, 3584 + 24 * i) for i in range(group_count)]
    groups = decode_groups(entries, replicas)
    expect(sum(group.members for group in groups) == count, "members of groups")
    expect(sum(group.total for group in groups) >= 4, "number of chunks")
    own = next(g for g in groups if g.first_member <= number < g.first_member + g.members)
    expect(data_offset + own.rows * chunk_bytes <= tail_offset(member_bytes), "rows")
    expect(generation >= 1 and 1 <= run_count <= 16, "generation, catalog runs")
    return Superblock(
        block[32:48], number, members, chunk_bytes, data_offset, groups, replicas, member_bytes,
        generation,
        runs_at(block, 256, run_count), catalog_bytes, catalog_crc, removed,
    )  # fmt: skip


def decode_groups(entries: list[tuple[int, ...]], replicas: int) -> list[Group]:
    groups: list[Group] = []
    end, member = -1, 0
    for base, rows, members, state in entries:
        expect(base > end and state in (0, 1), "base or state of a group")
        total = rows // replicas * members
        expect(members >= replicas and total >= 1 and base + total < 1 << 63, "size of a group")
        groups.append(Group(base, rows, member, members, total))
        end, member = base + total, member + members
    return groups


def tail_offset(member_bytes: int) -> int:
    return member_bytes // BLOCK * BLOCK - BLOCK


def unknown_generation(block: bytes, volume: bytes) -> int:
    """Return the generation of a volume's superblock that has unknown features; 0 of any other."""
    if len(block) < BLOCK or block[:8] != b"DLFSVOL1" or block[32:48] != volume:
        return 0
    if crc32c(block[:4092]) != struct.unpack_from("<I", block, 4092)[0]:
        return 0
    major, _, _, incompat = struct.unpack_from("<HHIQ", block, 8)
    draft, generation = struct.unpack_from("<I8xQ", block, 92)
    return int(generation) if (major, draft) == (1, DRAFT) and incompat else 0


def copies(image: bytes) -> list[Superblock]:
    """The valid superblock copies of one member."""
    valid: list[Superblock] = []
    for offset in (0, 64 << 10):
        with suppress(Malformed):
            valid.append(decode_superblock(image[offset : offset + BLOCK]))
    tail = tail_offset(valid[0].member_bytes if valid else len(image))
    with suppress(Malformed):
        valid.append(decode_superblock(image[tail : tail + BLOCK]))
    expect(bool(valid), "a member without a superblock")
    newest = max(valid, key=lambda sb: sb.generation)
    for offset in (0, 64 << 10, tail):
        unknown = unknown_generation(image[offset : offset + BLOCK], newest.volume)
        expect(unknown <= newest.generation, "a newer superblock with unknown features")
    expect(len(image) >= max(sb.member_bytes for sb in valid), "a truncated member")
    return valid


class Volume:
    """The members of a volume by number, and the superblock in force."""

    def __init__(self, images: list[bytes]) -> None:
        found = [max(copies(image), key=lambda sb: sb.generation) for image in images]
        self.superblock = max(found, key=lambda sb: sb.generation)
        expect(len({sb.volume for sb in found}) == 1, "members of several volumes")
        numbers = {uuid: number for number, uuid in enumerate(self.superblock.members)}
        uuids = [sb.members[sb.member] for sb in found]
        expect(set(uuids) <= set(numbers), "a member that left the volume")
        members = {numbers[uuid]: image for uuid, image in zip(uuids, images, strict=True)}
        missing = len(self.superblock.members) - len(members)
        expect(missing < self.superblock.replicas and len(members) == len(images), "members")
        self.images = members

    def chunks(self) -> list[int]:
        """The numbers of all chunks of all groups, in order."""
        groups = self.superblock.groups
        return [n for group in groups for n in range(group.base, group.base + group.total)]

    def chunk(self, number: int) -> bytes:
        """A chunk, of which all copies that are there are alike."""
        sb = self.superblock
        group = next((g for g in sb.groups if g.base <= number < g.base + g.total), None)
        expect(group is not None, "a chunk outside the volume")
        assert group is not None
        row, first = divmod(number - group.base, group.members)
        found = set()
        for copy in range(sb.replicas):
            image = self.images.get(group.first_member + (first + copy) % group.members)
            band = copy * (group.rows // sb.replicas)
            at = sb.data_offset + (band + row) * sb.chunk_bytes
            if image is not None:
                found.add(image[at : at + sb.chunk_bytes])
        expect(len(found) == 1, f"the copies of chunk {number}")
        return found.pop()

    def space(self, runs: Runs) -> bytes:
        """All bytes of the chunks of some runs."""
        chunks = (chunk for first, length in runs for chunk in range(first, first + length))
        return b"".join(map(self.chunk, chunks))


def decode_locations(image: bytes, volume: bytes) -> dict[bytes, str]:
    """The URIs of the members by their UUIDs in a member's location record; none without one."""
    record = image[256 << 10 : 320 << 10]
    magic, version, length, uuid, _generation, count = struct.unpack_from("<8sII16sQI", record)
    if (magic, version, uuid) != (b"DLFSLOCN", 1, volume) or not 52 <= length <= len(record):
        return {}
    if crc32c(record[: length - 4]) != struct.unpack_from("<I", record, length - 4)[0]:
        return {}
    found, at = {}, 48
    for _ in range(count):
        member, size = struct.unpack_from("<16sH", record, at)
        found[member] = record[at + 18 : at + 18 + size].decode()
        at += 18 + size
    return found if at == length - 4 else {}


# ---- section 4 -----------------------------------------------------------------------------------


class Record(NamedTuple):
    name: bytes
    version: int
    is_sealed: bool
    uuid: bytes
    sample_count: int
    sample_bytes: int
    data_bytes: int
    entries_bytes: int
    names_bytes: int
    attributes: tuple[int, int, int]
    data_runs: Runs
    directory_runs: Runs
    journal_runs: Runs
    granted_runs: Runs
    journal_bytes: int
    tags: dict[int, bytes]
    content_digest: bytes
    packing_digest: bytes


def decode_tags(raw: bytes) -> dict[int, bytes]:
    """The tagged values of a dataset record."""
    tags: dict[int, bytes] = {}
    at = 0
    while at < len(raw):
        tag, _, length = struct.unpack_from("<HHI", raw, at)
        expect(tag != 1 or (tag not in tags and length <= 16384), "descriptions of a source")
        expect(tag != 2 or (tag not in tags and 8 <= length <= 32768), "reports of bad records")
        expect(tag != 3 or (tag not in tags and length == 24), "accounts of a first pass")
        expect(tag != 4 or (tag not in tags and length == 24), "terms of a coordinator")
        tags[tag] = raw[at + 8 : at + 8 + length]
        at += 8 + -(-length // 8) * 8
    expect(at == len(raw), "tagged values of a record")
    return tags


def decode_row(raw: bytes, row_at: int, run_at: int, text_at: int) -> tuple[Record, int, int]:
    """The record of a row, and where the runs and the text of the next one begin."""
    uuid, version, state, layout, _created, samples, total, _seed, data, entries, names = (
        struct.unpack_from("<16sIHH7Q", raw, row_at)
    )
    attributes = struct.unpack_from("<3Q", raw, row_at + 80)
    counts = struct.unpack_from("<3I", raw, row_at + 104) + struct.unpack_from(
        "<I", raw, row_at + 160
    )
    name_bytes, tags_bytes, journal_bytes = struct.unpack_from("<HHQ", raw, row_at + 116)
    digests = struct.unpack_from("<16s16s", raw, row_at + 128)
    expect(state <= 1 and layout <= 1, "state, layout")
    expect((version == 0) == (state == 1), "version of an unfinished record")
    runs: list[Runs] = []
    for count in counts:
        runs.append(runs_at(raw, run_at, count))
        run_at += 16 * count
    tags_at = text_at + name_bytes
    text_end = tags_at + tags_bytes
    name = raw[text_at:tags_at]
    expect(1 <= len(name) <= 255 and not set(name) & {0, 0x2F}, "name")
    expect(name not in (b".", b".."), "name")
    if state == 1:
        expect(not runs[1] and entries == names == 0 and not any(attributes), "unfinished record")
        expect(not any(b"".join(digests)), "digests of an unfinished record")
    else:
        expect(not runs[2] and journal_bytes == 0, "journal of a sealed record")
        expect(not runs[3], "granted runs of a sealed record")
    record = Record(
        name, version, state == 0, uuid, samples, total, data, entries, names, attributes, *runs,
        journal_bytes, decode_tags(raw[tags_at:text_end]), *digests,
    )  # fmt: skip
    return record, run_at, text_end


def chunks_of(runs: Runs) -> list[int]:
    return [chunk for first, length in runs for chunk in range(first, first + length)]


def decode_catalog(volume: Volume) -> list[Record]:
    sb = volume.superblock
    raw = volume.space(sb.catalog_runs)[: sb.catalog_bytes]
    expect(len(raw) == sb.catalog_bytes and crc32c(raw) == sb.catalog_crc, "catalog checksum")
    magic, header_bytes, _, uuid, generation, size = struct.unpack_from("<8sII16sQQ", raw)
    count, free_count, run_count, text_bytes = struct.unpack_from("<4I", raw, 48)
    expect((magic, header_bytes, size) == (b"DLFSCAT1", 64, len(raw)), "catalog header")
    expect((uuid, generation) == (sb.volume, sb.generation), "catalog of another generation")
    run_at = 64 + 168 * count
    free_at = run_at + 16 * run_count
    text_at = free_at + 16 * free_count
    expect(text_at + text_bytes == len(raw), "length of the catalog")
    owned = sb.catalog_runs + runs_at(raw, free_at, free_count)
    records = []
    for number in range(count):
        record, run_at, text_at = decode_row(raw, 64 + 168 * number, run_at, text_at)
        records.append(record)
    expect((run_at, text_at) == (free_at, len(raw)), "runs and text of the records")
    data: set[int] = set()
    for record in records:
        own = chunks_of(record.data_runs)
        expect(len(set(own)) == len(own), "a chunk twice in the data of a dataset")
        expect(len(own) * sb.chunk_bytes == record.data_bytes, "data bytes")
        journal_bytes = len(chunks_of(record.journal_runs)) * sb.chunk_bytes
        expect(record.journal_bytes <= journal_bytes, "journal bytes")
        data |= set(own)
        owned = owned + record.directory_runs + record.journal_runs + record.granted_runs
    chunks = sorted([*chunks_of(owned), *data])
    expect(chunks == volume.chunks(), "chunks with no owner or with two")
    keys = [(record.name, record.version) for record in records]
    expect(keys == sorted(set(keys)), "order of datasets")
    return records


# ---- sections 5 and 6 ----------------------------------------------------------------------------


def up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def check_blocks(part: bytes, table: bytes) -> None:
    for number, at in enumerate(range(0, len(part), BLOCK)):
        recorded = struct.unpack_from("<I", table, 4 * number)[0]
        expect(crc32c(part[at : at + BLOCK]) == recorded, f"directory block {number} checksum")


def varint(data: bytes, at: int) -> tuple[int, int]:
    if data[at] < 0x80:
        return data[at], at + 1
    return data[at] & 0x7F | data[at + 1] << 7, at + 2


def decode_names(part: bytes, count: int, empty_count: int) -> tuple[list[bytes], list[bytes]]:
    """The paths of samples, in index order, and of empty directories, each followed by a slash."""
    blocks = -(-count // 16) + -(-empty_count // 16)
    offsets = struct.unpack_from(f"<{blocks + 1}Q", part)
    expect(offsets[0] == 8 * (blocks + 1) and len(part) == up(offsets[-1]), "names")
    lists: tuple[list[bytes], list[bytes]] = [], []
    block = 0
    for names, total in zip(lists, (count, empty_count), strict=True):
        while len(names) < total:
            at, name = offsets[block], b""
            for _ in range(min(16, total - len(names))):
                shared, at = varint(part, at)
                length, at = varint(part, at)
                name, at = name[:shared] + part[at : at + length], at + length
                names.append(name)
            block += 1
            expect(at == offsets[block], f"name block {block}")
        expect(names == sorted(set(names)), "order of paths")
    expect(all(len(name) > 1 and name.endswith(b"/") for name in lists[1]), "empty directories")
    merged = sorted([path + b"/" for path in lists[0]] + lists[1])
    expect(not any(b.startswith(a) for a, b in pairwise(merged)), "a path below another")
    return lists


def decode_empty(volume: Volume, record: Record) -> list[bytes]:
    """The paths of the empty directories of a dataset."""
    segment = volume.space(record.directory_runs)
    names = segment[record.entries_bytes :][: record.names_bytes]
    (empty_count,) = struct.unpack_from("<Q", segment, 192)
    return [path[:-1] for path in decode_names(names, record.sample_count, empty_count)[1]]


def decode_dataset(volume: Volume, record: Record) -> dict[bytes, bytes]:
    segment, data = volume.space(record.directory_runs), volume.space(record.data_runs)
    check_digests(volume, record)
    return decode_samples(segment, data, record, volume.superblock.chunk_bytes)


def decode_samples(
    segment: bytes, data: bytes, record: Record, volume_chunk_bytes: int
) -> dict[bytes, bytes]:
    """The samples that a directory segment lists, out of their data space."""
    entries = segment[: record.entries_bytes]
    names = segment[record.entries_bytes : record.entries_bytes + record.names_bytes]
    expect(crc32c(entries[:4092]) == struct.unpack_from("<I", entries, 4092)[0], "header checksum")
    magic, version, header_bytes, uuid = struct.unpack_from("<8sII16s", entries)
    expect((magic, version, header_bytes) == (b"DLFSDIR1", 1, 4096), "directory header")
    expect(uuid == record.uuid, "directory of another dataset")
    count, data_bytes, _hash_seed, index_bytes, _levels = struct.unpack_from("<QQQII", entries, 32)
    sizes = struct.unpack_from("<QQ", entries, 64)
    expect(sizes == (len(entries), len(names)), "directory sizes")
    expect((count, data_bytes) == (record.sample_count, record.data_bytes), "directory counts")
    entry_sums, _, name_sums, _, locations, order = struct.unpack_from("<6Q", entries, 80)
    tables_crc = struct.unpack_from("<I", entries, 168)[0]
    expect(crc32c(entries[BLOCK:locations]) == tables_crc, "checksum tables")
    check_blocks(entries[locations:], entries[entry_sums:name_sums])
    check_blocks(names, entries[name_sums:locations])
    chunk_bytes, parts_offset, part_count, empty_count = struct.unpack_from("<I3Q", entries, 172)
    expect(chunk_bytes == volume_chunk_bytes, "directory chunk size")
    expect(up(parts_offset + 4 * part_count) == len(entries), "parts offset")
    parts = struct.unpack_from(f"<{part_count}I", entries, parts_offset)
    expect(len(data) == data_bytes, "data bytes")
    samples, found = {}, []
    expected_parts = [0] * (data_bytes // chunk_bytes)
    for index, path in enumerate(decode_names(names, count, empty_count)[0]):
        crc, low, high = struct.unpack_from("<IIQ", entries, locations + 16 * index)
        address, length = high & (1 << 56) - 1, low | high >> 56 << 32
        samples[path] = data[address : address + length]
        expect(address + length <= len(data), f"end of {path!r}")
        expect(crc32c(samples[path]) == crc, f"checksum of {path!r}")
        found.append((address, index, length))
        inside = address % chunk_bytes + length <= chunk_bytes
        expect(not length or inside or address % chunk_bytes == 0, f"chunks of {path!r}")
        for at in range(0, length if length > chunk_bytes else 0, chunk_bytes):
            part = samples[path][at : at + chunk_bytes]
            expected_parts[(address + at) // chunk_bytes] = crc32c(part)
    is_large = any(length > chunk_bytes for _, _, length in found)
    expect(list(parts) == (expected_parts if is_large else []), "parts")
    found.sort()
    form = f"<{count}{'I' if index_bytes == 4 else 'Q'}"
    expect(struct.unpack_from(form, entries, order) == tuple(i for _, i, _ in found), "order")
    taken = [(address, address + length) for address, _, length in found if length]
    expect(all(a[1] <= b[0] for a, b in pairwise(taken)), "overlap")
    expect(sum(length for _, _, length in found) == record.sample_bytes, "sample bytes")
    return samples


# ---- section 6.2 ---------------------------------------------------------------------------------

NUMBERS = {
    2: "b",
    3: "h",
    4: "i",
    5: "q",
    6: "B",
    7: "H",
    8: "I",
    9: "Q",
    10: "e",
    11: "f",
    12: "d",
}


def strings_at(column: bytes, at: int, count: int, text_bytes: int) -> tuple[list[str], int]:
    """Strings by their offsets at a place of a column, and where their text ends."""
    offsets = struct.unpack_from(f"<{count + 1}Q", column, at)
    text = at + 8 * (count + 1)
    expect(offsets[0] == 0 and offsets[-1] == text_bytes, "ends of text")
    expect(list(offsets) == sorted(offsets), "order of text")
    return [column[text + a : text + b].decode() for a, b in pairwise(offsets)], text + text_bytes


def decode_column(column: bytes, form: tuple[int, ...], count: int) -> tuple[list[object], int]:
    """The values that a column begins with, and their length in bytes."""
    kind, _, index_bytes, values, text_bytes = form
    expect(index_bytes in ((1, 2) if kind == 14 else (0,)), "bytes of an index")
    expect(values <= (256**index_bytes if kind == 14 else 0), "values of a dictionary")
    if kind == 1:
        expect(max(column[:count], default=0) <= 1, "a bool")
        return [bool(byte) for byte in column[:count]], count
    if kind in NUMBERS:
        code = f"<{count}{NUMBERS[kind]}"
        return list(struct.unpack_from(code, column)), struct.calcsize(code)
    expect(kind in (13, 14), "kind of column")
    if kind == 13:
        texts, end = strings_at(column, 0, count, text_bytes)
        return list(texts), end
    indices = struct.unpack_from(f"<{count}{' BH'[index_bytes]}", column)
    texts, end = strings_at(column, -(-count * index_bytes // 8) * 8, values, text_bytes)
    expect(max(indices, default=-1) < values, "an index")
    return [texts[index] for index in indices], end


def decode_attributes(volume: Volume, record: Record) -> dict[str, list[object]]:
    """The columns of a dataset, in index order of its samples."""
    address, segment_bytes, head_bytes = record.attributes
    if segment_bytes == 0:
        return {}
    chunk_bytes = volume.superblock.chunk_bytes
    size = -(-segment_bytes // chunk_bytes) * chunk_bytes
    expect(address % chunk_bytes == 0 and address + size == record.data_bytes, "attribute place")
    segment = volume.space(record.data_runs)[address : address + segment_bytes]
    return decode_columns(segment, record, head_bytes)


def decode_columns(segment: bytes, record: Record, head_bytes: int) -> dict[str, list[object]]:
    segment_bytes, head = len(segment), segment[:head_bytes]
    magic, crc, version, uuid = struct.unpack_from("<8sII16s", head)
    expect(magic == b"DLFSATT1" and crc32c(head[12:]) == crc, "attribute head")
    expect(version == 1 and uuid == record.uuid, "attributes of another dataset")
    count, *sizes = struct.unpack_from("<QQQ", head, 32)
    expect([count, *sizes] == [record.sample_count, segment_bytes, head_bytes], "attribute sizes")
    column_count = struct.unpack_from("<I", head, 56)[0]
    forms = [struct.unpack_from("<HHIQQ", head, 64 + 24 * i) for i in range(column_count)]
    name_at = 64 + 24 * column_count
    table = -(-(name_at + sum(form[1] for form in forms)) // 8) * 8
    blocks = (segment_bytes - head_bytes) // BLOCK
    expect(head_bytes == up(table + 4 * blocks), "attribute head's length")
    check_blocks(segment[head_bytes:], head[table:])
    columns, at = {}, head_bytes
    for form in forms:
        name = head[name_at : name_at + form[1]].decode()
        expect(name not in columns, "two columns of one name")
        columns[name], length = decode_column(segment[at:], form, count)
        at, name_at = at + up(length), name_at + form[1]
    expect(at == segment_bytes, "end of the columns")
    return columns


# ---- section 4.5 ---------------------------------------------------------------------------------


def check_digests(volume: Volume, record: Record) -> None:
    """Compare the digests of a dataset with those of its samples and columns."""
    segment, chunk_bytes = volume.space(record.directory_runs), volume.superblock.chunk_bytes
    names = segment[record.entries_bytes :][: record.names_bytes]
    count, data_bytes, _, index_bytes = struct.unpack_from("<QQQI", segment, 32)
    (empty_count,) = struct.unpack_from("<Q", segment, 192)
    locations, order = struct.unpack_from("<2Q", segment, 112)
    address, segment_bytes, head_bytes = record.attributes
    columns = {}
    if segment_bytes:
        attributes = volume.space(record.data_runs)[address : address + segment_bytes]
        columns = described_columns(attributes, count, head_bytes)
    content = hashlib.blake2b(digest_size=16)
    content.update(struct.pack("<QQQ", count, empty_count, len(columns)) + names)
    placed = hashlib.blake2b(digest_size=16)
    placed.update(struct.pack("<QQQ", count, data_bytes // chunk_bytes, 0))
    for first in range(0, count, 65536):
        each = range(first, min(first + 65536, count))
        starts = [locations + 16 * index for index in each]
        content.update(b"".join(segment[start : start + 8] for start in starts))
        content.update(bytes(segment[start + 15] for start in starts))
        for start in starts:
            begin = int.from_bytes(segment[start + 8 : start + 15], "little")
            placed.update(struct.pack("<Q", begin // chunk_bytes))
    placed.update(segment[order : order + index_bytes * count])
    for _, described in sorted(columns.items()):
        content.update(described)
    expect(content.digest() == record.content_digest, "content digest")
    expect(placed.digest() == record.packing_digest, "packing digest")


def described_columns(segment: bytes, count: int, head_bytes: int) -> dict[bytes, bytes]:
    """What a head says of each column, by its name: 24 bytes of form, name, checksums."""
    (column_count,) = struct.unpack_from("<I", segment, 56)
    forms = [segment[64 + 24 * i :][:24] for i in range(column_count)]
    name_at = 64 + 24 * column_count
    sizes = [struct.unpack("<HHIQQ", form) for form in forms]
    sum_at = -(-(name_at + sum(size[1] for size in sizes)) // 8) * 8
    found, at = {}, head_bytes
    for form, size in zip(forms, sizes, strict=True):
        name = segment[name_at : name_at + size[1]]
        length = up(decode_column(segment[at:], size, count)[1])
        found[name] = form + name + segment[sum_at : sum_at + 4 * (length // BLOCK)]
        at, name_at, sum_at = at + length, name_at + size[1], sum_at + 4 * (length // BLOCK)
    return found


# ---- section 6.4 ---------------------------------------------------------------------------------


Steps = list[tuple[dict[bytes, bytes], dict[str, list[object]], tuple[int, object]]]


def decode_journal(volume: Volume, record: Record) -> Steps:
    """The samples, the columns and the cursor of each step of an unfinished import."""
    chunk_bytes = volume.superblock.chunk_bytes
    journal, data = volume.space(record.journal_runs), volume.space(record.data_runs)
    steps: Steps = []
    at = chunks = samples = 0
    while at < record.journal_bytes:
        header = journal[at : at + 4096]
        expect(crc32c(header[:4092]) == struct.unpack_from("<I", header, 4092)[0], "step checksum")
        expect(header[:32] == struct.pack("<8sII16s", b"DLFSJRN1", 1, 4096, record.uuid), "step")
        (
            number, first, count, step_samples, step_bytes, _, _, _, entries, names, columns, head,
            part, ends_part, cursor_count, cursor_bytes,
        ) = struct.unpack_from("<16Q", header, 32)  # fmt: skip
        expect((number, first) == (len(steps), chunks), "order of steps")
        expect(part < 1 << 31 and ends_part < 2, "part of a step")
        own = data[first * chunk_bytes : (first + count) * chunk_bytes]
        step = record._replace(
            sample_count=step_samples, sample_bytes=step_bytes, data_bytes=len(own),
            entries_bytes=entries, names_bytes=names,
        )  # fmt: skip
        segments = journal[at + 4096 :]
        attributes = segments[entries + names :][:columns]
        steps.append(
            (
                decode_samples(segments[: entries + names], own, step, chunk_bytes),
                decode_columns(attributes, step, head) if columns else {},
                (cursor_count, json.loads(header[160:][:cursor_bytes] or b"null")),
            )
        )
        at += -(-(4096 + entries + names + columns) // chunk_bytes) * chunk_bytes
        chunks, samples = chunks + count, samples + step_samples
    expect((at, samples) == (record.journal_bytes, record.sample_count), "end of the journal")
    expect(chunks * chunk_bytes == record.data_bytes, "chunks of the steps")
    return steps


# ---- section 6.3 ---------------------------------------------------------------------------------


def field_bytes(kind: str, shape: str) -> int:
    """The length of a field that is an array."""
    element, lengths = kind.rstrip("]").split("[")
    count = 1
    for length in (shape or lengths).split(",") if shape or lengths else []:
        count *= int(length)
    return count * int(element.lstrip("<>|bifucmM"))


def decode_fields(
    samples: dict[bytes, bytes], columns: dict[str, list[object]]
) -> dict[bytes, dict[str, bytes]]:
    """The fields of each sample of a dataset; none without fields."""
    found: dict[bytes, dict[str, bytes]] = {}
    described = columns.get("dlfs:fields", [""] * len(samples))
    for index, ((path, data), types) in enumerate(zip(samples.items(), described, strict=True)):
        fields, end = {}, 0
        for name, kind in json.loads(str(types) or "{}").items():
            column = f"dlfs:field:{name}:"
            if kind in ("bytes", "text"):
                alignment, length = 1, int(str(columns[column + "bytes"][index]))
            else:
                size = field_bytes(kind.split("[")[0] + "[]", "")
                alignment = min(16, size & -size)
                shape = str(columns[column + "shape"][index]) if "?" in kind else ""
                length = field_bytes(kind, shape)
            start = -(-end // alignment) * alignment
            expect(not any(data[end:start]), f"bytes between fields of {path!r}")
            end = start + length
            fields[name] = data[start:end]
            expect(crc32c(fields[name]) == columns[column + "crc32c"][index], f"field {name}")
        expect(not fields or end == len(data), f"end of the fields of {path!r}")
        if fields:
            found[path] = fields
    return found


def read_fields(paths: list[str | Path]) -> dict[tuple[bytes, int], dict[bytes, dict[str, bytes]]]:
    """Every field of every dataset of the volume that these files hold, in any order."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    return {
        (r.name, r.version): decode_fields(decode_dataset(volume, r), decode_attributes(volume, r))
        for r in decode_catalog(volume)
        if r.is_sealed
    }


def read_empty(paths: list[str | Path]) -> dict[tuple[bytes, int], list[bytes]]:
    """The empty directories of every dataset of the volume that these files hold, in any order."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    return {
        (r.name, r.version): decode_empty(volume, r) for r in decode_catalog(volume) if r.is_sealed
    }


def read_attributes(paths: list[str | Path]) -> dict[tuple[bytes, int], dict[str, list[object]]]:
    """Every column of every dataset of the volume that these files hold, in any order."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    sealed = [record for record in decode_catalog(volume) if record.is_sealed]
    return {(r.name, r.version): decode_attributes(volume, r) for r in sealed}


def read_volume(paths: list[str | Path]) -> dict[tuple[bytes, int], dict[bytes, bytes]]:
    """Every sample of every dataset of the volume that these files hold, in any order."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    sealed = [record for record in decode_catalog(volume) if record.is_sealed]
    return {(r.name, r.version): decode_dataset(volume, r) for r in sealed}


def read_unfinished(paths: list[str | Path]) -> dict[bytes, tuple[Steps, dict[int, bytes]]]:
    """Samples and columns of each step, and tagged values, of each unfinished import, by name."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    unfinished = [record for record in decode_catalog(volume) if not record.is_sealed]
    return {r.name: (decode_journal(volume, r), r.tags) for r in unfinished}


def read_bad_records(
    paths: list[str | Path],
) -> dict[tuple[bytes, int], tuple[int, dict[str, int], list[list[str | int | None]]]]:
    """Number of bad records of each dataset that has some, by reason, and the first of them."""
    volume = Volume([Path(path).read_bytes() for path in paths])
    found = {}
    for record in decode_catalog(volume):
        if 2 in record.tags:
            stored = json.loads(zlib.decompress(record.tags[2][8:]))
            (count,) = struct.unpack_from("<Q", record.tags[2])
            found[record.name, record.version] = count, stored["reasons"], stored["records"]
    return found


if __name__ == "__main__":
    for (name, version), samples in read_volume(list(sys.argv[1:])).items():
        total = sum(map(len, samples.values()))
        print(f"{name!r} version {version}: {len(samples)} samples, {total} bytes")
