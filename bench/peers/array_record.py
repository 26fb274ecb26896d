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


class ArrayRecord(Peer):
    """ArrayRecord, read a batch at a time."""

    name = "array_record"
    about = "ArrayRecordDataSource.__getitems__ of a batch, group_size:1 (Grain, Data Sources)"
    packages = ("array_record",)
    batched = True

    def prepare(self, source: Source, folder: Path) -> None:
        module = needed("array_record.python.array_record_module")
        for number, (first, last) in enumerate(source.ranges(SHARD_BYTES)):
            path = str(folder / f"samples-{number:05}.array_record")
            writer = module.ArrayRecordWriter(path, WRITER_OPTIONS)
            for index in range(first, last):
                writer.write(source.data(index))
            writer.close()

    def open(self, folder: Path) -> Reader:
        module = needed("array_record.python.array_record_data_source")
        paths = sorted(map(str, folder.glob("*.array_record")))
        shards = module.ArrayRecordDataSource(paths, READER_OPTIONS)

        def one_by_one(indices: Any) -> list[Buffer]:
            return [shards[index] for index in indices]

        read = shards.__getitems__ if self.batched else one_by_one
        return Reader(read, release=lambda: shards.__exit__(None, None, None))


class SingleArrayRecord(ArrayRecord):
    """ArrayRecord, read a sample at a time."""

    name = "array_record-single"
    about = "ArrayRecordDataSource.__getitem__ of a sample, group_size:1 (Grain, Data Sources)"
    batched = False
    data_of = ArrayRecord.name


PEERS = (ArrayRecord(), SingleArrayRecord())
