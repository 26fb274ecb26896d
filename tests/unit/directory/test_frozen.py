"""FrozenDirectory: lazy names, wrong use, damaged parts; ``tests/property`` has its look-ups."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from dlfs._native.checksums import crc32c
from dlfs._native.library import library
from dlfs.directory import DirectoryBuilder, FrozenDirectory, FrozenParts
from dlfs.errors import (
    ChecksumError,
    ClosedError,
    FormatError,
    TruncatedError,
    UsageError,
    VersionError,
)

CHUNK = 1 << 20
PATHS = sorted(
    [b"train/%02d/%03d.png" % (n % 7, n) for n in range(300)]
    + [b"readme", b"train-notes", b"train.txt", b"val/a/b/c/deep", b"\xff/\xfe raw\n name"]
)


def freeze(paths: list[bytes], lengths: list[int] | None = None) -> FrozenParts:
    builder = DirectoryBuilder()
    sizes = np.array(lengths if lengths is not None else [10] * len(paths), np.uint64)
    addresses = np.cumsum(sizes) - sizes
    builder.add_many(paths, addresses[::-1], sizes[::-1], np.arange(len(paths)))
    return builder.freeze(uuid.UUID(int=1), CHUNK, chunk_bytes=CHUNK)


@pytest.fixture(scope="module")
def parts() -> FrozenParts:
    return freeze(PATHS)


@pytest.fixture
def directory(parts: FrozenParts) -> FrozenDirectory:
    return FrozenDirectory(parts.entries, lambda: parts.names, label="dataset t")


def test_find_packed_checks_its_arrays(directory: FrozenDirectory) -> None:
    text = np.frombuffer(b"readmetrain.txt", np.uint8)
    got = directory.find_packed(text, np.array([0, 6, 15], np.uint64))
    assert got.tolist() == [PATHS.index(b"readme"), PATHS.index(b"train.txt")]
    for offsets in ([0, 6, 16], [6, 0, 15], []):
        with pytest.raises(UsageError):
            directory.find_packed(text, np.array(offsets, np.uint64))
    with pytest.raises(UsageError):
        directory.find_packed(text, np.array([0, 6], np.int64))  # type: ignore[arg-type]


def test_names(directory: FrozenDirectory) -> None:
    assert directory.names() == PATHS
    assert directory.names(5, 40) == PATHS[5:45]
    assert directory.name(17) == PATHS[17]
    for first, count in ((-1, 1), (0, len(PATHS) + 1), (len(PATHS), 1), (3, -1)):
        with pytest.raises(UsageError):
            directory.names(first, count)


def test_names_of_scattered_indices(directory: FrozenDirectory) -> None:
    random = np.random.default_rng(3)
    for indices in ([], [17], [5, 6, 40, 6, 6, 5, 0], random.integers(0, len(PATHS), 200).tolist()):
        assert directory.names_of(indices) == [PATHS[index] for index in indices]
    assert directory.names_of(range(len(PATHS))) == PATHS
    for wrong in ([len(PATHS)], [-1], [0.5], ["a"]):
        with pytest.raises(UsageError):
            directory.names_of(wrong)


def test_a_directory_closed_during_a_call_stays_in_memory(parts: FrozenParts) -> None:
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    directory.find_one(PATHS[0])
    handle = directory.handle  # as a call that is under way has it
    freed = weakref.finalize(handle, bool)
    directory.close()
    assert library().dlfs_directory_count(handle) == len(PATHS)
    assert freed.alive
    del handle
    assert not freed.alive
    with pytest.raises(ClosedError):
        directory.find_one(PATHS[0])


def test_long_names_come_in_pieces() -> None:
    paths = sorted(b"/".join([b"%03d" % n + b"x" * 250] * 16) for n in range(600))
    parts = freeze(paths)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    assert directory.names() == paths
    assert directory.names_of(range(599, -1, -1)) == paths[::-1]


def test_locations(directory: FrozenDirectory) -> None:
    count = len(PATHS)
    assert directory.lengths().tolist() == [10] * count
    assert directory.addresses([0, count - 1]).tolist() == [(count - 1) * 10, 0]
    assert directory.crcs([3]).tolist() == [3]
    assert directory.order().tolist() == list(range(count))[::-1]
    assert directory.order(1, 2).tolist() == [count - 2, count - 3]
    assert directory.rank_at(0) == 0
    assert directory.rank_at(11) == 2
    assert directory.rank_at(count * 10) == count
    assert directory.data_bytes == directory.chunk_bytes == CHUNK
    assert directory.parts.tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        directory.locations["crc32c"] = 0
    for indices in ([-1], [count]):
        with pytest.raises(UsageError):
            directory.lengths(indices)
    with pytest.raises(UsageError):
        directory.order(1, count)


def test_children_of_a_directory_larger_than_a_batch() -> None:
    paths = sorted(
        [b"d/%05d" % n for n in range(10_000)] + [b"d/5/%d" % n for n in range(6000)] + [b"e"]
    )
    parts = freeze(paths)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    entries = list(directory.children(b"d"))
    assert len(entries) == 10_001
    assert [e.name for e in entries if e.is_directory] == [b"5"]
    assert [paths[e.first_index] for e in entries if not e.is_directory] == [
        p for p in paths if p.count(b"/") == 1
    ]


def test_listing_a_tree_does_not_decode_what_is_below(
    parts: FrozenParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [b"%02d/%04d" % (d, n) for d in range(10) for n in range(2000)]
    big = freeze(paths)
    directory = FrozenDirectory(big.entries, lambda: big.names)
    decoded = 0
    real = FrozenDirectory.names

    def counting(self: FrozenDirectory, first: int = 0, count: int | None = None) -> list[bytes]:
        nonlocal decoded
        decoded += count or 0
        return real(self, first, count)

    monkeypatch.setattr(FrozenDirectory, "names", counting)
    assert len(list(directory.children(b""))) == 10
    assert decoded <= 10 * 64


def test_names_are_loaded_once_and_late(parts: FrozenParts) -> None:
    calls: list[int] = []

    def load() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        calls.append(1)
        return parts.names

    directory = FrozenDirectory(parts.entries, load)
    directory.lengths()
    directory.order()
    assert not calls
    threads = [threading.Thread(target=directory.find, args=(PATHS,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_names_that_cannot_be_loaded_are_asked_for_again(parts: FrozenParts) -> None:
    answers: list[Callable[[], None]] = []

    def load() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        if not answers:
            answers.append(lambda: None)
            raise ChecksumError("no")
        return parts.names

    directory = FrozenDirectory(parts.entries, load)
    with pytest.raises(ChecksumError):
        directory.name(0)
    assert directory.name(0) == PATHS[0]


def test_close(parts: FrozenParts) -> None:
    released: list[int] = []
    with FrozenDirectory(
        parts.entries, lambda: parts.names, release=lambda: released.append(1)
    ) as directory:
        kept = directory.lengths()
    directory.close()
    assert released == [1]
    assert kept[0] == 10
    for ask in (directory.order, lambda: directory.locations, lambda: directory.find(PATHS)):
        with pytest.raises((ClosedError, UsageError)):
            ask()


def test_damage_is_an_error_that_names_the_dataset(parts: FrozenParts) -> None:
    for byte in (0, 100, 4092, 5000):
        damaged = parts.entries.copy()
        entries = np.zeros(damaged.nbytes + 4096, np.uint8)
        start = -entries.ctypes.data % 4096
        entries = entries[start : start + damaged.nbytes]
        entries[:] = damaged
        entries[byte] ^= 1
        with pytest.raises(FormatError, match="dataset t"):
            FrozenDirectory(entries, lambda: parts.names, label="dataset t").verify()
    with pytest.raises(TruncatedError):
        FrozenDirectory(parts.entries[:4096], lambda: parts.names)


def test_a_directory_of_another_version_is_refused() -> None:
    parts = freeze(PATHS)
    parts.entries[8] = 2
    parts.entries[4092:4096].view(np.uint32)[0] = crc32c(parts.entries[:4092])
    with pytest.raises(VersionError, match="expected version 1, got 2"):
        FrozenDirectory(parts.entries, lambda: parts.names)
