"""Takes batches before they are requested, so that their transforms or copies have begun.

Threads: one at a time, that of the loader; a ``TransformPool`` has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from dlfs import Batch
from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.samples import TransformPool
from dlfs.adapters.torch.states import State
from dlfs.errors import DlfsError

T = TypeVar("T")

LOOKAHEAD = 2
"""Batches whose transforms start before they are requested, by default."""

Read = tuple[Batch, State, list[SampleContext] | None]
"""A batch that was read, the state behind it, and the contexts of its samples."""

Work = tuple[Batch, State, list[Future[list[Any]]]]
"""A batch, the state behind it, and its transforms, which were started."""


def begin_work(pool: TransformPool, read: Read) -> Work:
    """Start the transforms of a batch."""
    batch, state, contexts = read
    return batch, state, pool.start(batch, contexts)


def take_ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield items that were taken ``count`` items before they are requested.

    An error is raised behind the items before it.
    """
    taken: deque[T] = deque()
    failure: DlfsError | None = None
    ended = False
    while True:
        while not ended and len(taken) <= count:
            try:
                taken.append(next(items))
            except StopIteration:
                ended = True
            except DlfsError as error:
                ended, failure = True, error
        if not taken:
            break
        yield taken.popleft()
    if failure is not None:
        raise failure
