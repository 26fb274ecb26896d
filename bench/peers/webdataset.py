"""WebDataset: tar files read from front to back, in shuffled order, through a shuffle buffer.

This is the documented pipeline for training: shards are shuffled, samples pass through a buffer,
and the workers of a `WebLoader` make batches. A sample's key is its index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.peers.packages import SHARD_BYTES, SLOWLY_WRITTEN_MAX, needed, workers
from bench.peers.peer import Buffer, Peer, Reader

SHARDS_SHUFFLED = 100
BUFFER_SAMPLES = 1000
DATA = "bin"


class WebDatasetReader(Reader):
    """Reads shards, each by one worker; each epoch opens them anew."""

    own_order = f"shards shuffled, then a buffer of {BUFFER_SAMPLES} in each worker"

    def __init__(self, package: Any, shards: list[str]) -> None:
        self._package = package
        self._shards = shards

    def epoch(self, seed: int, batch: int) -> Iterator[list[tuple[int, Buffer]]]:
        pipeline = (
            self._package.WebDataset(self._shards, shardshuffle=SHARDS_SHUFFLED, seed=seed)
            .shuffle(BUFFER_SAMPLES, seed=seed)
            .to_tuple("__key__", DATA)
            .map_tuple(int, _same)
            .batched(batch, collation_fn=None)
        )
        count = min(workers(), len(self._shards))
        yield from self._package.WebLoader(pipeline, batch_size=None, num_workers=count)


def _same(data: bytes) -> bytes:
    return data


class WebDataset(Peer):
    """WebDataset from local shards, written by `ShardWriter`."""

    name = "webdataset"
    about = "WebDataset(shardshuffle).shuffle(1000).batched in a WebLoader (WebDataset README)"
    packages = ("webdataset", "torch")
    random = False
    samples_max = SLOWLY_WRITTEN_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        package = needed("webdataset")
        pattern = str(folder / "samples-%06d.tar")
        with package.ShardWriter(
            pattern, maxcount=len(source), maxsize=SHARD_BYTES, verbose=0
        ) as shards:
            for index, _, data in source:
                shards.write({"__key__": f"{index:012}", DATA: data})

    def open(self, folder: Path) -> WebDatasetReader:
        needed("torch")
        shards = sorted(map(str, folder.glob("*.tar")))
        return WebDatasetReader(needed("webdataset"), shards)


PEERS = (WebDataset(),)
