"""The samples of a race, made again in every process that needs them, from a few plain values."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import datasets
from bench.datasets import SPECS, DatasetSpec, FolderBytes, SyntheticSource


@dataclass(frozen=True, slots=True)
class Data:
    """Which samples.

    Attributes:
        key: of the data set's spec.
        total_bytes: of all samples of a synthetic one.
        seed: of its bytes.
        corpus: folder of the real files, when the key is ``corpus``.
        listing: file with their paths, each ended by NUL, in path order; beside it one with their
            lengths.
        samples_max: a uniform random subset of so many; None: all.
    """

    key: str
    total_bytes: int
    seed: int
    corpus: str | None = None
    listing: str | None = None
    samples_max: int | None = None

    @property
    def spec(self) -> DatasetSpec:
        """What the data set is."""
        return next(spec for spec in SPECS if spec.key == self.key)

    def source(self) -> RaceSource:
        """Its samples."""
        base: datasets.Source
        if self.corpus is None:
            base = SyntheticSource(self.spec, self.total_bytes, self.seed)
        else:
            assert self.listing is not None
            paths = Path(self.listing).read_bytes().split(b"\0")[:-1]
            base = FolderBytes(Path(self.corpus), paths, np.load(_lengths_of(Path(self.listing))))
        count = len(base.lengths)
        if self.samples_max is None or count <= self.samples_max:
            return RaceSource(base, np.arange(count))
        random = np.random.default_rng([self.seed, 3])
        return RaceSource(base, np.sort(random.choice(count, self.samples_max, replace=False)))


def list_corpus(corpus: Path, listing: Path) -> int:
    """Write the paths of a folder's regular files in path order; how many bytes they have."""
    found: dict[bytes, int] = {}
    top = os.fsencode(corpus)
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                found[os.path.relpath(path, top)] = status.st_size
    paths = sorted(found)
    listing.write_bytes(b"".join(path + b"\0" for path in paths))
    np.save(_lengths_of(listing), np.array([found[path] for path in paths], np.int64))
    return sum(found.values())


def _lengths_of(listing: Path) -> Path:
    """The file with the lengths of what a listing names; so nobody has to ask each file."""
    return listing.with_name(listing.name + ".lengths.npy")


class RaceSource:
    """The source that peers are given: some or all samples of another, numbered from 0."""

    def __init__(self, base: datasets.Source, chosen: NDArray[np.int64]) -> None:
        self._base, self._chosen = base, chosen
        self.lengths: NDArray[np.int64] = base.lengths[chosen]

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes]]:
        for index in range(len(self)):
            yield index, self.path(index), self.data(index)

    def path(self, index: int) -> bytes:
        """Of a sample."""
        return self._base.path(int(self._chosen[index]))

    def data(self, index: int) -> bytes:
        """Of a sample."""
        return self._base.data(int(self._chosen[index]))
