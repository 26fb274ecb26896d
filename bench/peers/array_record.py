"""ArrayRecord: Grain's data source, a sample at a time and a batch at a time.

Written with ``group_size:1``, as random access asks for, and without compression; in shards, which
a batch is read from in parallel. Without read-ahead (the data source sees to that) or further
threads in a shard, as the package's reader documents for random access. Its users bring the order
themselves (Grain's samplers), so there is no shuffle of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.packages import SHARD_BYTES, needed
from bench.peers.peer import Buffer, Peer, Source

WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = {"max_parallelism": "0"}


class ArrayRecordReader:
    """Opened shards."""

    def __init__(self, shards: Any, batched: bool) -> None:
        self._shards = shards
        self._batched = batched

    def read(self, indices: Sequence[int]) -> list[Buffer]:
        """One call for all, or one for each."""
        if self._batched:
            records: list[Buffer] = self._shards.__getitems__(indices)
            return records
        return [self._shards[index] for index in indices]

    def close(self) -> None:
        """Close the files."""
        self._shards.__exit__(None, None, None)


class ArrayRecord:
    """ArrayRecord, a batch at a time."""

    name = "array_record"
    about = "ArrayRecordDataSource.__getitems__ of a batch, group_size:1 (Grain, Data Sources)"
    packages = ("array_record",)
    random = True
    batched = True

    def prepare(self, source: Source, folder: Path) -> None:
        """Write shard after shard."""
        module = needed("array_record.python.array_record_module")
        writer, room, shards = None, 0, 0
        for _, _, data in source:
            if writer is None or room <= 0:
                if writer is not None:
                    writer.close()
                path = str(folder / f"samples-{shards:05}.array_record")
                writer = module.ArrayRecordWriter(path, WRITER_OPTIONS)
                room, shards = SHARD_BYTES, shards + 1
            writer.write(data)
            room -= len(data)
        if writer is not None:
            writer.close()

    def open(self, folder: Path) -> ArrayRecordReader:
        """Open all shards; their indexes are read when they are first used."""
        module = needed("array_record.python.array_record_data_source")
        paths = sorted(map(str, folder.glob("*.array_record")))
        return ArrayRecordReader(module.ArrayRecordDataSource(paths, READER_OPTIONS), self.batched)


class SingleArrayRecord(ArrayRecord):
    """The same files, a sample at a time."""

    name = "array_record-single"
    about = "ArrayRecordDataSource.__getitem__ of a sample, group_size:1 (Grain, Data Sources)"
    batched = False
    data_of = ArrayRecord.name


PEERS: tuple[Peer, ...] = (ArrayRecord(), SingleArrayRecord())
