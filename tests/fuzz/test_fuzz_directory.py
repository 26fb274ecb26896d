"""Wild directory segments, under right checksums: an error or a bounded answer.

Each example runs in this process: a crash or a hang of libdlfs fails the run. The native test does
the same under the address sanitizer. Wrong checksums are in ``tests/fault/test_flips.py``.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c, crc32c_blocks
from dlfs._native.device import aligned_buffer
from dlfs.directory import DirectoryBuilder, FrozenDirectory, Location, checked_ranges
from dlfs.errors import FormatError

PATHS = sorted(b"%d/%d/name-%d" % (n % 3, n % 7, n) for n in range(500))
LOCATIONS_FIELD, HEADER_CRC, BLOCK = 112, 4092, 4096
CHUNK = 4096

Bytes = NDArray[np.uint8]


def make_parts() -> tuple[Bytes, Bytes]:
    builder = DirectoryBuilder()
    ones = np.ones(len(PATHS))
    builder.add_many(PATHS, np.arange(len(PATHS)), ones, ones)
    for number in range(40):
        builder.add_directory(b"%d/empty/%d" % (number % 4, number))
    large = np.zeros(2 * CHUNK + 1, np.uint8)
    builder.add(b"large", Location(CHUNK, large.size, crc32c(large)))
    parts = builder.freeze(
        uuid.UUID(int=1),
        4 * CHUNK,
        chunk_bytes=CHUNK,
        parts=np.concatenate([[0], crc32c_blocks(large, CHUNK)]).astype(np.uint32),
    )
    return parts.entries, parts.names


ENTRIES, NAMES = make_parts()
SECTIONS = int(ENTRIES[LOCATIONS_FIELD : LOCATIONS_FIELD + 8].view(np.uint64)[0])


def copy(part: Bytes) -> Bytes:
    made = aligned_buffer(part.nbytes, BLOCK)
    made[:] = part
    return made


def seal(entries: Bytes, names: Bytes) -> None:
    """Make every checksum right."""

    def table(part: Bytes, offset: int) -> None:
        sums = [crc32c(part[at : at + BLOCK]) for at in range(0, part.nbytes, BLOCK)]
        entries[offset : offset + 4 * len(sums)] = np.array(sums, "<u4").view(np.uint8)

    table(entries[SECTIONS:], int(entries[80:88].view(np.uint64)[0]))
    table(names, int(entries[96:104].view(np.uint64)[0]))
    entries[168:172].view(np.uint32)[0] = crc32c(entries[BLOCK:SECTIONS])
    entries[HEADER_CRC:BLOCK].view(np.uint32)[0] = crc32c(entries[:HEADER_CRC])


def tolerate(ask: Callable[[], object]) -> None:
    with contextlib.suppress(FormatError):
        ask()


def ask_everything(entries: Bytes, names: Bytes) -> None:
    try:
        directory = FrozenDirectory(entries, lambda: names)
    except FormatError:
        return
    count = len(directory)
    assert count == len(PATHS) + 1  # the entries would have another length
    tolerate(lambda: in_range(directory.find(PATHS), count))
    tolerate(lambda: in_range(directory.order(), count))
    tolerate(lambda: bounded_names(directory))
    tolerate(lambda: in_range(np.array(directory.subtree_range(b"1")), count + 1))
    for prefix in (b"", b"1", b"1/2"):
        tolerate(lambda prefix=prefix: bounded_listing(directory, prefix))
    directory.lengths()
    assert 0 <= directory.rank_at(77) <= count
    tolerate(lambda: ranges_in_chunks(directory))
    tolerate(lambda: list(directory.empty_directories(b"1")))
    tolerate(lambda: directory.empty_at(b"2/empty/2"))


def ranges_in_chunks(directory: FrozenDirectory) -> None:
    directory.verify()
    ranges = checked_ranges(directory)
    assert (ranges.addresses // CHUNK == (ranges.addresses + ranges.lengths - 1) // CHUNK).all()
    assert (ranges.addresses + ranges.lengths <= directory.data_bytes).all()


def in_range(values: NDArray[np.int64] | NDArray[np.uint64], count: int) -> None:
    signed = values.astype(np.int64)
    assert ((signed >= -1) & (signed < count)).all()


def bounded_names(directory: FrozenDirectory) -> None:
    assert all(len(name) <= 4095 for name in directory.names())


def bounded_listing(directory: FrozenDirectory, prefix: bytes) -> None:
    assert sum(1 for _ in directory.children(prefix)) <= len(directory) + directory.empty_count


change = st.tuples(
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
    st.one_of(
        st.binary(min_size=1, max_size=16),
        st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 4, b"\x80" * 4, b"\x7f" * 8]),
    ),
)


def apply(changes: list[tuple[bool, float, bytes]], first: int) -> tuple[Bytes, Bytes]:
    entries, names = copy(ENTRIES), copy(NAMES)
    for in_names, where, data in changes:
        part = names if in_names else entries
        start = 0 if in_names else first
        at = start + int(where * (part.nbytes - start - len(data)))
        part[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return entries, names


@settings(max_examples=150)
@given(st.lists(change, min_size=1, max_size=20))
def test_wild_sections_under_right_checksums(changes: list[tuple[bool, float, bytes]]) -> None:
    entries, names = apply(changes, SECTIONS)
    seal(entries, names)
    ask_everything(entries, names)


@settings(max_examples=150)
@given(st.integers(0, 200 // 4), st.binary(min_size=4, max_size=8))
def test_wild_headers_under_right_checksums(word: int, data: bytes) -> None:
    entries, names = copy(ENTRIES), copy(NAMES)
    at = min(word * 4, 200 - len(data))
    entries[at : at + len(data)] = np.frombuffer(data, np.uint8)
    entries[HEADER_CRC:BLOCK].view(np.uint32)[0] = crc32c(entries[:HEADER_CRC])
    ask_everything(entries, names)
