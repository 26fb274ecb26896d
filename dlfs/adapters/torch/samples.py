"""From the bytes of a batch to what a training step is given.

A ``Recipe`` says how: what the bytes are, what is done to each sample, how samples become one
batch. Transforms run in threads, a slice of the batch each, so that decoders which let go of the
GIL (those of images do) use several cores; order is kept, and an error names its sample.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate, get_worker_info

from dlfs import Batch, Dataset
from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.forms import ElementType, SampleForm
from dlfs.adapters.torch.labels import Labels, label_samples
from dlfs.adapters.torch.tensors import (
    SampleViews,
    make_jagged,
    view_array,
    view_samples,
)
from dlfs.arguments import check_choice
from dlfs.errors import DlfsError, TransformError, UsageError
from dlfs.wording import quote

Transform = Callable[..., Any]
"""Makes of one sample, and of its context if asked for, what is trained on; called in threads."""

CollateName = Literal["auto", "list", "jagged", "stack"]

Collate = CollateName | Callable[[Sequence[Any]], Any]

COLLATES: tuple[CollateName, ...] = get_args(CollateName)

THREADS = 2
"""That run transforms, in each process, unless said otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How samples are made of bytes.

    Attributes:
        transform: called with each sample: its bytes as a read-only ``memoryview``, or, if they are
            an array, the tensor.
        with_context: call it with the sample's ``SampleContext`` too.
        labels: maps indices to labels.
        collate: ``list``; ``jagged``; ``stack``, for samples of one shape; ``auto``: ``list`` for
            bytes as they are, else ``stack``; or a function of the list of samples.
        dtype: of the array that every sample's bytes are, numpy's or PyTorch's.
        shape: of that array; one dimension of any length by default.
        arrays: each sample is the array that the dataset says it is (``Batch.arrays``).
        threads: that run the transform.

    Raises:
        UsageError: there is no such ``collate``, dtype or shape, ``threads`` < 1, a shape without a
            dtype, a dtype beside ``arrays``, or a context without a transform.
    """

    transform: Transform | None = None
    with_context: bool = False
    labels: Labels | None = None
    collate: Collate = "auto"
    dtype: ElementType | None = None
    shape: tuple[int, ...] | None = None
    arrays: bool = False
    threads: int = THREADS

    def __post_init__(self) -> None:
        if not callable(self.collate):
            check_choice(
                self.collate,
                COLLATES,
                option="collate",
                action="make batches",
                otherwise="a function",
            )
        if self.threads < 1:
            raise UsageError(f"make batches: expected threads >= 1, got {self.threads}")
        if self.shape is not None and self.dtype is None:
            raise UsageError(f"make batches: expected a dtype with the shape {self.shape}")
        if self.arrays and self.dtype is not None:
            raise UsageError(
                f"make batches: expected a dtype or arrays=True, got both: {self.dtype}"
            )
        if self.with_context and self.transform is None:
            raise UsageError("make batches: expected a transform with with_context=True, got none")
        _ = self.form  # it says what is wrong with dtype and shape

    @property
    def form(self) -> SampleForm | None:
        """The array that every sample's bytes are; None if the dataset says it of each.

        Raises:
            UsageError: there is no such dtype or shape.
        """
        if self.arrays:
            return None
        return SampleForm.of(np.uint8 if self.dtype is None else self.dtype, self.shape)

    @property
    def is_raw(self) -> bool:
        """Whether samples are bytes, no arrays."""
        return not self.arrays and self.dtype is None

    @property
    def has_work(self) -> bool:
        """Whether samples go through threads."""
        return self.transform is not None

    def label(self, batch: Batch) -> torch.Tensor | list[Any] | None:
        """Labels of a batch, ``[n]``, a list if they are strings; None if there are none.

        Raises:
            UsageError: there are more or fewer labels than samples.
        """
        if self.labels is None:
            return None
        return label_samples(self.labels, batch.indices)

    def items(self, batch: Batch, *, own: bool = False) -> Sequence[Any]:
        """The samples one by one, before the transform.

        Args:
            batch: its samples.
            own: arrays are copies, not views of the reader's memory; with a transform, which may
                change its sample in place, they always are.

        Raises:
            UsageError: a sample's length is not what dtype and shape need, or it is no array.
        """
        if self.arrays:
            views = [view_array(array) for array in batch.arrays(stack=False)]
            # What a worker sends must not drag the memory that it lies in along.
            own = own or self.transform is not None or get_worker_info() is not None
            return [view.clone() for view in views] if own else views
        if self.form is not None and not self.is_raw:
            return list(self.form.join(batch) if self.form.varies else self.form.stack(batch))
        return view_samples(batch) if self.transform is None else list(batch)

    def gather(self, batch: Batch) -> Any:
        """The samples of a batch together, where there is no transform.

        Raises:
            UsageError: samples are to be stacked, and their lengths differ; or as ``items``.
        """
        form = self.form
        if self.collate == "stack" or (self.collate == "auto" and not self.is_raw):
            return torch.from_numpy(batch.arrays()) if form is None else form.stack(batch)
        if self.collate == "jagged" and form is not None:
            return form.join(batch)
        items = self.items(batch)
        return items if self.collate == "auto" else self.join(items)

    def join(self, items: Sequence[Any]) -> Any:
        """Make one batch of samples.

        Raises:
            UsageError: they cannot be jagged.
            RuntimeError, TypeError: they cannot be stacked, as PyTorch tells.
        """
        if callable(self.collate):
            return self.collate(items)
        if self.collate == "list":
            return SampleViews(items)
        if self.collate == "jagged":
            return make_jagged(items)
        return default_collate(list(items)) if items else []


class TransformPool:
    """Threads that run a recipe's transform.

    Args:
        recipe: with a transform.
        dataset: that errors name.

    Threads: one at a time.
    """

    _at_exit = staticmethod(sys.is_finalizing)  # then threads can no longer be waited for

    def __init__(self, recipe: Recipe, dataset: Dataset) -> None:
        self._recipe = recipe
        self._dataset = dataset
        self._executor = ThreadPoolExecutor(recipe.threads, thread_name_prefix="dlfs-transform")

    def start(
        self, batch: Batch, contexts: Sequence[SampleContext] | None = None
    ) -> list[Future[list[Any]]]:
        """Begin with a batch.

        Args:
            batch: its samples.
            contexts: one for each of them, if the transform is called with them.

        Raises:
            UsageError: a sample's length is not what dtype and shape need.
        """
        items = self._recipe.items(batch)
        calls = (
            [(item,) for item in items]
            if contexts is None
            else list(zip(items, contexts, strict=True))
        )
        size = max(1, -(-len(calls) // self._recipe.threads))
        return [
            self._executor.submit(self._run, calls[first : first + size], batch.indices[first:])
            for first in range(0, len(calls), size)
        ]

    def finish(self, parts: Sequence[Future[list[Any]]]) -> list[Any]:
        """Wait for a batch.

        Returns:
            The samples, in the batch's order.

        Raises:
            TransformError: the transform raised; of several, the first sample's.
        """
        return list(chain.from_iterable(part.result() for part in parts))

    def _run(self, calls: Sequence[tuple[Any, ...]], indices: npt.NDArray[np.uint64]) -> list[Any]:
        transform = self._recipe.transform
        assert transform is not None
        done = []
        for arguments, index in zip(calls, indices, strict=False):
            try:
                done.append(transform(*arguments))
            except Exception as error:
                raise transform_error(self._dataset, int(index), error) from error
        return done

    def close(self) -> None:
        """End the threads, once they are through with what they are at. Idempotent."""
        if not self._at_exit():
            self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def transform_error(dataset: Dataset, index: int, cause: Exception) -> TransformError:
    """Name the sample that a transform failed on."""
    try:
        path = dataset.path(index)
    except DlfsError:
        path = b"?"  # the sample was read, and its name cannot be
    return TransformError(
        f"transform sample {index} {quote(path)} of dataset {quote(dataset.name)}: "
        f"{type(cause).__name__}: {cause}"
    )
