"""WebDataset: tar files read from front to back, in shuffled order, through a shuffle buffer.

This is the documented pipeline for training: shards are shuffled, samples pass through a buffer,
and the workers of a `WebLoader` make batches. A sample's key is its index.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from bench.datasets import Source
from bench.peers.packages import SHARD_BYTES, SLOWLY_WRITTEN_MAX, needed, workers
from bench.peers.peer import Indices, Peer, Reader

SHARDS_SHUFFLED = 100
BUFFER_SAMPLES = 1000
DATA = "bin"
ORDER = f"shards shuffled, then a buffer of {BUFFER_SAMPLES} in each worker"


def write_shards(source: Source, folder: Path, shard_bytes: int) -> None:
    """Write samples as tar files of about a size; a sample's key is its index."""
    pattern = str(folder / "samples-%06d.tar")
    with needed("webdataset").ShardWriter(
        pattern, maxcount=len(source), maxsize=shard_bytes, verbose=0
    ) as shards:
        for index, _, data in source:
            shards.write({"__key__": f"{index:012}", DATA: data})


class WebDataset(Peer):
    """WebDataset from local shards, written by `ShardWriter`."""

    name = "webdataset"
    about = "WebDataset(shardshuffle).shuffle(1000).batched in a WebLoader (WebDataset README)"
    packages = ("webdataset", "torch")
    random = False
    samples_max = SLOWLY_WRITTEN_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        write_shards(source, folder, SHARD_BYTES)

    def open(self, folder: Path) -> Reader:
        needed("torch")
        package = needed("webdataset")
        shards = sorted(map(str, folder.glob("*.tar")))

        def epoch(seed: int, batch: int) -> Generator[tuple[Indices, list[bytes]], None, None]:
            pipeline = (
                package.WebDataset(shards, shardshuffle=SHARDS_SHUFFLED, seed=seed)
                .shuffle(BUFFER_SAMPLES, seed=seed)
                .to_tuple("__key__", DATA)
                .map_tuple(int, bytes)
                .batched(batch, collation_fn=None)
            )
            count = min(workers(), len(shards))  # each shard is read by one worker
            for pairs in package.WebLoader(pipeline, batch_size=None, num_workers=count):
                yield [index for index, _ in pairs], [data for _, data in pairs]

        return Reader(epoch=epoch, own_order=ORDER)


PEERS = (WebDataset(),)
