"""``concat``, ``mix``, ``select`` and ``split``: the functions that make views of datasets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.arguments import check_choice, check_integer
from dlfs.base.distinct import number_distinct
from dlfs.base.wording import quote, show_value
from dlfs.dataset.dataset import Dataset
from dlfs.epoch.selection import choose_samples
from dlfs.errors import UsageError
from dlfs.views.order import Interleaving
from dlfs.views.sources import Source, Sources
from dlfs.views.view import DatasetView

WEIGHT_STEPS = 1_000_000
"""Largest denominator of a weight: weights are rounded to fractions with at most this."""

NAMES_MAX = 4
"""Most datasets that the name of a view lists."""

_SEED_MAX = (1 << 64) - 1
_SPLITS = ("hash", "attribute", "group")

Readable = Dataset | DatasetView
SplitBy = Literal["hash", "attribute", "group"]


def concat(datasets: Iterable[Readable]) -> DatasetView:
    """Join datasets: an epoch has every sample of all of them once.

    Args:
        datasets: datasets and views, of any volumes.

    Raises:
        UsageError: there is no dataset, or one is a mix, of which an epoch does not have all.
    """
    listed = list(datasets)
    for each in listed:
        if isinstance(each, DatasetView) and each.weights is not None:
            raise UsageError(f"concat: expected datasets, got the mix {each.name}")
    sources = [source for each in listed for source in _sources_of(each)]
    if not sources:
        raise UsageError("concat: expected one dataset or more, got none")
    return DatasetView(Sources(tuple(sources)), _join_names([each.name for each in listed], " + "))


def mix(
    weights: Mapping[Readable, float], *, seed: int = 0, samples: int | None = None
) -> DatasetView:
    """Mix datasets in fixed proportions.

    After any number of samples each dataset has had its share, to within two samples for each
    dataset; every 1,000 batches from the first on have it exactly, to the last rounded sample. An
    epoch has no sample twice, unless ``samples`` asks for more than a dataset has: it then begins
    the dataset again, in another order. What an epoch did not reach of a dataset comes first in the
    next epoch. The order depends on the seeds alone, so that it is the same for any number of ranks
    and workers.

    Args:
        weights: proportion of each dataset, above 0; they need not add up to 1.
        seed: seed of the mix; the seed of an epoch is combined with it.
        samples: samples of an epoch; by default an epoch ends before a dataset would be repeated.

    Raises:
        UsageError: there is no dataset, one has no samples, or a weight is not above 0.
    """
    sources: list[Source] = []
    shares: list[Fraction] = []
    for each, weight in weights.items():
        share = _fraction(weight, each.name)
        for source, part in _shares_of(each):
            sources.append(source)
            shares.append(share * part)
    if not sources:
        raise UsageError("mix: expected one dataset or more, got none")
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    made = Sources(tuple(sources))
    return DatasetView(
        made,
        f"mix of {_join_names([each.name for each in weights], ', ')}",
        weights=whole,
        epoch_samples=_longest_epoch(made.sizes, whole)
        if samples is None
        else check_integer(samples, 1, None, option="samples", action="mix"),
        seed=check_integer(seed, 0, _SEED_MAX, option="seed", action="mix"),
    )


def select(dataset: Readable, where: ArrayLike) -> DatasetView:
    """Choose samples of a dataset or view, to be read as one.

    Of a mix, the parts keep their proportions, and an epoch ends before a chosen sample is
    repeated, or after the ``samples`` of the mix.

    Args:
        dataset: dataset or view.
        where: ``bool[n]``, such as ``dataset.column("label") == 3``, or indices, each once.

    Raises:
        UsageError: the mask has another length, an index is out of range or occurs twice, or no
            sample of a part of a mix is chosen.
    """
    given = _sources_of(dataset)
    chosen = choose_samples(where, len(dataset), action=f"select samples of {dataset.name}")
    starts = Sources(tuple(given)).starts
    bounds = np.searchsorted(chosen, starts)
    sources = []
    for source, start, (low, high) in zip(given, starts, pairwise(bounds.tolist()), strict=False):
        inner = chosen[low:high] - start
        picked = inner if source.chosen is None else source.chosen[inner]
        sources.append(Source(source.dataset, picked))
    made = Sources(tuple(sources))
    name = f"{len(chosen)} of {dataset.name}"
    if not isinstance(dataset, DatasetView) or dataset.weights is None:
        return DatasetView(made, name)
    for source in sources:
        if not len(source):
            raise UsageError(
                f"select samples of {dataset.name}: expected samples of each dataset of a mix, got "
                f"none of {quote(source.dataset.name)}"
            )
    is_longest = dataset.epoch_samples == _longest_epoch(dataset.sources.sizes, dataset.weights)
    return dataset.with_sources(
        made,
        name,
        _longest_epoch(made.sizes, dataset.weights) if is_longest else dataset.epoch_samples,
    )


def split(
    dataset: Readable,
    fraction: float,
    *,
    by: SplitBy = "hash",
    column: str | None = None,
    seed: int = 0,
) -> tuple[DatasetView, DatasetView]:
    """Split a dataset in two, such as for training and validation.

    A sample's side depends on the seed and on its path, folder or value alone. A version of the
    dataset with more samples therefore has each of the old ones on the same side.

    Args:
        dataset: the dataset.
        fraction: share of the first part, 0..1; it is met on average.
        by: ``hash`` splits by the path of each sample. ``attribute`` keeps samples with the same
            value of ``column`` together, such as those of a patient. ``group`` keeps samples of
            one folder together.
        column: name of a column, for ``attribute``.
        seed: seed of the split.

    Returns:
        The two parts.

    Raises:
        UsageError: an argument is out of range.
        NotFoundError: there is no such column.
        DlfsError: the paths or the column cannot be read.
    """
    check_choice(by, _SPLITS, option="by", action="split a dataset")
    check_integer(seed, 0, _SEED_MAX, option="seed", action="split a dataset")
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise UsageError(f"split a dataset: expected a fraction 0..1, got {show_value(fraction)}")
    if (by == "attribute") != (column is not None):
        raise UsageError(
            "split a dataset: expected a column with by='attribute' and with no other, got "
            f"by={by!r} and column={column!r}"
        )
    if isinstance(dataset, DatasetView) and dataset.weights is not None:
        raise UsageError(f"split a dataset: expected a dataset, got the mix {dataset.name}")
    side = _hasher(fraction, seed)
    parts: tuple[list[Source], list[Source]] = ([], [])
    for source in _sources_of(dataset):
        chosen = source.chosen if source.chosen is not None else np.arange(len(source.dataset))
        chosen = chosen.astype(np.uint64)
        is_first = _choose(source.dataset, chosen, by, column, side)
        parts[0].append(Source(source.dataset, chosen[is_first]))
        parts[1].append(Source(source.dataset, chosen[~is_first]))
    names = (f"{fraction:g} of {dataset.name}", f"{1 - fraction:g} of {dataset.name}")
    first, second = (Sources(tuple(sources)) for sources in parts)
    return DatasetView(first, names[0]), DatasetView(second, names[1])


def _hasher(fraction: float, seed: int) -> Callable[[bytes], bool]:
    """Return a function that says if a key is in the first part."""
    limit = int(Fraction(fraction) * (1 << 64))
    key = seed.to_bytes(8, "little")

    def is_first(value: bytes) -> bool:
        digest = blake2b(value, digest_size=8, key=key, person=b"dlfs.split").digest()
        return int.from_bytes(digest, "little") < limit

    return is_first


def _choose(
    dataset: Dataset,
    chosen: NDArray[np.uint64],
    by: SplitBy,
    column: str | None,
    is_first: Callable[[bytes], bool],
) -> NDArray[np.bool_]:
    """Return True for each sample of the first part, ``bool[n]``."""
    if column is not None:
        given = dataset.column(column, chosen)
        if given.ndim > 1:
            raise UsageError(
                f"split {dataset.name} by column {quote(column)}: expected single values, got "
                f"vectors of {given.shape[1]}"
            )
        values, codes = number_distinct(given)
        sides = np.array([is_first(str(value).encode()) for value in values.tolist()], np.bool_)
        return sides[codes] if len(chosen) else sides
    paths = dataset.paths()
    if by == "hash":
        keys = [paths[index] for index in chosen.tolist()]
        return np.array([is_first(path) for path in keys], np.bool_)
    folders = [paths[index].rpartition(b"/")[0] for index in chosen.tolist()]
    known = {folder: is_first(folder) for folder in set(folders)}
    return np.array([known[folder] for folder in folders], np.bool_)


def _sources_of(dataset: Readable) -> Sequence[Source]:
    """Return the sources of a dataset or view; a mistaken type is an error."""
    if isinstance(dataset, DatasetView):
        return dataset.sources.sources
    if isinstance(dataset, Dataset):
        return [Source(dataset)]
    raise UsageError(f"make a view: expected datasets, got {show_value(dataset)}")


def _shares_of(dataset: Readable) -> list[tuple[Source, Fraction]]:
    """Return the sources of a part of a mix, and the share of each in it."""
    sources = _sources_of(dataset)
    view = dataset if isinstance(dataset, DatasetView) else None
    weights = view.weights if view is not None and view.weights else tuple(map(len, sources))
    if not sum(weights):
        raise UsageError(
            f"mix: expected samples in each dataset, got none in {quote(dataset.name)}"
        )
    return [
        (source, Fraction(weight, sum(weights)))
        for source, weight in zip(sources, weights, strict=True)
        if weight
    ]


def _longest_epoch(sizes: Sequence[int], weights: Sequence[int]) -> int:
    """Return the most samples of an epoch that takes no sample of a mix twice, whichever it is."""
    division = Interleaving(weights)
    low, high = 1, min(size * sum(weights) // w for size, w in zip(sizes, weights, strict=True))
    while low < high:
        middle = (low + high + 1) // 2
        fits = all(n <= size for n, size in zip(division.most(middle), sizes, strict=True))
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _fraction(weight: float, name: str) -> Fraction:
    try:
        value = Fraction(weight).limit_denominator(WEIGHT_STEPS)
    except (TypeError, ValueError, OverflowError):
        value = Fraction(0)
    if value <= 0:
        raise UsageError(
            f"mix: expected a weight of {1 / WEIGHT_STEPS:g} or more for {quote(name)}, got "
            f"{show_value(weight)}"
        )
    return value


def _join_names(names: Sequence[str], separator: str) -> str:
    if len(names) > NAMES_MAX:
        names = [*names[: NAMES_MAX - 1], f"{len(names) - NAMES_MAX + 1} more"]
    return separator.join(names)
