"""Merges samples that several sources have in the order of their paths, as one sorted stream.

A source is an iterator of blocks, such as those of a sorted run that was written to a device. One
block of each source is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlfs._native.paths import PathBlock, PathMerger, PathRefusedError
from dlfs.directory.builder import explain_refusal

BLOCK_SAMPLES = 1 << 16
"""Most samples of a merged block, unless the caller says otherwise."""


def merge_sorted(
    sources: Sequence[Iterator[PathBlock]], *, block_samples: int = BLOCK_SAMPLES
) -> Iterator[PathBlock]:
    """Yield the samples of all sources in the order of their paths, in blocks.

    That the paths of each source rise is not checked here; a ``SegmentBuilder`` checks it.

    Args:
        sources: blocks of each source, in the order of their paths; a block may have no samples.
        block_samples: most samples of a merged block.

    Raises:
        ExistsError: a path is there twice.
        DeviceError: not enough memory.
    """
    merger = PathMerger(len(sources), block_samples)
    left = dict(enumerate(sources))
    while True:
        for number in list(left):
            while number in left and merger.wants(number):
                block = next(left[number], None)
                if block is None:
                    del left[number]
                else:
                    merger.give(number, block)
        try:
            merged = merger.merge()
        except PathRefusedError as error:
            raise explain_refusal(error) from error
        if not len(merged.rows):
            return
        yield merged
