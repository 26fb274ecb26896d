"""``ArrivingLoader``: the first epoch of an ``ImportingLoader``.

It is a ``Loader`` whose number of samples is unknown until the import has ended. Up to there a
batch is given when its whole global batch has arrived, so every rank gives as many; what follows is
shared out like the end of any other epoch.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dlfs import ArrivingDataset, ArrivingEpoch
from dlfs.adapters.torch.cursor import Cursor
from dlfs.adapters.torch.import_process import ImportProcess
from dlfs.adapters.torch.loader import Loader
from dlfs.adapters.torch.lookahead import Read
from dlfs.adapters.torch.states import State
from dlfs.base.wording import quote
from dlfs.dataset.arriving import COUNT_MAX
from dlfs.errors import UsageError

UNKNOWN = COUNT_MAX
"""Number of samples as long as it is unknown."""


class ArrivingLabels:
    """The labels of samples that arrive: a column of numbers.

    Args:
        dataset: the samples.
        name: name of the column.
        window_bytes: size of a window.
    """

    def __init__(self, dataset: ArrivingDataset, name: str, window_bytes: int) -> None:
        self._dataset, self._name, self._window_bytes = dataset, name, window_bytes

    def __call__(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Return the labels of samples by their numbers.

        Raises:
            UsageError: the column has strings.
        """
        values = self._dataset.columns(self._window_bytes).column(self._name, indices)
        if values.dtype.kind == "O":
            raise UsageError(
                f"label samples of {quote(self._dataset.name)} by column {quote(self._name)} while "
                "they arrive: expected numbers, got strings, which can be numbered only when all "
                "are known; import a column of numbers (format imagefolder has 'label')"
            )
        return values


class ArrivingLoader(Loader):
    """Iterates over the batches of the first epoch, and waits for those that have not arrived.

    Args:
        dataset: the samples; a step of them has arrived.
        batch_size: samples of this rank in a batch.
        window_bytes: size of a window.
        running: the import.
        labels: name of the column of labels.
        options: as ``Loader`` takes them; ``window_chunks`` is the size of a window.

    Attributes:
        running: the import.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: ArrivingDataset,
        batch_size: int,
        *,
        window_bytes: int,
        running: ImportProcess,
        labels: str | None,
        **options: Any,
    ) -> None:
        self._arriving, self.running = dataset, running
        own = None if labels is None else ArrivingLabels(dataset, labels, window_bytes)
        window_chunks = max(1, window_bytes // dataset.chunk_bytes)
        options = {**options, "window_chunks": window_chunks, "labels": own}
        super().__init__(cast(Any, dataset), batch_size, **options)

    def _start_cursor(self) -> tuple[int, Cursor]:
        with self._arriving.start_epoch(self._options.whole()) as epoch:
            return UNKNOWN, Cursor(epoch.state())

    def __len__(self) -> int:
        """Return the number of batches of this rank.

        Raises:
            TypeError: the import has not ended, so that it is unknown.
        """
        if self._arriving.total is None:
            raise TypeError(
                f"count the batches of {quote(self._arriving.name)}: their number is unknown until "
                "the import has ended"
            )
        return super().__len__()

    def go_to(self, state: State | None) -> None:
        """Continue at a plain state of the first epoch; None: at its begin.

        Raises:
            UsageError: it is of another import.
        """
        if state is None:
            state = {**self._cursor.get(), "epoch": 0, "position": 0}
        own = {**state, "dataset": self._arriving.digests.content}
        self._open_epoch(state).close()
        self._go_to(self._begin_of(own))

    def _count(self, _state: State) -> int:
        total = self._arriving.total
        return UNKNOWN if total is None else total

    def _count_batches(self, begin: State) -> int | None:
        return None if self._arriving.total is None else super()._count_batches(begin)

    def _open_epoch(self, state: State, *, workers: int = 1) -> Any:
        options = replace(self._options_at(state).placed(self._finder.current()), workers=workers)
        check = self.running.check
        epoch = self._arriving.start_epoch(options, check=check, timeout_s=None)
        return epoch.resume(state)

    def _read(self, begin: State, every: int) -> Generator[Read]:
        step = self.batch_size * self.world_size
        window_bytes = begin["window_chunks"] * self._arriving.chunk_bytes
        with closing(cast(ArrivingEpoch, self._open_epoch(begin, workers=every))) as epoch:
            for number in count(0, every):
                end = begin["position"] + (number + 1) * step
                check = self.running.check
                self._arriving.wait(end, window_bytes, check=check, timeout_s=None)
                share = self._share(begin)
                if number >= share.batches:
                    break
                yield self._read_one(cast(Any, epoch), begin, share, number)
