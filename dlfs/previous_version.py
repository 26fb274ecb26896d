"""The samples of a dataset's version that the next version carries over (``Volume.append``).

The next version begins with the chunks that hold the samples of the previous one, so every sample
keeps its address. The directory and the attributes are written anew for all samples, because both
are in the order of the paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.attributes import AttributeTable, read_attributes
from dlfs.connection import load_segment
from dlfs.fields import FIELDS_COLUMN, FieldEncoder, find_fields
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import ChunkRun
from dlfs.format.paths import display
from dlfs.store.transaction import Generation


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """Samples that are on the volume already, in index order.

    Attributes:
        runs: chunks that hold the samples, in data order.
        paths: path of each sample.
        addresses: address of each sample in these chunks, ``uint64[n]``.
        lengths: length of each sample in bytes, ``int64[n]``.
        crcs: CRC32C of each sample, ``uint32[n]``.
        columns: ``[n]`` values of each attribute by name.
        encoder: encoder of the samples' fields; None for samples of bytes.
    """

    runs: tuple[ChunkRun, ...]
    paths: list[bytes]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    columns: dict[str, NDArray[Any]]
    encoder: FieldEncoder | None


def load_previous_version(base: Generation, record: DatasetRecord) -> PreviousVersion:
    """Read the directory and the attributes of a version, and verify them.

    Args:
        base: generation that has the dataset; its writer has locked the volume.
        record: record of the version.

    Raises:
        FormatError: the directory or an attribute is malformed.
        DeviceError: a read failed.
    """
    table = _load_attributes(base, record)
    name = display(record.name)
    fields = find_fields(table, np.arange(record.sample_count), name)
    encoder = FieldEncoder(fields) if fields else None
    columns = {name: table.column(name) for name in table.dtypes}
    if encoder is not None:  # the same text for all samples, however another writer wrote it
        columns[FIELDS_COLUMN] = np.full(record.sample_count, encoder.text, object)
    with load_segment(base, record, shared=False, locked=True) as directory:
        return PreviousVersion(
            runs=record.split_data_runs(base.geometry.chunk_bytes)[0],
            paths=directory.names(),
            addresses=directory.addresses(),
            lengths=directory.lengths(),
            crcs=directory.crcs(),
            columns=columns,
            encoder=encoder,
        )


def _load_attributes(base: Generation, record: DatasetRecord) -> AttributeTable:
    segment = read_attributes(base.sources, base.geometry, record)
    extent = record.attribute_extent
    if segment is None or extent is None:
        return AttributeTable.empty(record.uuid, record.sample_count)
    return AttributeTable.over(segment, extent.head_bytes)
