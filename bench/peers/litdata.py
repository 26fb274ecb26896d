"""LitData: chunks made by `optimize`, read by `StreamingDataset` in its own shuffle, or by index.

Chunks of the default size, without compression. From local folders the library maps chunks in
place. Its loader is raced twice: in the reading process, and with one worker a core as its
documentation does; which is faster depends on whether chunks come from the disk or from memory.
A sample at random is ``dataset[i]``; there is no call for a batch of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.peers.packages import SHARD_BYTES, SLOWLY_WRITTEN_MAX, needed, workers
from bench.peers.peer import Buffer, Peer, Source

INDEX, DATA = "index", "data"
NAME = "chunks"


class LitDataReader:
    """An optimized folder."""

    own_order = "chunks shuffled, blocks of 256 samples within a chunk, samples within a block"

    def __init__(self, package: Any, folder: Path, worker_count: int) -> None:
        self._package = package
        self._folder = folder
        self._worker_count = worker_count
        self._dataset: Any = None

    def read(self, indices: Sequence[int]) -> list[Buffer]:
        """Sample after sample."""
        if self._dataset is None:
            self._dataset = self._package.StreamingDataset(str(self._folder / NAME))
        return [self._dataset[index][DATA] for index in indices]

    def epoch(self, seed: int, batch: int) -> Iterator[list[tuple[int, Buffer]]]:
        """A pass in the shuffle of a seed."""
        dataset = self._package.StreamingDataset(str(self._folder / NAME), shuffle=True, seed=seed)
        yield from self._package.StreamingDataLoader(
            dataset, batch_size=batch, num_workers=self._worker_count, collate_fn=_pairs
        )

    def close(self) -> None:
        """There is no close: mappings go with the last reference."""
        self._dataset = None


def _pairs(samples: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
    return [(sample[INDEX], sample[DATA]) for sample in samples]


class LitData:
    """LitData from a local folder, read in the process that asks."""

    name = "litdata"
    about = "optimize, StreamingDataset, StreamingDataLoader without workers (LitData README)"
    packages = ("litdata", "torch")
    random = True
    samples_max = SLOWLY_WRITTEN_MAX
    worker_count = 0

    def prepare(self, source: Source, folder: Path) -> None:
        """Run `optimize` with one worker, which keeps samples in order."""
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

    def open(self, folder: Path) -> LitDataReader:
        """Import the library; data sets are opened for reading at random, and for each epoch."""
        return LitDataReader(_litdata(folder / "scratch"), folder, self.worker_count)


def _litdata(scratch: Path) -> Any:
    """The package, which then neither asks PyPI for updates nor leaves folders in /tmp."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(scratch / "chunks")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(scratch / "data")
    return needed("litdata")


class LitDataWorkers(LitData):
    """The same chunks, read by workers."""

    name = "litdata-workers"
    about = "optimize, StreamingDataset, StreamingDataLoader, a worker a core (LitData README)"
    random = False
    worker_count = workers()
    data_of = LitData.name


PEERS: tuple[Peer, ...] = (LitData(), LitDataWorkers())
