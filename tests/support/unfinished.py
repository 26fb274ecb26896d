"""Commits the record of an import that is not finished, which no other code makes yet."""

from __future__ import annotations

from uuid import UUID

import numpy as np

import dlfs
from dlfs.format.catalog import DatasetRecord
from dlfs.format.constants import TAG_SOURCE


def commit_unfinished(
    volume: dlfs.Volume, name: bytes, data: bytes, journal: bytes, uuid: UUID | None = None
) -> DatasetRecord:
    """Write data and a journal to free chunks, and commit a record that has them.

    Args:
        volume: the volume.
        name: name of the dataset that is imported.
        data: bytes of its samples so far.
        journal: bytes of its journal.
        uuid: UUID of the record; by default always the same one.
    """
    with volume._transaction("a test") as transaction:
        size = transaction.geometry.chunk_bytes
        data_runs = transaction.write_segment([np.frombuffer(data, np.uint8)])
        record = DatasetRecord(
            name=name,
            version=0,
            state="unfinished",
            uuid=uuid or UUID(int=77),
            created_ns=1_700_000_000_000_000_000,
            sample_count=3,
            sample_bytes=len(data),
            layout="shuffled",
            seed=5,
            data_runs=data_runs,
            data_bytes=-(-len(data) // size) * size,
            directory_runs=(),
            entries_bytes=0,
            names_bytes=0,
            journal_runs=transaction.write_segment([np.frombuffer(journal, np.uint8)]),
            journal_bytes=len(journal),
            tags=((TAG_SOURCE, b"the source of a test"), (9, b"of a later version")),
        )
        transaction.commit(added=[record])
    volume.refresh()
    return record
