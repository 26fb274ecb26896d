"""Attribute segments of any bytes, also with right checksums: values or a FormatError."""

from __future__ import annotations

import random
import struct
import tracemalloc
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs._native.checksums import crc32c
from dlfs.attributes import AttributesBuilder, AttributeTable
from dlfs.errors import FormatError

ROUNDS = 1500
INTERESTING = (0, 1, 2, 13, 14, 15, 255, 256, 4096, 65535, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)


def seed_segment() -> tuple[bytes, int]:
    builder = AttributesBuilder()
    count = 70
    columns = {
        "i": np.arange(count),
        "b": np.arange(count) % 2 == 0,
        "class": [f"class {i % 3}" for i in range(count)],
        "text": [f"text {i}" for i in range(count)],
    }
    builder.append(builder.prepare(columns, count), 0)
    parts = builder.freeze(UUID(int=3), np.arange(count))
    return np.concatenate(parts).tobytes(), parts[0].nbytes


SEGMENT, HEAD_BYTES = seed_segment()


def signed(head: bytearray) -> None:
    struct.pack_into("<I", head, 8, crc32c(bytes(head[12:])))


def try_segment(raw: bytes | bytearray, head_bytes: int = HEAD_BYTES) -> bool:
    """Read all of it, with the checksums of columns left aside."""
    memory = np.frombuffer(bytes(raw), np.uint8)
    try:
        table = AttributeTable.over(memory, head_bytes, where="fuzz", verify=False)
        for name in table.dtypes:
            assert len(table.column(name)) == len(table)
            table.column(name, np.arange(len(table))[::7])
    except FormatError as error:
        return refused(error)
    return True


def refused(error: FormatError) -> bool:
    assert str(error).startswith("fuzz: ")
    return False


def test_the_seed_is_valid() -> None:
    assert try_segment(SEGMENT)


@given(st.binary(max_size=400), st.integers(0, 64))
def test_any_bytes_behind_a_head(raw: bytes, at: int) -> None:
    assert not try_segment(raw, len(raw))
    head = bytearray(SEGMENT[:HEAD_BYTES])
    head[12 + at : 12 + at + len(raw)] = raw
    signed(head)
    try_segment(head[:HEAD_BYTES] + SEGMENT[HEAD_BYTES:])


@pytest.mark.parametrize("seed", range(4))
def test_mutated_segments(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        raw = bytearray(SEGMENT)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(200) if rng.random() < 0.5 else rng.randrange(HEAD_BYTES, len(raw))
            width = rng.choice((1, 2, 4, 8))
            value = (rng.choice(INTERESTING) + rng.randint(-1, 1)) % (1 << 8 * width)
            raw[at : at + width] = value.to_bytes(width, "little")
        del raw[len(SEGMENT) :]
        head = raw[:HEAD_BYTES]
        signed(head)
        try_segment(head + raw[HEAD_BYTES:])


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_every_field_at_its_extremes_in_bounded_memory(value: int) -> None:
    tracemalloc.start()
    try:
        for offset in range(12, 200, 4):
            head = bytearray(SEGMENT[:HEAD_BYTES])
            struct.pack_into("<I", head, offset, value)
            signed(head)
            try_segment(head + SEGMENT[HEAD_BYTES:])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
