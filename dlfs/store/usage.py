"""Counts the space that the datasets of a volume take, from its catalog alone.

A dataset version occupies whole chunks: those of its samples, its attributes and its directory. On
media each chunk takes its size times the number of replicas. Versions may share chunks; a sum
counts a shared chunk once, and removing a version frees only the chunks that no other version has.

The chunks of a removed version are free from the commit that removed it. No reader delays this.

Plain values without I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.geometry import ChunkRun
from dlfs.format.superblock import Superblock
from dlfs.store.info import describe_dataset, free_bytes
from dlfs.store.space import count_chunks


@dataclass(frozen=True, slots=True)
class DatasetUsage:
    """The space of one version of a dataset.

    Attributes:
        name: name of the dataset; bytes that are not UTF-8 are surrogate escapes.
        version: number of the version.
        uuid: UUID of this version.
        sample_count: number of samples.
        sample_bytes: sum of the lengths of all samples, in bytes.
        attribute_bytes: size of its attribute segment, in bytes.
        directory_bytes: size of the chunks of its directory, in bytes.
        stored_bytes: size of its chunks, in bytes, without further replicas.
        media_bytes: size of its chunks on the devices, in bytes, with all replicas.
        freed_bytes: part of ``stored_bytes`` that is free once this version alone is removed.
    """

    name: str
    version: int
    uuid: UUID
    sample_count: int
    sample_bytes: int
    attribute_bytes: int
    directory_bytes: int
    stored_bytes: int
    media_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """The space of some dataset versions, and of their volume.

    Attributes:
        versions: the versions, by name and number.
        sample_count: number of samples of these versions.
        sample_bytes: sum of the lengths of these samples, in bytes.
        stored_bytes: size of the chunks of these versions in bytes; a shared chunk counts once.
        media_bytes: ``stored_bytes`` with all replicas.
        replicas: copies of each chunk.
        catalog_bytes: size of the chunks of the catalog, in bytes.
        unfinished_bytes: size of the chunks of unfinished imports of the volume, in bytes.
        capacity_bytes: size of all chunks of the volume, in bytes.
        free_bytes: size of the unused chunks of the volume, in bytes.
    """

    versions: tuple[DatasetUsage, ...]
    sample_count: int
    sample_bytes: int
    stored_bytes: int
    media_bytes: int
    replicas: int
    catalog_bytes: int
    unfinished_bytes: int
    capacity_bytes: int
    free_bytes: int


def measure_usage(
    catalog: Catalog, superblock: Superblock, chosen: Sequence[DatasetRecord]
) -> VolumeUsage:
    """Return the space of some datasets of a catalog.

    Args:
        catalog: catalog of the volume, with the chunks of all datasets.
        superblock: superblock that names the catalog.
        chosen: records of the catalog to measure.
    """
    geometry = superblock.geometry
    owners = _count_owners(run for record in catalog.records for run in record.runs)
    versions = []
    for record in chosen:
        info = describe_dataset(record, geometry)
        own = sum(_count_single(run, owners) for run in record.runs)
        versions.append(
            DatasetUsage(
                name=info.name,
                version=info.version,
                uuid=info.uuid,
                sample_count=info.sample_count,
                sample_bytes=info.sample_bytes,
                attribute_bytes=info.attribute_bytes,
                directory_bytes=record.directory_chunks * geometry.chunk_bytes,
                stored_bytes=info.stored_bytes,
                media_bytes=info.stored_bytes * geometry.replicas,
                freed_bytes=own * geometry.chunk_bytes,
            )
        )
    covered = _count_owners(run for record in chosen for run in record.runs)
    stored_bytes = sum(end - first for first, end, _ in covered) * geometry.chunk_bytes
    return VolumeUsage(
        versions=tuple(versions),
        sample_count=sum(version.sample_count for version in versions),
        sample_bytes=sum(version.sample_bytes for version in versions),
        stored_bytes=stored_bytes,
        media_bytes=stored_bytes * geometry.replicas,
        replicas=geometry.replicas,
        catalog_bytes=count_chunks(superblock.catalog_runs) * geometry.chunk_bytes,
        unfinished_bytes=geometry.chunk_bytes
        * sum(count_chunks(record.runs) for record in catalog.unfinished),
        capacity_bytes=geometry.capacity_bytes,
        free_bytes=free_bytes(geometry, catalog),
    )


_Ranges = list[tuple[int, int, int]]
"""Ranges of chunks that some run has: first chunk, chunk after the last one, number of runs."""


def _count_owners(runs: Iterable[ChunkRun]) -> _Ranges:
    """Return the chunks of some runs, sorted, with the number of runs that have them."""
    changes: dict[int, int] = {}
    for run in runs:
        changes[run.first_chunk] = changes.get(run.first_chunk, 0) + 1
        changes[run.end_chunk] = changes.get(run.end_chunk, 0) - 1
    ranges, owners, first = [], 0, 0
    for chunk in sorted(changes):
        if owners and chunk > first:
            ranges.append((first, chunk, owners))
        owners += changes[chunk]
        first = chunk
    return ranges


def _count_single(run: ChunkRun, owners: _Ranges) -> int:
    """Return the number of chunks of a run that no other run has."""
    at = bisect_left(owners, (run.first_chunk, 0, 0))  # a range begins where a run begins
    single = 0
    while at < len(owners) and owners[at][0] < run.end_chunk:
        first, end, count = owners[at]
        single += end - first if count == 1 else 0
        at += 1
    return single
