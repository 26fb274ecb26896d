"""ArrayRecord: Grain's data source, a sample at a time and a batch at a time.

Files are written with ``group_size:1``, as random access requires, without compression, and in
shards, from which a batch is read in parallel. There is no read-ahead, which the data source
switches off, and no further thread in a shard, as the package documents for random access. Grain's
samplers make the order, so that the package has no shuffle of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.peers.packages import SHARD_BYTES, needed
from bench.peers.peer import Buffer, Peer, Reader

WRITER_OPTIONS = "group_size:1,uncompressed"
READER_OPTIONS = {"max_parallelism": "0"}


class ArrayRecordReader(Reader):
    """Reads opened shards."""

    def __init__(self, shards: Any, batched: bool) -> None:
        self._shards = shards
        self._batched = batched

    def read(self, indices: Any) -> list[Buffer]:
        if self._batched:
            records: list[Buffer] = self._shards.__getitems__(indices)
            return records
        return [self._shards[index] for index in indices]

    def close(self) -> None:
        self._shards.__exit__(None, None, None)


class ArrayRecord(Peer):
    """ArrayRecord, read a batch at a time."""

    name = "array_record"
    about = "ArrayRecordDataSource.__getitems__ of a batch, group_size:1 (Grain, Data Sources)"
    packages = ("array_record",)
    batched = True

    def prepare(self, source: Source, folder: Path) -> None:
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
        module = needed("array_record.python.array_record_data_source")
        paths = sorted(map(str, folder.glob("*.array_record")))
        return ArrayRecordReader(module.ArrayRecordDataSource(paths, READER_OPTIONS), self.batched)


class SingleArrayRecord(ArrayRecord):
    """ArrayRecord, read a sample at a time."""

    name = "array_record-single"
    about = "ArrayRecordDataSource.__getitem__ of a sample, group_size:1 (Grain, Data Sources)"
    batched = False
    data_of = ArrayRecord.name


PEERS = (ArrayRecord(), SingleArrayRecord())
