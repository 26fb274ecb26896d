"""The bytes that chunk shuffle reads, by window, with a fixed memory budget.

A window's chunks are in memory at once. If they fit, each is read once; otherwise samples are read
again. The bytes come from the reader's own counters over a small volume. No time is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dlfs
from bench.datasets import DATASET, SyntheticSource, make_volume, spec_of
from dlfs.base.units import KIB

CHUNK_BYTES = 256 * KIB
BATCH = 256


@contextmanager
def volume_of(folder: Path, chunks: int) -> Iterator[Path]:
    """Write a volume with so many full chunks to a file; remove it at the end of the block."""
    path = folder / "shuffle.img"
    make_volume(path, SyntheticSource(spec_of("4k"), chunks * CHUNK_BYTES, seed=0))
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
            opened.dataset(DATASET) as dataset,
        ):
            with dataset.batches(BATCH, shuffle="chunk", window_chunks=window) as epoch:
                total = 0
                for batch in epoch:
                    total += int(batch.lengths.sum())
                    batch.release()
            found[window] = dataset.stats()["read_bytes"] / total
    return found
