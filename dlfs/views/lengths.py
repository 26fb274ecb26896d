"""``length_batches``: batches of samples of similar lengths, up to a budget of tokens.

The order of an epoch is cut into windows. The samples of a window are sorted by length and divided
into batches: the number of samples times the longest one, which is the size of the padded batch, is
at most the budget. The batches of a window are then shuffled by the seed.

An ``Epoch`` over the numbers of all batches divides them among ranks and workers, so that a state
resumes at any world size. Every rank plans the whole epoch, from the lengths in the directory.

Threads: one at a time for an epoch. Memory: 8 bytes for each sample of two windows, and 8 for each
window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from dlfs._native.permutation import Permutation
from dlfs._native.reader import StreamOptions
from dlfs.base.arguments import check_integer
from dlfs.base.wording import quote
from dlfs.epoch.options import EpochKeywords, EpochOptions, make_options
from dlfs.epoch.selection import Selection
from dlfs.errors import UsageError
from dlfs.reader import Epoch, EpochReader
from dlfs.views.lists import LastOrder, ListStream, Readable, digest_order, open_reader
from dlfs.views.order import hash_numbers

WINDOW_SAMPLES = 1 << 14
"""Samples that are sorted by length at a time, by default."""

SAMPLES_MAX = 1 << 32
"""Most samples of a batch."""


class LengthPlan:
    """The batches of one epoch, computed window by window.

    Args:
        dataset: dataset or view.
        options: options of the epoch's order.
        budget: most tokens of a padded batch.
        token_bytes: size of a token in bytes.
        samples_max: most samples of a batch.
        window_samples: samples that are sorted at a time.

    Raises:
        UsageError: a sample is longer than the budget; the message names it.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: Readable,
        options: EpochOptions,
        *,
        budget: int,
        token_bytes: int,
        samples_max: int,
        window_samples: int,
    ) -> None:
        self._dataset = dataset
        self._order = dataset.order_epoch(options)
        self._budget_bytes = budget * token_bytes
        self._samples_max = samples_max
        self._window_samples = window_samples
        self._seed = hash_numbers(options.seed, options.epoch)
        self._shuffled = options.shuffle is not None
        self._window = lru_cache(maxsize=2)(self._plan_window)
        self._firsts = [0]  # number of the first batch of each window, and of all batches
        for number in range(-(-len(self._order) // window_samples)):
            self._firsts.append(self._firsts[-1] + len(self._plan_window(number)))

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._firsts[-1]

    def batch(self, number: int) -> NDArray[np.uint64]:
        """Return the indices of a batch, ``uint64[n]``, the shortest sample first."""
        window = bisect_right(self._firsts, number) - 1
        return self._window(window)[number - self._firsts[window]]

    def _plan_window(self, number: int) -> list[NDArray[np.uint64]]:
        first = number * self._window_samples
        count = min(self._window_samples, len(self._order) - first)
        indices = self._order.indices(first, count)
        lengths = self._dataset.lengths(indices)
        by_length = np.argsort(lengths, kind="stable")
        batches = [indices[by_length[a:b]] for a, b in self._cut(lengths[by_length], indices)]
        if not self._shuffled or not batches:
            return batches
        shuffled = Permutation(len(batches), self._seed, number).map()
        return [batches[at] for at in shuffled.tolist()]

    def _cut(
        self, lengths: NDArray[np.int64], indices: NDArray[np.uint64]
    ) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each batch among samples in the order of their lengths."""
        if len(lengths) and lengths[-1] > self._budget_bytes:
            at = int(indices[int(np.argmax(self._dataset.lengths(indices)))])
            raise UsageError(
                f"take batches by length: expected samples of at most {self._budget_bytes} bytes, "
                f"got {int(lengths[-1])} in sample {at} {quote(self._dataset.path(at))}"
            )
        first = 0
        for end, length in enumerate(lengths.tolist(), 1):
            count = end - first
            if count > self._samples_max or count * length > self._budget_bytes:
                yield first, end - 1
                first = end - 1
        if first < len(lengths):
            yield first, len(lengths)


class _LengthReader:
    """Reads the batches of a plan; the positions of an epoch are the numbers of its batches."""

    def __init__(self, reader: EpochReader, plan: Callable[[EpochOptions], LengthPlan]) -> None:
        self._reader = reader
        self._plan = plan
        self.build_batch = reader.build_batch

    @property
    def closing(self) -> bool:
        return self._reader.closing

    def stream(
        self, options: EpochOptions, _selection: Selection | None, part: StreamOptions
    ) -> _LengthStream:
        batch = self._plan(options).batch
        return _LengthStream(self._reader, map(batch, part.positions().tolist()), part.plan)


class _LengthStream(ListStream):
    """A list stream whose batches have one position each."""

    def next(self, count: int = 1) -> Any:
        assert count == 1
        return self.next_list()


def length_batches(
    dataset: Readable,
    max_tokens: int,
    *,
    token_bytes: int = 1,
    max_samples: int | None = None,
    window_samples: int = WINDOW_SAMPLES,
    **options: Unpack[EpochKeywords],
) -> Epoch:
    """Return one rank's batches of an epoch, each of samples of similar lengths, read ahead.

    The number of samples of a batch times its longest one is at most ``max_tokens``, so that
    padding wastes little. ``Batch.pad`` makes one array of a batch.

    Args:
        dataset: dataset, or a view of several.
        max_tokens: most tokens of a padded batch, of one rank.
        token_bytes: size of a token in bytes, such as 2 for ``uint16``.
        max_samples: most samples of a batch; unlimited by default.
        window_samples: samples that are sorted by length at a time. A larger window wastes less on
            padding; a smaller one leaves the order more random.
        options: order and share, as ``Dataset.batches`` takes them. ``drop_last`` leaves out the
            last batches if they are fewer than the ranks.

    Returns:
        The epoch. Its positions, in ``state``, are numbers of batches.

    Raises:
        UsageError: an argument is out of range, or a sample has more tokens than a batch may have.
        DlfsError: the directory cannot be read.
    """
    check = partial(check_integer, action="take batches by length")
    limits = {
        "budget": check(max_tokens, 1, None, option="max_tokens"),
        "token_bytes": check(token_bytes, 1, None, option="token_bytes"),
        "samples_max": check(max_samples or SAMPLES_MAX, 1, SAMPLES_MAX, option="max_samples"),
        "window_samples": check(window_samples, 1, None, option="window_samples"),
    }
    made = make_options(length_batches, EpochKeywords, options, batch_size=1).with_copies()
    plan = LastOrder(lambda options: LengthPlan(dataset, options, **limits))
    return Epoch(
        lambda: _LengthReader(open_reader(dataset, made.fields), plan),
        made,
        dataset=f"{dataset.name}, by length",
        digests=digest_order(dataset, made, f"by length {limits}"),
        sample_count=lambda options: len(plan(options)),
    )
