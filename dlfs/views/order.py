"""The order of an epoch over several datasets, computed from a few numbers.

A ``Division`` says how many of the first p positions of an endless sequence belong to each source.
A block of ``BLOCK_SAMPLES`` positions is permuted by the seed, so that sources alternate at random,
while each block has its exact share of every source.

The samples that an epoch takes of a source are whole passes over it, each in an order of its own,
and then the rest, which is less than a pass. The rests of all epochs go round and round one fixed
order of the source, its circle. So no epoch has a sample of a rest twice, and what an epoch did not
reach comes in the next one. The order of a rest changes with every epoch: runs of the circle are
permuted, and the samples within each run.

Threads: one at a time for an order. Memory: two blocks, the orders of the sources, and 8 bytes for
each sample of two runs of each source.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlfs._native.permutation import Permutation
from dlfs.base.forks import cached_property
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.order import Sequence as EpochSequence
from dlfs.epoch.order import check_positions
from dlfs.epoch.selection import Selection
from dlfs.views.sources import Sources

BLOCK_SAMPLES = 1000
"""Positions within which sources alternate at random: 1,000 batches are whole blocks."""


RUN_SAMPLES = 1 << 20
"""Samples of a circle that are permuted as one, for a global order."""

RUN_SAMPLES_CHUNK = 1 << 16
"""Samples of a circle that stay together for chunk shuffle, which reads neighbours at one time:
16 windows of the default size for samples of 4 KiB."""


class Division(Protocol):
    """Divides the positions 0, 1, 2, ... among sources."""

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first positions belong to each source."""


