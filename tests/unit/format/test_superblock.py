from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from dlfs._native.checksums import crc32c
from dlfs.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.format.constants import DRAFT
from dlfs.format.geometry import ChunkRun
from dlfs.format.superblock import (
    Superblock,
    decode_superblock,
    encode_superblock,
    slot_for,
    with_removed,
)

WHERE = "disk0 at byte 65536"


def patched(superblock: Superblock, form: str, offset: int, *values: object) -> bytes:
    """The superblock's bytes with other values in one place, and the right checksum."""
    block = bytearray(encode_superblock(superblock))
    struct.pack_into("<" + form, block, offset, *values)
    struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
    return bytes(block)


def test_it_comes_back(superblock: Superblock) -> None:
    block = encode_superblock(superblock)
    assert len(block) == 4096
    assert decode_superblock(block, WHERE) == superblock
    assert decode_superblock(memoryview(block + b"more"), WHERE) == superblock
    assert superblock.member_uuid == UUID(int=11)
    assert superblock.writable


def test_fields_lie_where_the_specification_says(superblock: Superblock) -> None:
    block = encode_superblock(superblock)
    assert block[:8] == b"DLFSVOL1"
    assert struct.unpack_from("<HHI", block, 8) == (1, 0, 4096)
    assert block[32:48] == UUID(int=1).bytes
    assert block[48:64] == UUID(int=11).bytes
    assert struct.unpack_from("<IIII", block, 64) == (1, 2, 16384, 4096)
    assert struct.unpack_from("<QIIQQ", block, 80) == (1 << 20, 1, DRAFT, 2 << 20, 4)
    assert struct.unpack_from("<IIQII", block, 120) == (
        1,
        1,
        superblock.catalog_bytes,
        superblock.catalog_crc32c,
        6,
    )
    assert block[144:151] == "dátum".encode() + b"\0"
    assert struct.unpack_from("<QQ", block, 256) == (0, 1)
    assert block[512:544] == UUID(int=10).bytes + UUID(int=11).bytes
    assert not any(block[544:1536])
    assert struct.unpack_from("<512I", block, 1536) == superblock.removed
    assert struct.unpack_from("<QQIHH", block, 3584) == (0, 63, 2, 0, 0)
    assert not any(block[3608:4092])


def test_letters_alternate() -> None:
    assert [slot_for(generation) for generation in (1, 2, 3)] == ["B", "A", "B"]


