"""Counts the space that the datasets of a volume take, from its catalog alone.

A dataset version occupies whole chunks: those of its samples, its attributes and its directory. On
media each chunk takes its size times the number of replicas. Versions may share chunks; a sum
counts a shared chunk once, and removing a version frees only the chunks that no other version has.

The chunks of a removed version are free from the commit that removed it. No reader delays this.

Plain values without I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.format.catalog import Records
from dlfs.format.run_arrays import RunArray, unite
from dlfs.format.superblock import Superblock
from dlfs.store.info import describe_datasets, free_bytes
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


def measure_usage(superblock: Superblock, chosen: Records) -> VolumeUsage:
    """Return the space of some datasets of a volume.

    Args:
        superblock: superblock that names the catalog of the records.
        chosen: records to measure.
    """
    geometry, catalog = superblock.geometry, chosen.catalog
    chunks = catalog.sums(catalog.runs[:, 1])
    single = catalog.sums(_count_single(catalog.runs)).sum(axis=1)
    versions = tuple(
        DatasetUsage(
            name=info.name,
            version=info.version,
            uuid=info.uuid,
            sample_count=info.sample_count,
            sample_bytes=info.sample_bytes,
            attribute_bytes=info.attribute_bytes,
            directory_bytes=directory_chunks * geometry.chunk_bytes,
            stored_bytes=info.stored_bytes,
            media_bytes=info.stored_bytes * geometry.replicas,
            freed_bytes=own_chunks * geometry.chunk_bytes,
        )
        for info, directory_chunks, own_chunks in zip(
            describe_datasets(chosen, geometry),
            chunks[chosen.positions, 1].tolist(),
            single[chosen.positions].tolist(),
            strict=True,
        )
    )
    is_chosen = np.zeros(len(catalog.table), bool)
    is_chosen[chosen.positions] = True
    covered = unite(catalog.runs[np.repeat(is_chosen, np.diff(catalog.run_starts))])
    stored_bytes = int(covered[:, 1].sum()) * geometry.chunk_bytes
    return VolumeUsage(
        versions=versions,
        sample_count=sum(version.sample_count for version in versions),
        sample_bytes=sum(version.sample_bytes for version in versions),
        stored_bytes=stored_bytes,
        media_bytes=stored_bytes * geometry.replicas,
        replicas=geometry.replicas,
        catalog_bytes=count_chunks(superblock.catalog_runs) * geometry.chunk_bytes,
        unfinished_bytes=int(chunks[catalog.unfinished.positions].sum()) * geometry.chunk_bytes,
        capacity_bytes=geometry.capacity_bytes,
        free_bytes=free_bytes(geometry, catalog),
    )


def _count_single(runs: RunArray) -> NDArray[np.int64]:
    """Return the number of chunks of each run that no other run has, ``int64[n_runs]``."""
    both = np.concatenate([runs[:, 0], runs[:, 0] + runs[:, 1]])
    bounds, places = np.unique(both, return_inverse=True)
    firsts, ends = np.split(places, 2)
    size = len(bounds)
    owners = np.cumsum(np.bincount(firsts, minlength=size) - np.bincount(ends, minlength=size))
    widths = np.diff(bounds.astype(np.int64)) * (owners[:-1] == 1)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
    single: NDArray[np.int64] = before[ends] - before[firsts]
    return single
