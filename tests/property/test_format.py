"""Whatever is encoded comes back; spaces resolve as the plain rule of FORMAT.md says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs._native.checksums import crc32c, crc32c_blocks
from dlfs._native.packing import Packer
from dlfs.errors import LimitError, UsageError
from dlfs.format.catalog import (
    LAYOUTS,
    AttributeExtent,
    Catalog,
    DatasetRecord,
    decode_catalog,
    encode_catalog,
)
from dlfs.format.geometry import ChunkRun, DataSpace, Geometry
from dlfs.format.location import LOCATION, pack_locations, unpack_locations
from dlfs.format.names import dataset_name_bytes
from dlfs.format.paths import display, path_bytes
from dlfs.format.superblock import Superblock, decode_superblock, encode_superblock

U64 = st.integers(0, (1 << 64) - 1)
TIMES = st.integers(0, (1 << 63) - 1)
UUIDS = st.uuids()
TAGS = st.lists(
    st.tuples(st.sampled_from([0, 5, 6, 65535]), st.binary(max_size=40)), max_size=3
).map(tuple)
NAMES = st.binary(min_size=1, max_size=255).filter(
    lambda raw: raw not in (b".", b"..") and not {0, 0x2F} & set(raw)
)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    members = draw(st.integers(1, 64))
    chunk_bits = draw(st.integers(12, 18))
    block_bytes = 1 << draw(st.integers(9, min(chunk_bits, 16)))
    replicas = draw(st.integers(1, min(members, 4)))
    rows = draw(st.integers(replicas * -(-4 // members), 200))
    return Geometry.of_one_group(members, 1 << chunk_bits, block_bytes, 1 << 20, rows, replicas)


@st.composite
def volumes(draw: st.DrawFn) -> tuple[Catalog, Superblock]:
    """A valid catalog, made by dealing the volume's chunks out, and its superblock."""
    geometry = draw(geometries())
    total = geometry.chunk_total
    cuts = draw(st.lists(st.integers(1, total - 1), unique=True, max_size=12).map(sorted))
    bounds = [0, *cuts, total]
    runs = [ChunkRun(a, b - a) for a, b in pairwise(bounds)]
    owners = draw(st.permutations(runs[1:]))
    keys = draw(st.lists(st.tuples(NAMES, st.integers(1, 9)), unique=True, max_size=4).map(sorted))
    datasets = []
    while owners and keys:
        directory = owners.pop()
        data = tuple(owners.pop() for _ in range(draw(st.integers(0, min(3, len(owners))))))
        name, version = keys.pop()
        if draw(st.booleans()) and (name, 0) not in [record.key for record in datasets]:
            datasets.append(_unfinished(draw, name, data, directory, geometry.chunk_bytes))
            continue
        size = directory.chunk_count * geometry.chunk_bytes
        if size < 8192:
            owners += [directory, *data]
            break
        datasets.append(_record(draw, name, version, data, directory, geometry))
    free = _joined(owners)
    generation = draw(st.integers(1, (1 << 63) - 1))
    records = sorted(datasets, key=lambda record: record.key)
    catalog = Catalog.of(generation, draw(UUIDS), records, free)
    return catalog, _superblock(draw, catalog, geometry, runs[0])


def _joined(runs: list[ChunkRun]) -> tuple[ChunkRun, ...]:
    joined: list[ChunkRun] = []
    for run in sorted(runs):
        if joined and joined[-1].end_chunk == run.first_chunk:
            run = ChunkRun(joined[-1].first_chunk, joined.pop().chunk_count + run.chunk_count)
        joined.append(run)
    return tuple(joined)


