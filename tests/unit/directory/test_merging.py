"""Merging sorted samples: their order, and paths that are there twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs._native.paths import check_packed, pack_paths, path_at
from dlfs.directory import PathBlock, merge_sorted
from dlfs.errors import ExistsError, UsageError
from dlfs.format.location import pack_locations


def block_of(paths: Sequence[bytes], rows: Sequence[int]) -> PathBlock:
    text, offsets = pack_paths(paths)
    numbers = np.array(rows, np.uint64)
    return PathBlock(text, offsets, pack_locations(numbers * 7, numbers, numbers), numbers)


def source_of(samples: Sequence[tuple[bytes, int]], step: int) -> Iterator[PathBlock]:
    for first in range(0, len(samples), step):
        some = samples[first : first + step]
        yield block_of([path for path, _ in some], [row for _, row in some])


def merged(sources: Sequence[Iterator[PathBlock]], block: int) -> list[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []
    for part in merge_sorted(sources, block_samples=block):
        check_packed(part.text, part.offsets)
        rows = part.rows.tolist()
        assert 0 < len(rows) <= block
        assert part.locations.tobytes() == block_of([b"x"] * len(rows), rows).locations.tobytes()
        found += [(path_at(part.text, part.offsets, i), row) for i, row in enumerate(rows)]
    return found


paths = st.binary(min_size=1, max_size=6)


@given(
    st.sets(paths, max_size=60),
    st.integers(1, 7),
    st.integers(1, 20),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_merged_as_sorted_at_once(
    given_paths: set[bytes], count: int, step: int, block: int, random: object
) -> None:
    samples = [(path, row) for row, path in enumerate(sorted(given_paths))]
    parts: list[list[tuple[bytes, int]]] = [[] for _ in range(count)]
    for sample in samples:
        parts[random.randrange(count)].append(sample)  # type: ignore[attr-defined]
    assert merged([source_of(part, step) for part in parts], block) == samples


def test_no_sources_and_empty_blocks() -> None:
    assert merged([], 5) == []
    assert merged([iter([])], 5) == []
    empty = block_of([], [])
    blocks = [empty, block_of([b"b"], [1]), empty, empty, block_of([b"c"], [2])]
    assert merged([iter(blocks), iter([block_of([b"a"], [0]), empty])], 5) == [
        (b"a", 0),
        (b"b", 1),
        (b"c", 2),
    ]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize("at", [0, 1, 30, 59])
def test_a_path_that_two_sources_have_is_named(step: int, at: int) -> None:
    samples = [(b"a/%02d" % number, number) for number in range(60)]
    sources = [samples[::2], samples[1::2], [samples[at]]]
    with pytest.raises(ExistsError, match=f"'a/{at:02d}': it was added already"):
        merged([source_of(source, step) for source in sources], 10)


def test_long_paths_fill_a_block() -> None:
    samples = [(b"/".join([b"%05d" % row] + [b"d" * 200] * 20), row) for row in range(3000)]
    assert merged([source_of(samples[::2], 400), source_of(samples[1::2], 300)], 1 << 16) == samples


def test_a_block_whose_arrays_differ_in_length() -> None:
    block = block_of([b"a", b"b"], [0, 1])
    for bad in (block._replace(rows=block.rows[:1]), block._replace(locations=block.locations[1:])):
        with pytest.raises(UsageError):
            list(merge_sorted([iter([bad])]))
