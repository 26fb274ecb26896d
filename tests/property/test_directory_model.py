"""The directory against its model: a dictionary of paths, listed and searched the plain way."""

from __future__ import annotations

import uuid

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs._native.checksums import combine_crc32c
from dlfs.directory import DirectoryBuilder, Entry, FrozenDirectory, Location
from dlfs.errors import ExistsError

# Few letters, so that names share beginnings, nest and collide; "!" and "." sort before "/", "0"
# right after it.
components = st.text("a!.0-\xff", min_size=1, max_size=4).map(lambda t: t.encode("latin-1"))
names = components.filter(lambda c: c not in (b".", b".."))
paths = st.lists(names, min_size=1, max_size=4).map(b"/".join)
CHUNK = 1 << 26
lengths = st.one_of(st.just(0), st.integers(1, 100), st.integers(1 << 32, (1 << 34)))


def conflicts(path: bytes, model: dict[bytes, int]) -> bool:
    return any(
        path == other or other.startswith(path + b"/") or path.startswith(other + b"/")
        for other in model
    )


def start_of(address: int, length: int) -> int:
    """Where a sample may begin, at or after an address."""
    fits = address % CHUNK + length <= CHUNK
    return address if fits else -(-address // CHUNK) * CHUNK


def sums_of(number: int, length: int) -> tuple[int, list[int]]:
    """The CRC32C of a sample, and those of its parts if it is larger than a chunk.

    All parts but the last have the same bytes.
    """
    if length <= CHUNK:
        return number, []
    count, rest = divmod(length, CHUNK)
    sums = [number] * count + [number + 1] * (rest > 0)
    crc = np.zeros(1, np.uint32)
    for following, size in zip(sums, [CHUNK] * count + [rest], strict=False):
        crc = combine_crc32c(crc, np.array([following], np.uint32), np.array([size], np.int64))
    return int(crc[0]), sums


def listed(model: list[bytes], prefix: bytes) -> list[Entry]:
    """The children of a directory, by looking at every path."""
    base = prefix + b"/" if prefix else b""
    entries: list[Entry] = []
    for index, path in enumerate(model):
        if not path.startswith(base):
            continue
        name, slash, _ = path[len(base) :].partition(b"/")
        if not entries or entries[-1].name != name:
            entries.append(Entry(name, bool(slash), index))
    return entries


@given(st.lists(st.tuples(paths, lengths), max_size=80))
def test_builder_then_frozen(samples: list[tuple[bytes, int]]) -> None:
    builder = DirectoryBuilder()
    model: dict[bytes, int] = {}
    address = 0
    addresses: dict[bytes, int] = {}
    chunks: dict[int, int] = {}
    for number, (path, length) in enumerate(samples):
        address = start_of(address, length)
        crc, sums = sums_of(number, length)
        location = Location(address, length, crc)
        if conflicts(path, model):
            try:
                builder.add(path, location)
            except ExistsError:
                continue
            raise AssertionError(f"{path!r} was taken")
        builder.add(path, location)
        model[path], addresses[path] = length, address
        chunks |= {address // CHUNK + chunk: found for chunk, found in enumerate(sums)}
        address = start_of(address + length, CHUNK) if length > CHUNK else address + length
    assert list(builder) == sorted(model)
    data_bytes = -(-address // CHUNK) * CHUNK
    table = np.zeros(data_bytes // CHUNK, np.uint32)
    table[list(chunks)] = list(chunks.values())
    parts = builder.freeze(uuid.UUID(int=5), data_bytes, chunk_bytes=CHUNK, parts=table)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    directory.verify()
    assert directory.parts.tolist() == (table.tolist() if chunks else [])
    check(directory, sorted(model), model, addresses)


def check(
    directory: FrozenDirectory,
    order: list[bytes],
    sizes: dict[bytes, int],
    addresses: dict[bytes, int],
) -> None:
    assert directory.names() == order
    assert directory.lengths().tolist() == [sizes[path] for path in order]
    assert directory.addresses().tolist() == [addresses[path] for path in order]
    assert directory.find(order).tolist() == list(range(len(order)))
    by_address = sorted(range(len(order)), key=lambda i: (addresses[order[i]], i))
    assert directory.order().tolist() == by_address
    asked = {variant for path in order for variant in variants(path)}
    for path in asked:
        expected = order.index(path) if path in sizes else -1
        assert directory.find([path]).tolist() == [expected]
        assert directory.lower_bound(path) == sum(other < path for other in order)
        below = [i for i, other in enumerate(order) if other.startswith(path + b"/")]
        assert directory.is_directory(path) == bool(below)
        first, last = directory.subtree_range(path)
        assert list(range(first, last)) == below
        check_listing(directory, order, path)
    check_listing(directory, order, b"")


def check_listing(directory: FrozenDirectory, order: list[bytes], prefix: bytes) -> None:
    entries = listed(order, prefix)
    assert list(directory.children(prefix)) == entries
    if entries:
        middle = len(entries) // 2
        rest = list(directory.children(prefix, start_after=entries[middle].name))
        assert rest == entries[middle + 1 :]


def variants(path: bytes) -> list[bytes]:
    """A path, those around it, and the directories above it."""
    parts = path.split(b"/")
    above = [b"/".join(parts[:n]) for n in range(1, len(parts))]
    return [path, path[:-1] or b"z", path + b"!", *above]


@settings(max_examples=30)
@given(st.integers(0, 3000), st.integers(1, 40), st.integers(0, 2**32))
def test_many(count: int, fan: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    order = sorted(b"%d/%x" % (n % fan, n * 2654435761 % 2**32) for n in range(count))
    sizes = random.integers(0, 50, count)
    places = random.permutation(count)
    starts = np.zeros(count, np.int64)
    starts[places] = np.cumsum(sizes[places]) - sizes[places]
    builder = DirectoryBuilder()
    shuffled = random.permutation(count)
    builder.add_many(
        [order[i] for i in shuffled], starts[shuffled], sizes[shuffled], np.arange(count)
    )
    parts = builder.freeze(uuid.UUID(int=5), 1 << 20, chunk_bytes=1 << 20)
    directory = FrozenDirectory(parts.entries, lambda: parts.names)
    asked = random.integers(0, max(count, 1), 200 if count else 0)
    assert directory.find([order[i] for i in asked]).tolist() == asked.tolist()
    assert (directory.find([order[i] + b"." for i in asked]) == -1).all()
    assert directory.order().tolist() == np.lexsort((np.arange(count), starts)).tolist()
    for address in random.integers(0, int(sizes.sum()) + 1, 20).tolist():
        assert directory.rank_at(address) == int((starts < address).sum())
    assert len(list(directory.children(b""))) == min(fan, count)
