"""DirectoryBuilder: order, the rules of paths, all or nothing."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from dlfs._native.checksums import crc32c, crc32c_blocks
from dlfs.directory import DirectoryBuilder, FrozenDirectory, Location, checked_ranges
from dlfs.errors import ExistsError, LimitError, NotFoundError, UsageError

DATASET = uuid.UUID(int=7)
CHUNK = 4096


def filled(*paths: bytes) -> DirectoryBuilder:
    builder = DirectoryBuilder()
    for number, path in enumerate(paths):
        builder.add(path, Location(number * 10, 10, number))
    return builder


def test_get_names_what_is_missing() -> None:
    with pytest.raises(NotFoundError, match="'x/y'"):
        filled(b"x/z").get(b"x/y")


def test_long_locations_survive() -> None:
    builder = DirectoryBuilder()
    location = Location((1 << 56) - 1, (1 << 40) - 1, 0xFFFFFFFF)
    builder.add(b"a", location)
    assert builder.get(b"a") == location


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (b"a/b", "added already"),
        (b"a", "a directory has this path"),
        (b"a/b/c", "'a/b' is a sample"),
        (b"a/b/c/d", "'a/b' is a sample"),
        (b"x/y", "a directory has this path"),
    ],
)
def test_conflicts_name_the_path(path: bytes, says: str) -> None:
    builder = filled(b"a/b", b"x/y/z")
    with pytest.raises(ExistsError, match=says):
        builder.add(path, Location(20, 1, 0))
    assert len(builder) == 2


@pytest.mark.parametrize("paths", [[b"n/1", b"n/1"], [b"n", b"n/1"], [b"n/1", b"n"], [b"ok", b"a"]])
def test_conflicts_in_a_batch_add_nothing(paths: list[bytes]) -> None:
    builder = filled(b"a/b")
    zeros = np.zeros(len(paths))
    with pytest.raises(ExistsError):
        builder.add_many(paths, zeros, zeros, zeros)
    assert list(builder) == [b"a/b"]
    builder.add(b"n/1/2", Location(0, 0, 0))  # nor did it leave directories behind


@pytest.mark.parametrize("path", [b"", b"/a", b"a/", b"a//b", b"./a", b"a/..", b"a\0b"])
def test_bad_paths(path: bytes) -> None:
    with pytest.raises(UsageError):
        DirectoryBuilder().check([path])


def test_limits() -> None:
    builder = DirectoryBuilder()
    longest = b"/".join([b"d" * 255] * 15 + [b"e" * 254, b"f"])[:4095].rstrip(b"/")
    builder.add(longest, Location(0, 1, 0))
    with pytest.raises(LimitError):
        builder.add(b"g" * 256, Location(1, 1, 0))
    with pytest.raises(LimitError):
        builder.add(b"g/" * 2048 + b"g", Location(1, 1, 0))
    with pytest.raises(LimitError):
        builder.add(b"g", Location(1 << 56, 1, 0))
    with pytest.raises(LimitError):
        builder.add(b"g", Location(1, 1 << 40, 0))
    with pytest.raises(UsageError):
        builder.add_many([b"g"], [1, 2], [1, 1], [0, 0])
    assert list(builder) == [longest]


def test_freeze_is_repeatable_and_does_not_end_the_builder() -> None:
    builder = filled(b"b", b"a")
    first = builder.freeze(DATASET, CHUNK, chunk_bytes=CHUNK)
    again = builder.freeze(DATASET, CHUNK, chunk_bytes=CHUNK)
    assert first.entries.tobytes() == again.entries.tobytes()
    assert first.names.tobytes() == again.names.tobytes()
    assert (first.sample_count, first.sample_bytes) == (2, 20)
    builder.add(b"c", Location(20, 5, 0))
    parts = builder.freeze(DATASET, CHUNK, chunk_bytes=CHUNK)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    assert directory.names() == [b"a", b"b", b"c"]
    assert directory.dataset_uuid == DATASET


def test_freeze_refuses_locations_outside_or_inside_others() -> None:
    builder = filled(b"a", b"b")
    with pytest.raises(UsageError, match="in 0 bytes of data"):
        builder.freeze(DATASET, 0, chunk_bytes=CHUNK)
    builder.add(b"c", Location(15, 1, 0))
    with pytest.raises(UsageError):
        builder.freeze(DATASET, CHUNK, chunk_bytes=CHUNK)


def test_freeze_takes_the_parts_of_samples_larger_than_a_chunk() -> None:
    data = bytes(range(256)) * 40
    parts = crc32c_blocks(data, CHUNK)
    builder = DirectoryBuilder()
    builder.add(b"large", Location(CHUNK, len(data), crc32c(data)))
    builder.add(b"small", Location(0, 5, 1))
    table = np.concatenate([[0], parts]).astype(np.uint32)
    frozen = builder.freeze(DATASET, 5 * CHUNK, chunk_bytes=CHUNK, parts=table)
    with FrozenDirectory(frozen.entries, lambda: frozen.names) as directory:
        assert directory.parts.tolist() == [*table.tolist(), 0]
        directory.verify()
        ranges = checked_ranges(directory)
        assert ranges.samples.tolist() == [1, 0, 0, 0]
        assert ranges.addresses.tolist() == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]
        assert ranges.lengths.tolist() == [5, CHUNK, CHUNK, len(data) - 2 * CHUNK]
        assert ranges.crcs.tolist() == [1, *parts.tolist()]
        assert len(checked_ranges(directory, start=CHUNK)) == 3
        assert len(checked_ranges(directory, end=3 * CHUNK)) == 1
    table[2] ^= 1
    with pytest.raises(UsageError):
        builder.freeze(DATASET, 5 * CHUNK, chunk_bytes=CHUNK, parts=table)
    with pytest.raises(UsageError):
        builder.freeze(DATASET, 5 * CHUNK, chunk_bytes=CHUNK)
