"""The bytes that chunk shuffle reads, by window, with a fixed memory budget.

A window's chunks are in memory at once. If they fit, each is read once; otherwise samples are read
again. The bytes come from the reader's own counters over a small volume. No time is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import dlfs
from dlfs.units import KIB, MIB

SAMPLE_BYTES = 4 * KIB
CHUNK_BYTES = 256 * KIB
NAME = "samples"
BATCH = 256


@contextmanager
def volume_of(folder: Path, chunks: int) -> Iterator[Path]:
    """Write a volume with so many full chunks to a file; remove it at the end of the block."""
    path = folder / "shuffle.img"
    count = chunks * CHUNK_BYTES // SAMPLE_BYTES
    dlfs.format_volume(str(path), size_bytes=chunks * CHUNK_BYTES + 64 * MIB)
    data = np.random.default_rng(0).bytes(count * SAMPLE_BYTES)
    with dlfs.open(str(path)) as volume, volume.writer(NAME) as writer:
        paths = [b"%09d" % number for number in range(count)]
        starts = np.arange(count, dtype=np.int64) * SAMPLE_BYTES
        writer.add_batch(paths, data, starts, np.full(count, SAMPLE_BYTES, np.int64))
    try:
        yield path
    finally:
        path.unlink()


def read_shares(volume: Path, budget_chunks: int, windows: Sequence[int]) -> dict[int, float]:
    """Return bytes read from the device over bytes of the samples in an epoch, by window."""
    found = {}
    for window in windows:
        with (
            dlfs.open(str(volume), memory_bytes=budget_chunks * CHUNK_BYTES) as opened,
            opened.dataset(NAME) as dataset,
        ):
            with dataset.batches(BATCH, shuffle="chunk", window_chunks=window) as epoch:
                total = 0
                for batch in epoch:
                    total += int(batch.lengths.sum())
                    batch.release()
            found[window] = dataset.stats()["read_bytes"] / total
    return found
