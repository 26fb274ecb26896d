"""Superblocks and catalogs of any bytes, also with right checksums: a record or a FormatError.

What must not be: another exception, a big allocation, time beyond that of reading the bytes.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs._native.checksums import crc32c
from dlfs.errors import FormatError
from dlfs.format.catalog import (
    AttributeExtent,
    Catalog,
    DatasetRecord,
    decode_catalog,
    encode_catalog,
)
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.superblock import Superblock, decode_superblock, encode_superblock

MUTATIONS = 3000
INTERESTING = (0, 1, 2, 15, 16, 17, 63, 64, 255, 4096, 65535, 1 << 31, (1 << 32) - 1, 1 << 63)

GEOMETRY = Geometry.for_members([2 << 20] * 3, 4096, 512)


def catalog() -> Catalog:
    datasets = tuple(
        DatasetRecord(
            name=b"set%d" % i,
            version=1 + i % 2,
            uuid=UUID(int=100 + i),
            created_ns=5,
            sample_count=3,
            sample_bytes=100,
            layout="shuffled",
            seed=9,
            data_runs=(ChunkRun(10 * i + 4, 2),),
            data_bytes=8192,
            directory_runs=(ChunkRun(10 * i + 6, 4),),
            entries_bytes=12288,
            names_bytes=4096,
            attribute_extent=AttributeExtent(4096, 4096, 4096),
            tags=((7, b"abc"),),
        )
        for i in range(4)
    )
    unfinished = replace(
        datasets[3], version=0, state="unfinished", directory_runs=(), entries_bytes=0,
        names_bytes=0, attribute_extent=None, journal_runs=datasets[3].directory_runs,
        journal_bytes=5, tags=((1, b"source"),),
    )  # fmt: skip
    datasets = (*datasets[:3], unfinished)
    total = GEOMETRY.chunk_total
    free = [ChunkRun(1, 3)] + [ChunkRun(10 * i + 10, 4) for i in range(3)]
    return Catalog.of(7, UUID(int=1), datasets, (*free, ChunkRun(40, total - 40)))


def superblock(raw: bytes) -> Superblock:
    return Superblock(
        volume_uuid=UUID(int=1),
        member_uuids=tuple(UUID(int=10 + i) for i in range(3)),
        member_number=0,
        member_bytes=2 << 20,
        geometry=GEOMETRY,
        generation=7,
        created_ns=5,
        catalog_runs=(ChunkRun(0, 1),),
        catalog_bytes=len(raw),
        catalog_crc32c=crc32c(raw),
        label="fuzz",
    )


RAW = encode_catalog(catalog())
SUPERBLOCK = superblock(RAW)
BLOCK = encode_superblock(SUPERBLOCK)


def signed(block: bytes | bytearray) -> bytes:
    return bytes(block[:4092]) + struct.pack("<I", crc32c(bytes(block[:4092])))


def refused(error: FormatError) -> bool:
    assert str(error).startswith("fuzz: ")
    return False


def try_superblock(block: bytes) -> bool:
    try:
        got = decode_superblock(block, "fuzz")
    except FormatError as error:
        return refused(error)
    again = decode_superblock(encode_superblock(got), "fuzz")
    assert again == got
    return True


def try_catalog(raw: bytes) -> bool:
    named = replace(SUPERBLOCK, catalog_bytes=len(raw), catalog_crc32c=crc32c(raw))
    try:
        got = decode_catalog(raw, named, "fuzz")
    except FormatError as error:
        return refused(error)
    assert encode_catalog(got) == raw[:12] + bytes(4) + raw[16:]  # without what is reserved
    records = list(got.records)
    rebuilt = Catalog.of(got.generation, got.volume_uuid, records, got.free)
    assert list(rebuilt.records) == records
    return True


def mutated(source: bytes, rng: random.Random) -> bytearray:
    """The bytes with a few bits, fields or stretches changed."""
    data = bytearray(source)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice((1, 2, 4, 8))
            at -= at % width
            value = (rng.choice(INTERESTING) + rng.randint(-1, 1)) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, "little")
        elif kind == 2:
            other = rng.randrange(len(data))
            length = rng.randint(1, 64)
            data[at : at + length] = data[other : other + length][: len(data) - at]
        else:
            data[at] = rng.randrange(256)
    return data


def test_the_seeds_are_valid() -> None:
    assert try_superblock(BLOCK)
    assert try_catalog(RAW)


@given(st.binary(max_size=5000))
def test_any_bytes_as_a_superblock(raw: bytes) -> None:
    assert not try_superblock(raw)
    assert not try_superblock(signed(b"DLFSVOL1" + raw.ljust(4092, b"\0")[:4084]))


@given(st.binary(max_size=3000))
def test_any_bytes_as_a_catalog(raw: bytes) -> None:
    assert not try_catalog(raw)
    header = struct.pack("<8sII16sQQ", b"DLFSCAT1", 64, 0, bytes(16), 7, 48 + len(raw))
    assert not try_catalog(header + raw)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_superblocks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATIONS):
        block = mutated(BLOCK[: 544 if rng.random() < 0.9 else None], rng)
        try_superblock(signed(block.ljust(4096, b"\0")[:4096]))


@pytest.mark.parametrize("seed", range(4))
def test_mutated_catalogs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATIONS):
        raw = mutated(RAW, rng)
        if rng.random() < 0.1:
            del raw[rng.randrange(len(raw)) :]
        if len(raw) >= 64 and rng.random() < 0.8:
            struct.pack_into("<Q", raw, 40, len(raw))
        try_catalog(bytes(raw))


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_every_field_at_its_extremes(value: int) -> None:
    for offset in range(48, len(RAW), 4):
        raw = bytearray(RAW)
        struct.pack_into("<I", raw, offset, value)
        try_catalog(bytes(raw))


def test_memory_is_bounded_by_the_bytes() -> None:
    hostile = []
    for offset in (48, 52, 56, 60, 168, 172, 176, 180):
        changed = bytearray(RAW)
        struct.pack_into("<I", changed, offset, 0xFFFFFFFF)
        hostile.append(bytes(changed))
    tracemalloc.start()
    try:
        for raw in hostile:
            try_catalog(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
