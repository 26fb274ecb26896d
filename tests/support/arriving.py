"""An import that writes the samples ``SAMPLES`` step by step, and readers that check them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import dlfs
from dlfs.base.units import KIB
from dlfs.dataset.arriving import ArrivingDataset
from dlfs.dataset.step_writer import StepWriter

CHUNK_BYTES = 64 * KIB
WINDOW_CHUNKS = 3
ORIGIN = {"source": "here", "fingerprint": "x"}


def contents(count: int = 300, seed: int = 1) -> dict[bytes, bytes]:
    """Return samples: empty ones, such of whole chunks, and one larger than a window."""
    chance = random.Random(seed)
    sizes = [0, 0, 10, 5000, 9000, CHUNK_BYTES]
    made = {b"%03d" % n: chance.randbytes(chance.choice(sizes)) for n in range(count)}
    made[b"large"] = chance.randbytes(5 * CHUNK_BYTES)
    paths = list(made)
    chance.shuffle(paths)
    return {path: made[path] for path in paths}


@contextmanager
def importing(volume: dlfs.Volume, **options: Any) -> Iterator[StepWriter]:
    kept = {"step_bytes": 150 * KIB, "layout": "path", "one_pass": True, **options}
    with volume.step_writer("d", ORIGIN, **kept) as writer:
        yield writer


def add(writer: StepWriter, samples: dict[bytes, bytes], paths: Sequence[bytes]) -> None:
    data = np.frombuffer(b"".join(samples[path] for path in paths), np.uint8)
    lengths = np.array([len(samples[path]) for path in paths], np.int64)
    numbers = np.array([int(path) if path.isdigit() else -1 for path in paths])
    texts = np.array([path.decode() for path in paths], object)
    ends = np.cumsum(lengths)
    writer.add_batch(
        list(paths), data, ends - lengths, lengths, attributes={"number": numbers, "text": texts}
    )


def leave_unfinished(volume: dlfs.Volume, **options: Any) -> None:
    """Leave an import of which some steps were committed."""
    with importing(volume, **options) as writer:
        add(writer, SAMPLES, PATHS[:200])
        writer.abort()


def take(dataset: ArrivingDataset, epoch: Any, count: int | None = None) -> list[bytes]:
    """Return the paths of the samples of some batches, which are checked."""
    found: list[bytes] = []
    while count is None or len(found) < count:
        batch = next(epoch, None)
        if batch is None:
            break
        paths = dataset.paths_of(batch.indices)
        columns = dataset.column("number", batch.indices)
        for path, sample, number in zip(paths, batch.to_list(), columns.tolist(), strict=True):
            assert sample == SAMPLES[path]
            assert number == (int(path) if path.isdigit() else -1)
        found += paths
    return found


SAMPLES = contents()
PATHS = list(SAMPLES)
OPTIONS: dict[str, Any] = {"window_chunks": WINDOW_CHUNKS, "seed": 5}


def order_of(volume: dlfs.Volume, **options: Any) -> list[bytes]:
    """Return the paths in the order of the first epoch, computed from the sealed dataset."""
    from dlfs._native.permutation import arriving_permutation

    volume.refresh()
    with volume["d"] as dataset:
        stored = dataset.sequence(shuffle=None).indices()
        windows = dataset.directory.addresses(stored) // (WINDOW_CHUNKS * CHUNK_BYTES)
        found: list[bytes] = []
        for number in np.unique(windows).tolist():
            own = stored[windows == number]
            order = arriving_permutation(len(own), options.get("seed", 5), 0, number).map()
            found += dataset.paths_of(own[order])
        return found
