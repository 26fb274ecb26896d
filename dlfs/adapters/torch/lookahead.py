"""Starts the transforms of batches before they are requested.

Threads: one at a time, that of the loader; a ``TransformPool`` has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from dlfs import Batch
from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.samples import TransformPool
from dlfs.adapters.torch.states import State
from dlfs.errors import DlfsError

LOOKAHEAD = 2
"""Batches whose transforms start before they are requested, by default."""

Read = tuple[Batch, State, list[SampleContext] | None]
"""A batch that was read, the state behind it, and the contexts of its samples."""

Work = tuple[Batch, State, list[Future[list[Any]]]]
"""A batch, the state behind it, and its transforms, which were started."""


def begin_ahead(reading: Iterator[Read], pool: TransformPool, lookahead: int) -> Iterator[Work]:
    """Yield batches whose transforms have been started some batches before they are requested.

    An error is raised behind the batches before it.
    """
    begun: deque[Work] = deque()
    failure: DlfsError | None = None
    ended = False
    while True:
        while not ended and len(begun) <= lookahead:
            try:
                read = next(reading, None)
                ended = read is None
                if read is not None:
                    batch, state, contexts = read
                    begun.append((batch, state, pool.start(batch, contexts)))
                    del read, batch
            except DlfsError as error:
                ended, failure = True, error
        if not begun:
            break
        yield begun.popleft()
    if failure is not None:
        raise failure