class Interleaving:
    """Divides positions in proportion to integer weights.

    Each source takes its rounded-down share of what the sources before it left. So no count ever
    falls, and after any number of positions each source has its share to within two samples.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = weights
        self._remaining = list(accumulate(reversed(weights)))[::-1]

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first positions belong to each source."""
        counts = []
        for weight, remaining in zip(self._weights, self._remaining, strict=True):
            counts.append(positions * weight // remaining)
            positions -= counts[-1]
        return counts

    def most(self, positions: int) -> list[int]:
        """Return how many of any consecutive positions belong to each source at most."""
        counts = []
        for weight, remaining in zip(self._weights, self._remaining, strict=True):
            counts.append(-(-positions * weight // remaining))
            positions = -(-positions * (remaining - weight) // remaining)
        return counts


class Succession:
    """Divides positions among sources of given sizes, one whole source after the other."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first positions belong to each source."""
        rounds, left = divmod(positions, sum(self._sizes))
        starts = accumulate(self._sizes, initial=0)
        return [
            rounds * size + min(size, max(0, left - start))
            for size, start in zip(self._sizes, starts, strict=False)
        ]


class ViewOrder:
    """The order of one epoch of a view.

    Args:
        sources: sources of the view.
        division: divides the positions of all epochs among the sources.
        total: samples of an epoch.
        key: seed of the view, 0..2^64-1, which is mixed with the seed of the options.
        options: options of the epoch: ``shuffle``, ``seed``, ``epoch``, ``window_chunks``.
        selection: samples chosen by the view's indices; None for an epoch of ``total`` samples.

    Threads: one at a time.
    """

    def __init__(
        self,
        sources: Sources,
        division: Division,
        total: int,
        *,
        key: int,
        options: EpochOptions,
        selection: Selection | None = None,
    ) -> None:
        self._sources = sources
        self._division = division
        self._total = total
        self._options = options
        self._selection = selection
        self._key = hash_numbers(key, options.seed)
        self._epoch = 0 if options.is_repeated else options.epoch
        self._begin = self._epoch * total
        self._before = division.counts(self._begin)
        self._behind = division.counts(self._begin + total)
        self._block = lru_cache(maxsize=2)(self._fill_block)
        orders = 2 * len(sources.sizes) + 1
        self._pass = lru_cache(maxsize=2 * orders)(self._order_source)
        self._run = lru_cache(maxsize=orders)(self._fill_run)

    def __len__(self) -> int:
        return self._total if self._selection is None else len(self._selection)

    def indices(
        self, first: int = 0, count: int | None = None, *, stride: int = 1
    ) -> NDArray[np.uint64]:
        """Return the view's indices at positions ``first``, ``first + stride``, ...

        Args:
            first: first position, 0..N.
            count: number of positions; by default all up to the end.
            stride: distance between two positions, >= 1.

        Returns:
            ``uint64[count]``.

        Raises:
            UsageError: a position is outside 0..N-1.
        """
        count = check_positions(len(self), first, count, stride)
        return self.at(np.arange(first, first + count * stride, stride, dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the view's indices at rising positions, ``uint64[n]``."""
        if self._selection is not None:
            return self._chosen[positions]
        found = np.empty(len(positions), np.uint64)
        blocks = positions // BLOCK_SAMPLES
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            block = int(blocks[start])
            found[start:end] = self._block(block)[positions[start:end] - block * BLOCK_SAMPLES]
        return found

    @cached_property
    def _chosen(self) -> NDArray[np.uint64]:
        """The chosen samples in their order."""
        assert self._selection is not None
        chosen = self._selection.indices
        if self._selection.kind == "list" or not len(chosen):
            return chosen
        return chosen[Permutation(len(chosen), self._options.seed, self._options.epoch).map()]

    def _fill_block(self, number: int) -> NDArray[np.uint64]:
        """Return the view's indices of one block of positions."""
        size = min(BLOCK_SAMPLES, self._total - number * BLOCK_SAMPLES)
        first = self._begin + number * BLOCK_SAMPLES
        before, after = self._division.counts(first), self._division.counts(first + size)
        taken = [high - low for low, high in zip(before, after, strict=True)]
        owners = np.repeat(np.arange(len(taken)), taken)
        if not isinstance(self._division, Succession):
            permutation = Permutation(size, self._key, first % (1 << 64))
            owners = owners[permutation.map().astype(np.int64)]
        found = np.empty(size, np.uint64)
        for source, (start, count) in enumerate(zip(before, taken, strict=True)):
            if count:
                found[owners == source] = self._take(source, start - self._before[source], count)
        return found

    def _take(self, source: int, first: int, count: int) -> NDArray[np.uint64]:
        """Return the view's indices of samples that the epoch takes of a source, from a number on.

        Args:
            source: number of the source.
            first: number of the first one among those that the epoch takes of it.
            count: how many.
        """
        size, parts = self._sources.sizes[source], []
        passes = self._passes(source)
        while count:
            number, position = divmod(first, size)
            if number < passes:
                some = min(count, size - position)
                order = self._pass(source, self._before[source] // size + number)
                parts.append(order.indices(position, some))
            else:
                run, position = divmod(first - passes * size, self._run_samples)
                part = self._run(source, run)[position : position + count]
                parts.append(part)
                some = len(part)
            first, count = first + some, count - some
        return self._sources.number(source, np.concatenate(parts))

    def _passes(self, source: int) -> int:
        """Return the number of whole passes over a source that the epoch takes."""
        return (self._behind[source] - self._before[source]) // self._sources.sizes[source]

    @property
    def _run_samples(self) -> int:
        return RUN_SAMPLES_CHUNK if self._options.shuffle == "chunk" else RUN_SAMPLES

    def _fill_run(self, source: int, number: int) -> NDArray[np.uint64]:
        """Return the dataset's indices of a run of the rest that the epoch takes of a source."""
        size, length = self._sources.sizes[source], self._run_samples
        begin = self._before[source] + self._passes(source) * size
        left = self._behind[source] - begin
        key = hash_numbers(hash_numbers(self._key, source), self._epoch)
        is_shuffled, whole = self._options.shuffle is not None, left // length
        if is_shuffled and number < whole:
            number = int(Permutation(whole, key).map(number, 1)[0])
        count = min(length, left - number * length)
        first = (begin + number * length) % size
        circle = self._pass(source, None)
        ahead = min(count, size - first)
        found = np.concatenate([circle.indices(first, ahead), circle.indices(0, count - ahead)])
        if is_shuffled:
            local = BLOCK_SAMPLES if self._options.shuffle == "chunk" else count
            for at in range(0, count, local):
                part = found[at : at + local]
                stream = number * length + at + 1
                found[at : at + local] = part[Permutation(len(part), key, stream).map()]
        return found

    def _order_source(self, source: int, number: int | None) -> EpochSequence:
        """Return the order of one pass over a source, by the dataset's indices.

        Args:
            source: number of the source.
            number: number of the pass; None for the circle, round which the rests of all epochs go.
        """
        seed = hash_numbers(self._key, source)
        seed, epoch = (hash_numbers(seed, 0), 0) if number is None else (seed, number)
        found, shuffle = self._sources.sources[source], self._options.shuffle
        options = EpochOptions(
            seed=seed,
            epoch=epoch,
            shuffle="global" if shuffle is not None and found.chosen is not None else shuffle,
            window_chunks=self._options.window_chunks,
            where=found.chosen,
        )
        return found.dataset.order_epoch(options)


def hash_numbers(first: int, second: int) -> int:
    """Return a seed, 0..2^64-1, made of two others."""
    digest = blake2b(struct.pack("<QQ", first, second), digest_size=8, person=b"dlfs.views")
    return int.from_bytes(digest.digest(), "little")