def _record(
    draw: st.DrawFn,
    name: bytes,
    version: int,
    data: tuple[ChunkRun, ...],
    directory: ChunkRun,
    geometry: Geometry,
) -> DatasetRecord:
    data_bytes = sum(run.chunk_count for run in data) * geometry.chunk_bytes
    blocks = directory.chunk_count * geometry.chunk_bytes // 4096
    entries = 4096 * draw(st.integers(1, blocks - 1))
    return DatasetRecord(
        name=name,
        version=version,
        uuid=draw(UUIDS),
        created_ns=draw(TIMES),
        sample_count=draw(st.integers(0, entries // 16)),
        sample_bytes=draw(st.integers(0, data_bytes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(U64),
        data_runs=data,
        data_bytes=data_bytes,
        directory_runs=(directory,),
        entries_bytes=entries,
        names_bytes=4096 * blocks - entries,
        attribute_extent=_extent(draw, data_bytes, geometry.chunk_bytes),
        tags=draw(TAGS),
    )


def _unfinished(
    draw: st.DrawFn, name: bytes, data: tuple[ChunkRun, ...], journal: ChunkRun, chunk_bytes: int
) -> DatasetRecord:
    data_bytes = sum(run.chunk_count for run in data) * chunk_bytes
    return DatasetRecord(
        name=name,
        version=0,
        state="unfinished",
        uuid=draw(UUIDS),
        created_ns=draw(TIMES),
        sample_count=draw(st.integers(0, 1 << 48)),
        sample_bytes=draw(st.integers(0, data_bytes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(U64),
        data_runs=data,
        data_bytes=data_bytes,
        directory_runs=(),
        entries_bytes=0,
        names_bytes=0,
        journal_runs=(journal,),
        journal_bytes=draw(st.integers(0, journal.chunk_count * chunk_bytes)),
        tags=((1, draw(st.binary(max_size=40))), *draw(TAGS)),
    )


def _extent(draw: st.DrawFn, data_bytes: int, chunk_bytes: int) -> AttributeExtent | None:
    """Where there are chunks for one, perhaps the place of an attribute segment."""
    if not data_bytes or draw(st.booleans()):
        return None
    chunks = draw(st.integers(1, data_bytes // chunk_bytes))
    blocks = chunks * chunk_bytes // 4096 - draw(st.integers(0, chunk_bytes // 4096 - 1))
    head_bytes = 4096 * draw(st.integers(1, blocks))
    return AttributeExtent(data_bytes - chunks * chunk_bytes, 4096 * blocks, head_bytes)


def _superblock(draw: st.DrawFn, catalog: Catalog, geometry: Geometry, run: ChunkRun) -> Superblock:
    raw = encode_catalog(catalog)
    room = geometry.groups[0].row_count * geometry.chunk_bytes + geometry.data_offset_bytes + 4096
    uuids = st.lists(
        UUIDS, unique=True, min_size=geometry.member_count, max_size=geometry.member_count
    )
    return Superblock(
        volume_uuid=catalog.volume_uuid,
        member_uuids=tuple(draw(uuids)),
        member_number=draw(st.integers(0, geometry.member_count - 1)),
        member_bytes=room + draw(st.integers(0, 1 << 40)),
        geometry=geometry,
        generation=catalog.generation,
        created_ns=draw(TIMES),
        catalog_runs=(run,),
        catalog_bytes=len(raw),
        catalog_crc32c=crc32c(raw),
        label=draw(st.text(max_size=64).filter(_fits)),
    )


def _fits(label: str) -> bool:
    try:
        return len(label.encode()) <= 64
    except UnicodeEncodeError:
        return False


@settings(max_examples=60)
@given(volumes())
def test_volumes_come_back(volume: tuple[Catalog, Superblock]) -> None:
    catalog, superblock = volume
    assert decode_superblock(encode_superblock(superblock), "x") == superblock
    raw = encode_catalog(catalog)
    if superblock.catalog_runs[0].chunk_count * superblock.geometry.chunk_bytes >= len(raw):
        got = decode_catalog(raw, superblock, "x")
        assert got == catalog
        assert [record.key for record in got.datasets] == [
            record.key for record in catalog.records if record.state == "sealed"
        ]
        for record in got.datasets:
            assert got.find(*record.key) == [record]


@given(geometries(), st.data())
def test_spaces_resolve_by_the_plain_rule(geometry: Geometry, data: st.DataObject) -> None:
    total = geometry.chunk_total
    starts = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5))
    runs = tuple(
        ChunkRun(first, data.draw(st.integers(1, min(20, total - first)))) for first in starts
    )
    chunks = [chunk for run in runs for chunk in range(run.first_chunk, run.end_chunk)]
    space = DataSpace(geometry, runs)
    size = geometry.chunk_bytes
    address = data.draw(st.integers(0, len(chunks) * size - 1))
    volume_chunk = chunks[address // size]
    row, member = divmod(volume_chunk, geometry.member_count)
    place = (member, geometry.data_offset_bytes + row * size + address % size)
    assert space.resolve(address) == place
    length = data.draw(st.integers(1, len(chunks) * size - address))
    pieces = list(space.member_ranges(address, length))
    at = address
    for piece in pieces:
        assert (piece.member, piece.offset_bytes) == space.resolve(at)
        last = at + piece.length_bytes - 1
        assert space.resolve(last) == (piece.member, piece.offset_bytes + piece.length_bytes - 1)
        at += piece.length_bytes
    assert at == address + length
    if geometry.member_count == 1:
        assert len(pieces) <= len(runs)


@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 56) - 1),
            st.integers(0, (1 << 40) - 1),
            st.integers(0, (1 << 32) - 1),
        )
    )
)
def test_locations_come_back(rows: list[tuple[int, int, int]]) -> None:
    columns = [[row[k] for row in rows] for k in range(3)]
    packed = pack_locations(*columns)
    assert packed.nbytes == 16 * len(rows)
    assert [part.tolist() for part in unpack_locations(packed)] == columns


@given(st.binary(max_size=160))
def test_any_bytes_are_locations(raw: bytes) -> None:
    packed = np.frombuffer(raw[: len(raw) // 16 * 16], dtype=pack_locations([], [], []).dtype)
    assert pack_locations(*unpack_locations(packed)).tobytes() == packed.tobytes()


@given(st.one_of(st.binary(max_size=300), st.text(max_size=100)))
def test_paths_are_refused_or_kept(path: str | bytes) -> None:
    try:
        raw = path_bytes(path)
    except (UsageError, LimitError):
        return
    components = raw.split(b"/")
    assert all(1 <= len(part) <= 255 and part not in (b".", b"..") for part in components)
    assert 0 not in raw
    assert path_bytes(display(raw)) == raw
    if len(components) == 1:
        assert dataset_name_bytes(raw) == raw


def addresses_by_the_rule(lengths: list[int], chunk: int, block: int) -> list[int]:
    """Return the addresses of samples as FORMAT.md, section 5, defines them."""
    at, addresses = 0, []
    for n in lengths:
        start = at
        aligned = -(-at // block) * block
        blocks = -(-(at + n) // block) - at // block
        if n and blocks > -(-n // block) and aligned - at <= n // 8:
            start = aligned
        end_of_chunk = (at // chunk + 1) * chunk
        if n and at % chunk and start + n > end_of_chunk:
            start = at if at + n <= end_of_chunk else end_of_chunk
        addresses.append(start)
        at = start + n
        if n > chunk:
            at = -(-at // chunk) * chunk
    return addresses


CHUNK, BLOCK = 8192, 512


@given(
    st.lists(
        st.one_of(
            st.integers(0, 3 * CHUNK),
            st.integers(0, 600),
            st.integers(1, 16).map(lambda k: k * BLOCK),
            st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]),
        ),
        max_size=30,
    )
)
def test_packing_follows_the_rule(lengths: list[int]) -> None:
    source = np.arange(3 * CHUNK, dtype=np.uint64).astype(np.uint8)
    window = np.zeros((4 * len(lengths) + 1) * CHUNK, np.uint8)
    locations = np.zeros(len(lengths), LOCATION)
    packer = Packer(chunk_bytes=CHUNK, block_bytes=BLOCK)
    done = packer.pack(
        source,
        np.zeros(len(lengths), np.int64),
        np.array(lengths, np.int64),
        order=None,
        window=window,
        window_address=0,
        locations=locations,
    )
    assert done == len(lengths)
    parts = packer.parts
    addresses, packed_lengths, crcs = unpack_locations(locations)
    assert packed_lengths.tolist() == lengths
    assert addresses.tolist() == addresses_by_the_rule(lengths, CHUNK, BLOCK)
    for address, length, crc in zip(addresses.tolist(), lengths, crcs.tolist(), strict=True):
        assert crc == crc32c(window[address : address + length].tobytes())
        assert window[address : address + length].tobytes() == source[:length].tobytes()
        if length > CHUNK:
            first, count = address // CHUNK, -(-length // CHUNK)
            expected = crc32c_blocks(source[:length], CHUNK).tolist()
            assert parts[first : first + count].tolist() == expected
            parts[first : first + count] = 0
    assert not parts.any()
