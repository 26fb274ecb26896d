"""A small volume's superblock and catalog, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from dlfs._native.checksums import crc32c
from dlfs.format.catalog import Catalog, DatasetRecord, encode_catalog
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.superblock import Superblock

GEOMETRY = Geometry.for_members([2 << 20] * 2, 16384, 4096)
FREE = (ChunkRun(4, 1), ChunkRun(7, 2), ChunkRun(10, GEOMETRY.chunk_total - 10))


@pytest.fixture
def catalog() -> Catalog:
    first = DatasetRecord(
        name=b"digits",
        version=1,
        uuid=UUID(int=100),
        created_ns=1_700_000_000_000_000_000,
        sample_count=5,
        sample_bytes=999,
        layout="shuffled",
        seed=7,
        data_runs=(ChunkRun(1, 2), ChunkRun(9, 1)),
        data_bytes=3 * 16384,
        directory_runs=(ChunkRun(5, 2),),
        entries_bytes=20480,
        names_bytes=4096,
        tags=((40, b"hello"), (65535, b"")),
    )
    empty = replace(
        first, version=2, uuid=UUID(int=101), sample_count=0, sample_bytes=0, layout="path",
        data_runs=(), data_bytes=0, directory_runs=(ChunkRun(3, 1),), entries_bytes=8192,
        tags=(),
    )  # fmt: skip
    return Catalog.of(4, UUID(int=1), (first, empty), FREE)


def with_records(catalog: Catalog, *records: DatasetRecord) -> Catalog:
    """Return a catalog with other records and the same free runs."""
    return Catalog.of(catalog.generation, catalog.volume_uuid, records, catalog.free)


@pytest.fixture
def superblock(catalog: Catalog) -> Superblock:
    return superblock_of(catalog)


def superblock_of(catalog: Catalog) -> Superblock:
    raw = encode_catalog(catalog)
    return Superblock(
        volume_uuid=catalog.volume_uuid,
        member_uuids=(UUID(int=10), UUID(int=11)),
        member_number=1,
        member_bytes=2 << 20,
        geometry=GEOMETRY,
        generation=catalog.generation,
        created_ns=1_600_000_000_000_000_000,
        catalog_runs=(ChunkRun(0, 1),),
        catalog_bytes=len(raw),
        catalog_crc32c=crc32c(raw),
        label="dátum",
    )