def test_every_flipped_bit_is_found(superblock: Superblock) -> None:
    block = bytearray(encode_superblock(superblock))
    for bit in range(8 * len(block)):
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decode_superblock(block, WHERE)
        block[bit // 8] ^= 1 << bit % 8


def test_errors_name_the_place(superblock: Superblock) -> None:
    with pytest.raises(TruncatedError, match=f"^{WHERE}: .*expected 4096 bytes, got 4095"):
        decode_superblock(encode_superblock(superblock)[:4095], WHERE)
    with pytest.raises(FormatError, match=f"^{WHERE}: .*the magic"):
        decode_superblock(bytes(4096), WHERE)
    block = bytearray(encode_superblock(superblock))
    block[3000] ^= 1
    with pytest.raises(ChecksumError, match=f"^{WHERE}: .*expected CRC32C 0x"):
        decode_superblock(block, WHERE)


def test_another_major_version_is_refused(superblock: Superblock) -> None:
    with pytest.raises(VersionError, match="expected format version 1, got 2"):
        decode_superblock(patched(superblock, "H", 8, 2), WHERE)


def test_another_draft_is_refused(superblock: Superblock) -> None:
    message = (
        f"^{WHERE}: read a superblock: expected draft {DRAFT} of the format, got 0: this volume "
        "was made by another state of development of DLFS: import it again$"
    )
    with pytest.raises(VersionError, match=message):
        decode_superblock(patched(superblock, "I", 92, 0), WHERE)


def test_an_unknown_feature_is_refused(superblock: Superblock) -> None:
    with pytest.raises(VersionError, match="a newer dlfs made this volume"):
        decode_superblock(patched(superblock, "Q", 16, 1 << 63), WHERE)


def test_a_newer_minor_version_is_read(superblock: Superblock) -> None:
    newer = decode_superblock(patched(superblock, "H", 10, 9), WHERE)
    assert newer == replace(superblock, version=(1, 9))


def test_a_feature_for_writers_lets_readers_read(superblock: Superblock) -> None:
    assert not decode_superblock(patched(superblock, "Q", 24, 1), WHERE).writable


def test_reserved_bytes_are_ignored(superblock: Superblock) -> None:
    assert decode_superblock(patched(superblock, "Q", 3608, 77), WHERE) == superblock


def test_removed_versions_come_back(superblock: Superblock) -> None:
    after = with_removed(superblock, [(b"digits", 7), (b"digits", 3), (b"x", 2)])
    assert decode_superblock(encode_superblock(after), WHERE) == after
    assert (after.last_removed(b"digits"), after.last_removed(b"x")) == (7, 2)
    assert superblock.last_removed(b"digits") == 0


@pytest.mark.parametrize(
    ("form", "offset", "value", "message"),
    [
        ("I", 12, 512, "a size of 4096 bytes, got 512"),
        ("I", 64, 2, r"member number in 0\.\.1, got 2"),
        ("I", 64, 0, "member UUID to be number 0"),
        ("I", 68, 0, r"1\.\.64 members, got 0"),
        ("I", 68, 65, r"1\.\.64 members, got 65"),
        ("I", 68, 4, "groups of 4 members, got 2"),
        ("I", 88, 0, r"1\.\.20 groups of members, got 0"),
        ("I", 88, 21, r"1\.\.20 groups of members, got 21"),
        ("I", 88, 2, "group 1 to have chunks|group 1 from chunk"),
        ("I", 3600, 3, "groups of 2 members, got 3"),
        ("H", 3604, 2, "group 0 to have state 0 or 1, got 2"),
        ("16s", 512, UUID(int=11).bytes, "a different UUID for each member"),
        ("I", 72, 0, "a chunk of a power of two"),
        ("I", 72, 1 << 31, "a chunk of a power of two"),
        ("I", 76, 100, "a block of a power of two"),
        ("I", 76, 32768, "a block of at most the chunk's"),
        ("Q", 80, 16384, "a data offset of at least 1048576"),
        ("Q", 80, (1 << 20) + 512, "a data offset"),
        ("Q", 3584, 1 << 63, "chunks up to"),
        ("Q", 3592, 0, "group 0 to have chunks"),
        ("Q", 3592, 1, "at least 4 chunks"),
        ("Q", 3592, 64, "in rows within 1044480 usable bytes"),
        ("Q", 3592, 1 << 63, "chunks up to"),
        ("Q", 3592, 1 << 50, "at most .* rows in group 0"),
        ("Q", 96, 0, "member size"),
        ("Q", 96, 1 << 63, "member size"),
        ("Q", 104, 0, "generation"),
        ("Q", 104, 1 << 63, "generation"),
        ("Q", 112, 1 << 63, "creation time"),
        ("I", 120, 0, r"replicas in 1\.\.2, got 0"),
        ("I", 120, 3, r"replicas in 1\.\.2, got 3"),
        ("I", 124, 17, "at most 16 catalog runs"),
        ("I", 124, 0, "catalog runs for"),
        ("Q", 128, 63, "catalog bytes"),
        ("Q", 128, (16 << 20) + 1, "catalog bytes"),
        ("Q", 128, 16385, "catalog runs for 16385 bytes, got 16384 bytes"),
        ("I", 140, 65, "a label of at most 64 bytes"),
        ("B", 144, 0xFF, "utf-8"),
        ("Q", 256, 126, "within 126 chunks"),
        ("Q", 256, (1 << 64) - 1, "within 126 chunks"),
        ("Q", 264, 0, "0 chunks from 0"),
        ("Q", 264, 1 << 63, "within 126 chunks"),
    ],
)
def test_hostile_fields_with_a_right_checksum(
    superblock: Superblock, form: str, offset: int, value: int | bytes, message: str
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        decode_superblock(patched(superblock, form, offset, value), WHERE)
    assert type(caught.value) is FormatError


def test_catalog_runs_of_several_chunks(superblock: Superblock) -> None:
    runs = (ChunkRun(3, 2), ChunkRun(5, 1), ChunkRun(20, 4))
    spread = replace(superblock, catalog_runs=runs)
    assert decode_superblock(encode_superblock(spread), WHERE) == spread


def test_catalog_runs_that_overlap(superblock: Superblock) -> None:
    block = bytearray(patched(superblock, "I", 124, 2))
    struct.pack_into("<QQQQ", block, 256, 3, 4, 5, 1)
    struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
    with pytest.raises(FormatError, match="apart from each other"):
        decode_superblock(block, WHERE)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda sb: replace(sb, label="é" * 33), UsageError, "a label of at most 64 bytes, got 66"),
        (lambda sb: replace(sb, generation=0), UsageError, "generation"),
        (lambda sb: replace(sb, member_number=2), UsageError, "member number"),
        (lambda sb: replace(sb, member_uuids=sb.member_uuids[1:]), UsageError, "UUIDs"),
        (lambda sb: replace(sb, catalog_crc32c=1 << 32), UsageError, "catalog CRC32C"),
        (lambda sb: replace(sb, catalog_bytes=1 << 30), LimitError, "a catalog of at most"),
        (
            lambda sb: replace(sb, catalog_runs=tuple(ChunkRun(2 * i, 1) for i in range(17))),
            LimitError,
            "in 17",
        ),
    ],
)  # fmt: skip
def test_wrong_superblocks_are_not_encoded(
    superblock: Superblock,
    change: Callable[[Superblock], Superblock],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        encode_superblock(change(superblock))
