"""WebDataset: tar files read from front to back, in shuffled order, through a shuffle buffer.

The documented pipeline for training: shards shuffled, samples through a buffer, batches made in
the workers of a `WebLoader`. A sample's key is its index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers.packages import SHARD_BYTES, SLOWLY_WRITTEN_MAX, needed, workers
from bench.peers.peer import Buffer, Peer, Source

SHARDS_SHUFFLED = 100
BUFFER_SAMPLES = 1000
DATA = "bin"


class WebDatasetReader:
    """The shards of a data set; each epoch opens them anew."""

    own_order = f"shards shuffled, then a buffer of {BUFFER_SAMPLES} in each worker"

    def __init__(self, package: Any, shards: list[str]) -> None:
        self._package = package
        self._shards = shards

    def epoch(self, seed: int, batch: int) -> Iterator[list[tuple[int, Buffer]]]:
        """One pass over all shards, each by one worker."""
        pipeline = (
            self._package.WebDataset(self._shards, shardshuffle=SHARDS_SHUFFLED, seed=seed)
            .shuffle(BUFFER_SAMPLES, seed=seed)
            .to_tuple("__key__", DATA)
            .map_tuple(int, _same)
            .batched(batch, collation_fn=None)
        )
        count = min(workers(), len(self._shards))
        yield from self._package.WebLoader(pipeline, batch_size=None, num_workers=count)

    def close(self) -> None:
        """Nothing is held: workers and files end with their iterator."""


def _same(data: bytes) -> bytes:
    return data


class WebDataset:
    """WebDataset from local shards."""

    name = "webdataset"
    about = "WebDataset(shardshuffle).shuffle(1000).batched in a WebLoader (WebDataset README)"
    packages = ("webdataset", "torch")
    random = False
    samples_max = SLOWLY_WRITTEN_MAX

    def prepare(self, source: Source, folder: Path) -> None:
        """Write tar files with `ShardWriter`."""
        package = needed("webdataset")
        pattern = str(folder / "samples-%06d.tar")
        with package.ShardWriter(
            pattern, maxcount=len(source), maxsize=SHARD_BYTES, verbose=0
        ) as shards:
            for index, _, data in source:
                shards.write({"__key__": f"{index:012}", DATA: data})

    def open(self, folder: Path) -> WebDatasetReader:
        """List the shards."""
        needed("torch")
        shards = sorted(map(str, folder.glob("*.tar")))
        return WebDatasetReader(needed("webdataset"), shards)


PEERS: tuple[Peer, ...] = (WebDataset(),)
