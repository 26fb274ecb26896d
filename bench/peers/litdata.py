"""LitData: chunks made by `optimize`, read by `StreamingDataset` in its own shuffle, or by index.

Chunks have the default size and no compression. The library maps chunks of local folders in place.
Its loader is measured twice: in the reading process, and with one worker a core as its
documentation does. Which is faster depends on whether chunks come from the disk or from memory. A
random sample is ``dataset[i]``; there is no call for a batch of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.peers.packages import (
    DATA,
    INDEX,
    SHARD_BYTES,
    SLOWLY_WRITTEN_MAX,
    collate,
    needed,
    workers,
)
from bench.peers.peer import Buffer, Indices, Peer, Reader

NAME = "chunks"
ORDER = "chunks shuffled, blocks of 256 samples within a chunk, samples within a block"


class LitData(Peer):
    """LitData from a local folder, read by the training process itself.

    `optimize` runs with one worker, which writes samples in order.
    """

    name = "litdata"
    about = "optimize, StreamingDataset, StreamingDataLoader without workers (LitData README)"
    packages = ("litdata", "torch")
    samples_max = SLOWLY_WRITTEN_MAX
    worker_count = 0

    def prepare(self, source: Source, folder: Path) -> None:
        scratch = folder / "scratch"
        package = _litdata(scratch)

        def sample(index: int) -> dict[str, Any]:
            return {INDEX: index, DATA: source.data(index)}

        package.optimize(
            fn=sample,
            inputs=list(range(len(source))),
            output_dir=str(folder / NAME),
            chunk_bytes=SHARD_BYTES,
            num_workers=1,
            keep_data_ordered=True,
            reorder_files=False,
            start_method="fork",  # the source need not be picklable
            verbose=False,
        )
        shutil.rmtree(scratch, ignore_errors=True)

    def open(self, folder: Path) -> Reader:
        package = _litdata(folder / "scratch")
        chunks = str(folder / NAME)
        dataset = cache(lambda: package.StreamingDataset(chunks))  # opened by the first read

        def read(indices: Any) -> list[Buffer]:
            samples = dataset()
            return [samples[index][DATA] for index in indices]

        def epoch(seed: int, batch: int) -> Generator[tuple[Indices, list[bytes]], None, None]:
            shuffled = package.StreamingDataset(chunks, shuffle=True, seed=seed)
            yield from package.StreamingDataLoader(
                shuffled, batch_size=batch, num_workers=self.worker_count, collate_fn=collate
            )

        return Reader(read, epoch, own_order=ORDER)


def _litdata(scratch: Path) -> Any:
    """Import the package, without its check for updates and its folders in /tmp."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(scratch / "chunks")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(scratch / "data")
    return needed("litdata")


class LitDataWorkers(LitData):
    """LitData from the same chunks, read by worker processes."""

    name = "litdata-workers"
    about = "optimize, StreamingDataset, StreamingDataLoader, a worker a core (LitData README)"
    random = False
    worker_count = workers()
    data_of = LitData.name


PEERS = (LitData(), LitDataWorkers())
