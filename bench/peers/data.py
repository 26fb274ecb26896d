"""The samples of a race as a few plain values, from which every process makes them again."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.datasets import (
    DatasetSpec,
    FolderBytes,
    Source,
    Subset,
    SyntheticSource,
    random_subset,
    spec_of,
)


@dataclass(frozen=True, slots=True)
class Data:
    """The samples of a race.

    Attributes:
        key: key of the data set's spec.
        total_bytes: bytes of all samples of a synthetic data set.
        seed: seed of the bytes.
        corpus: folder of the real files, if the key is ``corpus``.
        listing: file with their paths in path order, each ended by NUL. A file next to it has their
            lengths.
        samples_max: most samples, a uniform random subset; None: all.
    """

    key: str
    total_bytes: int
    seed: int
    corpus: str | None = None
    listing: str | None = None
    samples_max: int | None = None

    @property
    def spec(self) -> DatasetSpec:
        """Parameters of the data set."""
        return spec_of(self.key)

    def source(self) -> Source:
        """Return the samples."""
        base: Source
        if self.corpus is None:
            base = SyntheticSource(self.spec, self.total_bytes, self.seed)
        else:
            assert self.listing is not None
            paths = Path(self.listing).read_bytes().split(b"\0")[:-1]
            base = FolderBytes(Path(self.corpus), paths, np.load(_lengths_of(Path(self.listing))))
        if self.samples_max is None or len(base) <= self.samples_max:
            return base
        return Subset(base, random_subset(len(base), self.samples_max, self.seed))


def list_corpus(corpus: Path, listing: Path) -> int:
    """List a folder's regular files in path order; return their bytes."""
    files = (path for path in corpus.rglob("*") if stat.S_ISREG(path.lstat().st_mode))
    found = {os.fsencode(path.relative_to(corpus)): path.stat().st_size for path in files}
    paths = sorted(found)
    listing.write_bytes(b"".join(path + b"\0" for path in paths))
    np.save(_lengths_of(listing), np.array([found[path] for path in paths], np.int64))
    return sum(found.values())


def _lengths_of(listing: Path) -> Path:
    return listing.with_name(listing.name + ".lengths.npy")
