"""SegmentBuilder: the same segment for any blocks; rules of paths; memory."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs._native import paths as native
from dlfs._native.library import library
from dlfs._native.paths import PathRefusedError, PathTable, pack_paths
from dlfs._native.segment import Segment, SegmentBuilder, build_segment
from dlfs.directory import DirectoryBuilder, FrozenDirectory, Location
from dlfs.errors import ClosedError, ExistsError, LimitError, UsageError
from dlfs.format.location import pack_locations

CHUNK = 4096
DATASET = uuid.UUID(int=9)
# "!" sorts before "/", "0" behind it
components = st.text("ab!0", min_size=1, max_size=3).map(str.encode)
trees = st.lists(st.lists(components, min_size=1, max_size=4).map(b"/".join), max_size=60)


def new_builder(data_bytes: int = 1 << 20) -> SegmentBuilder:
    return SegmentBuilder(dataset_uuid=DATASET.bytes, data_bytes=data_bytes, chunk_bytes=CHUNK)


def add(builder: SegmentBuilder, paths: Sequence[bytes], first: int = 0) -> None:
    text, offsets = pack_paths(paths)
    count = len(paths)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    builder.add(text, offsets, pack_locations(numbers * np.uint64(8), np.full(count, 8), numbers))


def built(paths: Sequence[bytes], directories: Sequence[bytes], splits: Sequence[int]) -> Segment:
    with new_builder() as builder:
        builder.add_directories(directories)
        bounds = [0, *sorted(split % (len(paths) + 1) for split in splits), len(paths)]
        for first, end in pairwise(bounds):
            add(builder, paths[first:end], first)
        return builder.finish()


@given(trees, trees, st.lists(st.integers(0, 100), max_size=8))
def test_any_blocks_give_the_same_segment(
    samples: list[bytes], directories: list[bytes], splits: list[int]
) -> None:
    model = DirectoryBuilder()
    for path in samples:
        try:
            model.add(path, Location(0, 0, 0))
        except ExistsError:
            continue
    for path in directories:
        try:
            model.add_directory(path)
        except ExistsError:
            continue
    paths = list(model)
    empty = model.empty_directories()
    whole, parts = built(paths, empty, []), built(paths, empty, splits)
    assert whole.entries.tobytes() == parts.entries.tobytes()
    assert whole.names.tobytes() == parts.names.tobytes()
    with FrozenDirectory(parts.entries, lambda: parts.names) as directory:
        directory.verify()
        assert directory.names() == paths
        assert directory.find(paths).tolist() == list(range(len(paths)))
        assert directory.empty_directories() == empty


@given(trees, trees)
def test_directories_with_something_below_are_left_out(
    samples: list[bytes], directories: list[bytes]
) -> None:
    model = DirectoryBuilder()
    added: set[bytes] = set()
    for path in samples:
        try:
            model.add(path, Location(0, 0, 0))
        except ExistsError:
            continue
    for path in directories:
        try:
            model.add_directory(path)
        except ExistsError:
            continue
        added.add(path)
    given_all = built(list(model), sorted(added, key=lambda path: path + b"/"), [])
    given_empty = built(list(model), model.empty_directories(), [])
    assert given_all.entries.tobytes() == given_empty.entries.tobytes()
    assert given_all.names.tobytes() == given_empty.names.tobytes()


@given(trees, st.lists(st.integers(0, 100), max_size=8))
def test_clashes_are_found_across_blocks(samples: list[bytes], splits: list[int]) -> None:
    paths = sorted(samples)
    clashes = {
        path
        for number, path in enumerate(paths)
        if path in paths[:number] or any(path.startswith(other + b"/") for other in paths)
    }
    if not clashes:
        assert built(paths, [], splits).sample_count == len(paths)
        return
    with pytest.raises(PathRefusedError) as caught:
        built(paths, [], splits)
    error = caught.value
    assert error.path == min(clashes)
    if error.rule == native.BELOW_SAMPLE:
        assert error.sample in paths
        assert error.path.startswith(error.sample + b"/")
    else:
        assert error.rule == native.REPEATED
        assert paths.count(error.path) > 1


@pytest.mark.parametrize(
    ("samples", "directories", "rule", "path"),
    [
        ([b"b", b"a"], [], native.UNSORTED, b"a"),
        ([b"a", b"a"], [], native.REPEATED, b"a"),
        ([b"a", b"b/../c"], [], native.MALFORMED, b"b/../c"),
        ([b"a", b"a!", b"a/b"], [], native.BELOW_SAMPLE, b"a/b"),
        ([b"a", b"b"], [b"a"], native.BELOW_SAMPLE, b"a"),
        ([b"a"], [b"a/b/c"], native.BELOW_SAMPLE, b"a/b/c"),
        ([], [b"b", b"a"], native.UNSORTED, b"a"),
        ([], [b"a", b"a"], native.UNSORTED, b"a"),
        ([], [b"a//b"], native.MALFORMED, b"a//b"),
    ],
)
@pytest.mark.parametrize("step", [1, 10])
def test_the_error_names_the_path(
    samples: list[bytes], directories: list[bytes], rule: int, path: bytes, step: int
) -> None:
    with pytest.raises(PathRefusedError) as caught:
        built(samples, directories, range(0, len(samples), step))
    assert (caught.value.rule, caught.value.path) == (rule, path)
    assert caught.value.is_directory == (path in directories)


def test_no_samples_and_only_empty_directories() -> None:
    for directories in ([], [b"a", b"b/c"]):
        segment = built([], directories, [])
        assert (segment.sample_count, segment.sample_bytes) == (0, 0)
        with FrozenDirectory(segment.entries, lambda segment=segment: segment.names) as directory:
            directory.verify()
            assert len(directory) == 0
            assert directory.empty_directories() == directories


def test_a_segment_outlives_its_builder() -> None:
    segment = built([b"a"], [], [])
    with FrozenDirectory(segment.entries, lambda: segment.names) as directory:
        assert directory.names() == [b"a"]


def test_misuse_of_a_builder() -> None:
    builder = new_builder()
    add(builder, [b"a"])
    for bad in (
        lambda: builder.add_directories([b"b"]),
        lambda: builder.add(*pack_paths([b"b"]), np.zeros(3, np.uint8)),
        lambda: builder.add_table(PathTable(), np.zeros(1, np.uint64)),
    ):
        with pytest.raises(UsageError):
            bad()
    builder.finish()
    with pytest.raises(UsageError):
        builder.finish()
    builder.close()
    builder.close()
    with pytest.raises(ClosedError):
        builder.finish()
    with pytest.raises(UsageError):
        SegmentBuilder(dataset_uuid=b"x", data_bytes=0, chunk_bytes=CHUNK)
    with pytest.raises(UsageError):
        SegmentBuilder(dataset_uuid=DATASET.bytes, data_bytes=1, chunk_bytes=CHUNK)


def test_the_data_space_may_become_known_at_the_end() -> None:
    with new_builder(0) as builder:
        add(builder, [b"a", b"b"])
        with pytest.raises(UsageError):
            builder.resize(CHUNK + 1)
        builder.resize(2 * CHUNK)
        segment = builder.finish()
        with pytest.raises(UsageError):
            builder.resize(CHUNK)
    assert segment.entries.tobytes() == built_in(2 * CHUNK, [b"a", b"b"]).entries.tobytes()


def built_in(data_bytes: int, paths: Sequence[bytes]) -> Segment:
    with new_builder(data_bytes) as builder:
        add(builder, paths)
        return builder.finish()


def test_samples_are_ordered_by_address_however_they_are_spread() -> None:
    """Most are in few ranges of addresses, and many without bytes are at one address."""
    count, far = 30_000, 1 << 40
    chance = np.random.default_rng(4)
    addresses = np.where(np.arange(count) % 7 == 0, np.arange(count) * CHUNK, np.arange(count) * 8)
    addresses = chance.permutation(np.unique(addresses // 8 * 8)).astype(np.uint64)
    addresses[addresses % 5 == 0] += np.uint64(far)
    empty = np.full(20_000, CHUNK, np.uint64)
    lengths = chance.permutation(np.repeat([8, 0], [len(addresses), len(empty)]))
    placed = np.full(len(lengths), CHUNK, np.uint64)
    placed[lengths > 0] = addresses
    paths = [b"%08d" % number for number in range(len(lengths))]
    text, offsets = pack_paths(paths)
    with new_builder(2 * far) as builder:
        builder.add(text, offsets, pack_locations(placed, lengths, np.zeros(len(lengths))))
        segment = builder.finish()
    with FrozenDirectory(segment.entries, lambda: segment.names) as directory:
        directory.verify()
        expected = np.lexsort((np.arange(len(placed)), placed))
        assert directory.order().tolist() == expected.tolist()


# ---- the table of a dataset that is being written ---------------------------------------------


@given(st.lists(st.tuples(trees, st.booleans()), max_size=6))
def test_a_table_is_like_sets_of_paths(calls: list[tuple[list[bytes], bool]]) -> None:
    builder = DirectoryBuilder()
    known: dict[bytes, int] = {}
    filled: set[bytes] = set()
    added: set[bytes] = set()
    for paths, directories in calls:
        if directories:
            for path in paths:
                clash = path in known or any(parent in known for parent in parents(path))
                assert raises_exists(builder.add_directory, path) == clash
                if not clash:
                    added.add(path)
                    filled |= set(parents(path))
            continue
        clash = clashes(paths, known, filled | added)
        zeros = np.zeros(len(paths))
        assert raises_exists(builder.check, paths) == clash
        assert raises_exists(builder.add_many, paths, zeros, zeros, zeros) == clash
        if not clash:
            known |= {path: len(known) + row for row, path in enumerate(paths)}
            filled |= {parent for path in paths for parent in parents(path)}
        assert all((path in builder) == (path in known) for path in paths)
    assert list(builder) == sorted(known)
    assert builder.rows().tolist() == [known[path] for path in sorted(known)]
    empty = sorted(added - filled, key=lambda path: path + b"/")
    assert builder.empty_directories() == empty


def parents(path: bytes) -> list[bytes]:
    parts = path.split(b"/")
    return [b"/".join(parts[:end]) for end in range(1, len(parts))]


def clashes(paths: list[bytes], known: dict[bytes, int], directories: set[bytes]) -> bool:
    samples = known.keys() | set(paths)
    below = {parent for path in paths for parent in parents(path)}
    return (
        len(set(paths)) < len(paths)
        or any(path in known or path in directories for path in paths)
        or bool(below & samples)
    )


def raises_exists(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except ExistsError:
        return True
    return False


def test_the_longest_directory() -> None:
    builder = DirectoryBuilder()
    longest = b"/".join([b"d" * 255] * 15 + [b"e" * 254])
    builder.add_directory(longest)
    assert builder.empty_directories() == [longest]
    with pytest.raises(LimitError, match="expected at most 4094 bytes, got 4095"):
        builder.add_directory(longest[:-1] + b"/f")
    with pytest.raises(LimitError, match="expected at most 4095 bytes, got 4097"):
        builder.add_directory(longest + b"/fg")
    with pytest.raises(UsageError, match="an empty component"):
        builder.add_directory(b"a/")


# ---- memory -------------------------------------------------------------------------------------

COUNT = 2_000_000
ADDED = f"""
import numpy as np
from dlfs._native.paths import pack_paths
from dlfs._native.segment import SegmentBuilder
from dlfs.directory import DirectoryBuilder
from dlfs.format.location import pack_locations

