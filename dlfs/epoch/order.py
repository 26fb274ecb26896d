"""The order of an epoch, computed from a few numbers.

A ``Sequence`` maps positions 0..N-1 of an epoch to sample indices. No list is stored: ``global`` is
a keyed bijection, ``chunk`` permutes chunks and then the samples within each window of chunks, and
``storage`` is the order on media. A selection (``epoch.selection``) gives a sequence over chosen
samples. Ranks take interleaved positions of the same order. The samples of a global batch therefore
do not depend on the number of ranks, and any number of ranks resumes an epoch at a position.

The order in which a writer packs (``dlfs._native.permutation``) has another key than every epoch.

Threads: any; all objects are immutable.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlfs._native.reader import NativeSequence
from dlfs.directory import FrozenDirectory
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.selection import Selection
from dlfs.errors import UsageError


class Sequence:
    """The order of one epoch, over all samples of a dataset or over a selection.

    Args:
        directory: sample directory of the dataset.
        options: options of the epoch: ``shuffle``, ``seed``, ``epoch`` and ``window_chunks`` are
            used.
        chunk_bytes: chunk size of the volume.
        selection: chosen samples, for which ``shuffle`` has been applied; None for all samples.

    Source: ``dlfs_permutation`` in ``dlfs/sequence.h`` for the bijection.
    """

    def __init__(
        self,
        directory: FrozenDirectory,
        options: EpochOptions,
        *,
        chunk_bytes: int,
        selection: Selection | None = None,
    ) -> None:
        self._count = len(directory) if selection is None else len(selection)
        if selection is not None:
            self._native = NativeSequence.choose(
                directory,
                kind=selection.kind,
                indices=selection.indices,
                weights=selection.weights,
                draws=selection.draws,
                seed=options.seed,
                epoch=options.epoch,
            )
            return
        self._native = NativeSequence(
            directory,
            chunk_bytes=chunk_bytes,
            order=options.shuffle or "storage",
            seed=options.seed,
            epoch=options.epoch,
            window_chunks=options.window_chunks,
        )

    @property
    def native(self) -> NativeSequence:
        """Native handle of the order, from which the reader makes its streams."""
        return self._native

    def __len__(self) -> int:
        return self._count

    def indices(
        self, first: int = 0, count: int | None = None, *, stride: int = 1
    ) -> npt.NDArray[np.uint64]:
        """Return the sample indices at positions ``first``, ``first + stride``, ...

        Args:
            first: first position, 0..N.
            count: number of positions; by default all up to the end.
            stride: distance between two positions, >= 1.

        Returns:
            ``uint64[count]``.

        Raises:
            UsageError: a position is outside 0..N-1.
        """
        count = check_positions(self._count, first, count, stride)
        return self._native.fill(first, count, stride)


def check_positions(total: int, first: int, count: int | None, stride: int) -> int:
    """Check a range of an epoch's positions and return their number.

    Args:
        total: positions of the epoch.
        first: first position, 0..total.
        count: number of positions; None for all up to the end.
        stride: distance between two positions, >= 1.

    Raises:
        UsageError: a position is outside 0..total-1.
    """
    left = shard_count(total, first, stride)
    count = left if count is None else count
    if first < 0 or stride < 1 or not 0 <= count <= left:
        raise UsageError(
            f"take positions of an epoch of {total}: expected at most {left} "
            f"from {first} on by steps of {stride}, got {count}"
        )
    return count


def shard_count(total: int, first: int, stride: int) -> int:
    """Return how many of the positions ``first``, ``first + stride``, ... are below ``total``."""
    return len(range(first, total, stride)) if stride > 0 else 0
