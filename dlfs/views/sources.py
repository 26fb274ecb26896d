"""The datasets of a view, and the numbers that their samples have in it.

A view numbers its samples 0..N-1, one source after the other. A source is a dataset, or chosen
samples of it in index order.

Threads: any; the sources of a view never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.distinct import find_distinct, number_distinct
from dlfs.base.wording import quote
from dlfs.dataset.dataset import Dataset
from dlfs.errors import NotFoundError


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset of a view, or chosen samples of it.

    Attributes:
        dataset: the dataset.
        chosen: rising indices of the chosen samples, ``uint64[n]``; None for all samples.
    """

    dataset: Dataset
    chosen: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.dataset) if self.chosen is None else len(self.chosen)

    @property
    def fingerprint(self) -> str:
        """A hash of the chosen samples."""
        chosen = b"" if self.chosen is None else self.chosen.tobytes()
        return hashlib.blake2b(chosen, digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Part:
    """The samples of one source among samples of a view.

    Attributes:
        source: number of the source.
        places: positions of these samples among all of them, ``int64[n]``.
        indices: their indices in the source's dataset, ``uint64[n]``.
    """

    source: int
    places: NDArray[np.int64]
    indices: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Sources:
    """The sources of a view.

    Attributes:
        sources: the sources, in order.
        sizes: number of samples of each source.
        starts: the view's index of the first sample of each source, and the view's size.
    """

    sources: tuple[Source, ...]
    sizes: tuple[int, ...] = field(init=False)
    starts: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        sizes = tuple(map(len, self.sources))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "starts", np.array([0, *accumulate(sizes)], np.uint64))

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return int(self.starts[-1])

    def split(self, indices: NDArray[np.uint64]) -> Iterator[Part]:
        """Divide samples, given by the view's indices, among the sources."""
        owners = np.searchsorted(self.starts, indices, side="right") - 1
        for number in find_distinct(owners).tolist():
            places = np.flatnonzero(owners == number)
            inner = indices[places] - self.starts[number]
            chosen = self.sources[number].chosen
            yield Part(number, places, inner if chosen is None else chosen[inner])

    def number(self, source: int, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the view's indices of samples of a source, given by the dataset's indices."""
        chosen = self.sources[source].chosen
        inner = indices if chosen is None else np.searchsorted(chosen, indices).astype(np.uint64)
        numbers: NDArray[np.uint64] = inner + self.starts[source]
        return numbers

    def gather(self, indices: NDArray[np.uint64], read: Any, dtype: Any) -> NDArray[Any]:
        """Return one value for each sample.

        Args:
            indices: indices of the view.
            read: called with a dataset and its indices; returns their values.
            dtype: type of the values.

        Returns:
            ``dtype[n]``.
        """
        found = np.empty(len(indices), dtype)
        for part in self.split(indices):
            found[part.places] = read(self.sources[part.source].dataset, part.indices)
        return found


class ViewColumns:
    """The columns that all sources of a view have, by the view's indices.

    Args:
        sources: sources of the view.
        name: name of the view, for errors.

    Threads: any.
    """

    def __init__(self, sources: Sources, name: str) -> None:
        self._sources = sources
        self._name = name
        tables = [source.dataset.columns for source in sources.sources]
        self.dtypes: dict[str, np.dtype[Any]] = {
            column: np.dtype((np.result_type(*(table[column].base for table in tables)), shape))
            for column, shape in ((name, dtype.shape) for name, dtype in tables[0].items())
            if all(column in table and table[column].shape == shape for table in tables)
            and len({table[column] == np.dtype(object) for table in tables}) == 1
        }

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes

    def column_bytes(self, name: str) -> int:
        """Return the size of a column in all datasets, in bytes."""
        return sum(source.dataset.attributes.column_bytes(name) for source in self._sources.sources)

    def column(self, name: str, indices: ArrayLike) -> NDArray[Any]:
        """Return some values of a column; as ``Dataset.column``."""
        if name not in self.dtypes:
            known = ", ".join(map(quote, self.dtypes)) or "none"
            raise NotFoundError(
                f"read column {quote(name)} of {self._name}: expected a column that all of its "
                f"datasets have, with numbers or with strings in all of them: {known}"
            )
        wanted = np.asarray(indices, np.uint64)
        return self._sources.gather(
            wanted, lambda dataset, inner: dataset.column(name, inner), self.dtypes[name]
        )

    def parsed(
        self, name: str, indices: ArrayLike, parse: Callable[[list[str]], NDArray[Any]]
    ) -> NDArray[Any]:
        """Return what a function makes of the strings of some samples; as ``AttributeTable``."""
        return parse(self.column(name, indices).tolist())

    def distinct(self, name: str, indices: ArrayLike) -> tuple[list[str], NDArray[np.intp]]:
        """Return the distinct strings among some values of a column; as ``AttributeTable``."""
        values, codes = number_distinct(self.column(name, indices))
        return values.tolist(), codes