COUNT, BLOCK = {COUNT}, 10_000

def status(field):
    return int(open("/proc/self/status").read().partition(field + ":")[2].split()[0]) * 1024

def block(first):
    paths = [b"train/n%05d/%08d.jpeg" % (number // 1000, number)
             for number in range(first, first + BLOCK)]
    places = np.arange(first, first + BLOCK, dtype=np.uint64) * np.uint64(7_654_321) % COUNT
    return paths, places * np.uint64(64), np.full(BLOCK, 64), places

def packed(paths, *locations):
    return *pack_paths(paths), pack_locations(*locations)

"""
STREAMED = """
packed(*block(0))
before = status("VmRSS")
builder = SegmentBuilder(dataset_uuid=bytes(16), data_bytes=COUNT * 64, chunk_bytes=4096)
for first in range(0, COUNT, BLOCK):
    builder.add(*packed(*block(first)))
segment = builder.finish()
print(status("VmHWM") - before - segment.entries.nbytes - segment.names.nbytes)
"""
COLLECTED = """
builder = DirectoryBuilder()
builder.check(block(0)[0])
before = status("VmRSS")
for first in range(0, COUNT, BLOCK):
    builder.add_many(*block(first))
print(status("VmHWM") - before - COUNT * len(block(0)[0][0]))
"""


@pytest.mark.parametrize(
    ("program", "most_bytes"), [(STREAMED, 26), (COLLECTED, 48)], ids=["streamed", "collected"]
)
def test_a_sample_takes_little_memory(program: str, most_bytes: int) -> None:
    """Beside the segment, or the text of the paths: 17 and 39 bytes, and what the process needs."""
    run = subprocess.run(
        [sys.executable, "-c", ADDED + program], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < most_bytes * COUNT


MASK = (1 << 64) - 1
PRIME_1, PRIME_2, PRIME_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME_4, PRIME_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & MASK


def mixed(lane: int, start: int) -> int:
    """XXH64's step of 8 bytes."""
    lane = rotate(lane * PRIME_2 & MASK, 31) * PRIME_1
    return (rotate((start ^ lane) & MASK, 27) * PRIME_1 + PRIME_4) & MASK


def path_of_hash(wanted: int, beginning: int) -> bytes | None:
    """A path of 16 bytes with a hash, for the seed 0, and with the given first 8 bytes, or None."""
    value = wanted ^ wanted >> 32
    value = value * pow(PRIME_3, -1, 1 << 64) & MASK
    value = value ^ value >> 29 ^ value >> 58
    value = value * pow(PRIME_2, -1, 1 << 64) & MASK
    value ^= value >> 33
    state = rotate((value - PRIME_4) * pow(PRIME_1, -1, 1 << 64) & MASK, 64 - 27)
    lane = state ^ mixed(beginning, PRIME_5 + 16)
    lane = rotate(lane * pow(PRIME_1, -1, 1 << 64) & MASK, 64 - 31)
    lane = lane * pow(PRIME_2, -1, 1 << 64) & MASK
    path = beginning.to_bytes(8, "little") + lane.to_bytes(8, "little")
    return None if b"\0" in path or b"/" in path else path


def test_hashes_that_differ_in_their_last_bits_only() -> None:
    """Sorted by their leading bits, all these are out of order."""
    paths: list[bytes] = []
    beginnings = (int.from_bytes(b"%08d" % number, "little") for number in range(10_000))
    for beginning in beginnings:
        path = path_of_hash(0xABCDEF << 40 | 3000 - len(paths), beginning)
        paths += [path] if path else []
        if len(paths) == 3000:
            break
    assert library().dlfs_path_hash(paths[7], 16, 0) == 0xABCDEF << 40 | 2993
    segment = built(paths, [], [])
    assert segment.hash_seed == 0
    with FrozenDirectory(segment.entries, lambda: segment.names) as directory:
        directory.verify()
        assert directory.find(paths).tolist() == list(range(3000))


def test_all_at_once_is_a_stream_of_one_block() -> None:
    paths = [b"a", b"b/c", b"d"]
    numbers = np.arange(3, dtype=np.uint64)
    locations = pack_locations(numbers * np.uint64(8), np.full(3, 8), numbers)
    segment = build_segment(
        *pack_paths(paths),
        locations,
        dataset_uuid=DATASET.bytes,
        data_bytes=1 << 20,
        chunk_bytes=CHUNK,
    )
    assert segment.entries.tobytes() == built(paths, [], [1]).entries.tobytes()
