"""Makes the values of a training step from the bytes of a batch.

A ``Recipe`` describes the steps: the form of the bytes, the transform of each sample, and how
samples become one batch. A ``TransformPool`` runs transforms in threads, a slice of the batch each,
so that decoders that release the GIL, such as those of images, use several cores. The order of
samples is preserved, and an error names its sample.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate, get_worker_info

from dlfs import Batch, TokenSequences
from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.fields import field_samples, gather_fields
from dlfs.adapters.torch.forms import ElementType, SampleForm
from dlfs.adapters.torch.labels import Labels, label_samples
from dlfs.adapters.torch.memory import HostMemory
from dlfs.adapters.torch.sources import Source
from dlfs.adapters.torch.tensors import (
    SampleViews,
    make_jagged,
    view_array,
    view_samples,
)
from dlfs.base.arguments import check_choice
from dlfs.base.closing import Closing
from dlfs.base.threads import ThreadPool
from dlfs.base.wording import quote
from dlfs.errors import DlfsError, TransformError, UsageError

Transform = Callable[..., Any]
"""Function that makes a training value of one sample, and of its context; called in threads."""

CollateName = Literal["auto", "list", "jagged", "stack"]

Collate = CollateName | Callable[[Sequence[Any]], Any]

COLLATES: tuple[CollateName, ...] = get_args(CollateName)

HOST = HostMemory()

THREADS = 2
"""Threads that run transforms in each process, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The way from the bytes of samples to a batch.

    Its attributes are arguments of ``Loader``, which describes them, and ``fields``.

    Attributes:
        fields: True if samples have named fields; not used with ``arrays`` or a dtype.

    Raises:
        UsageError: ``collate``, dtype or shape are unknown, ``threads`` < 1, a shape without a
            dtype, a dtype with ``arrays``, or a context without a transform.
    """

    transform: Transform | None = None
    with_context: bool = False
    labels: Labels | None = None
    collate: Collate = "auto"
    dtype: ElementType | None = None
    shape: tuple[int, ...] | None = None
    arrays: bool = False
    fields: bool = False
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
        _ = self.form  # raises for a wrong dtype or shape

    @property
    def form(self) -> SampleForm | None:
        """Form of every sample; None if the dataset describes the array of each sample.

        Raises:
            UsageError: there is no such dtype or shape.
        """
        if self.arrays:
            return None
        return SampleForm.of(np.uint8 if self.dtype is None else self.dtype, self.shape)

    @property
    def is_raw(self) -> bool:
        """True if samples are raw bytes rather than arrays."""
        return not self.arrays and self.dtype is None and not self.has_fields

    @property
    def has_fields(self) -> bool:
        """True if samples are dictionaries of their fields."""
        return self.fields and not self.arrays and self.dtype is None

    @property
    def has_work(self) -> bool:
        """True if a transform runs in threads."""
        return self.transform is not None

    def label(self, batch: Batch) -> torch.Tensor | list[Any] | None:
        """Return the labels of a batch, ``[n, ...]``, a list of strings, or None.

        Raises:
            UsageError: there are more or fewer labels than samples.
        """
        if self.labels is None:
            return None
        return label_samples(self.labels, batch.indices)

    def items(self, batch: Batch, *, own: bool = False) -> Sequence[Any]:
        """Return the samples of a batch one by one, before the transform.

        Args:
            batch: batch with the samples.
            own: True to copy arrays instead of viewing the reader's memory; always the case with a
                transform, which may change its sample in place.

        Raises:
            UsageError: a sample's length does not fit dtype and shape, or it is no array.
        """
        if self.has_fields:
            return field_samples(batch, for_transform=self.transform is not None)
        if self.arrays:
            views = [view_array(array) for array in batch.arrays(stack=False)]
            # A worker that sends a view sends the whole memory behind it.
            own = own or self.transform is not None or get_worker_info() is not None
            return [view.clone() for view in views] if own else views
        if self.form is not None and not self.is_raw:
            join = self.form.join if self.form.varies else self.form.stack
            return list(join(batch, HOST))
        return view_samples(batch) if self.transform is None else list(batch)

    def gather(self, batch: Batch, memory: HostMemory) -> Any:
        """Return the samples of a batch as one value, without a transform.

        Args:
            batch: batch with the samples.
            memory: memory of the tensors. Those that take further steps, such as a function that
                collates, are made in ordinary memory.

        Raises:
            UsageError: samples are to be stacked, and their lengths differ; or as ``items``.
        """
        if self.has_fields:
            whole = not callable(self.collate) and self.collate != "list"
            if whole:
                return gather_fields(batch, self.collate, memory)
            return self.join(self.items(batch))
        form = self.form
        if self.collate == "stack" or (self.collate == "auto" and not self.is_raw):
            form = SampleForm.of(*batch.array_form()) if form is None else form
            return form.stack(batch, memory)
        if self.collate == "jagged" and form is not None:
            return form.join(batch, memory)
        if self.is_raw and not callable(self.collate):
            return memory.views(batch)
        return self.join(self.items(batch))

    def join(self, items: Sequence[Any]) -> Any:
        """Make one batch of samples.

        Raises:
            UsageError: they cannot be jagged, or are tensors of several shapes to be stacked.
            RuntimeError, TypeError: they cannot be stacked otherwise; PyTorch's error.
        """
        if callable(self.collate):
            return self.collate(items)
        if self.collate == "list":
            return SampleViews(items)
        if self.collate == "jagged":
            return make_jagged(items)
        if not items:
            return []
        try:
            return default_collate(list(items))
        except RuntimeError as error:
            _explain_stack(items, error)
            raise


def _explain_stack(items: Sequence[Any], error: RuntimeError) -> None:
    """Explain why PyTorch could not stack samples, and name the other ways to collate them.

    Raises:
        UsageError: they differ in their shapes.
    """
    if "stack expects each tensor to be equal size" not in str(error):
        return
    shapes = {tuple(item.shape): None for item in items if isinstance(item, torch.Tensor)}
    got = f"shapes {list(shapes)[:4]}" if shapes else str(error)
    raise UsageError(
        f"stack samples: expected tensors of one shape, got {got}; make them of one shape in the "
        "transform, or give collate='jagged' for one tensor of all and their lengths, "
        "collate='list', or a function"
    ) from error


class TransformPool(Closing):
    """Threads that run a recipe's transform.

    Args:
        recipe: recipe with a transform.
        dataset: dataset, view or sequences that errors name.

    Threads: one at a time.
    """

    _at_exit = staticmethod(sys.is_finalizing)  # threads cannot be joined then

    def __init__(self, recipe: Recipe, dataset: Source) -> None:
        self._recipe = recipe
        self._dataset = dataset
        self._executor = ThreadPool(recipe.threads, thread_name_prefix="dlfs-transform")

    def start(
        self, batch: Batch, contexts: Sequence[SampleContext] | None = None
    ) -> list[Future[list[Any]]]:
        """Submit the transforms of a batch.

        Args:
            batch: batch with the samples.
            contexts: context of each sample, if the transform takes one.

        Returns:
            Futures of slices of the batch, in order.

        Raises:
            UsageError: a sample's length does not fit dtype and shape.
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

    def finish(self, slices: Sequence[Future[list[Any]]]) -> list[Any]:
        """Wait for the transforms of a batch.

        Returns:
            The results, in the batch's order.

        Raises:
            TransformError: a transform raised; the error of the first failed sample.
        """
        return list(chain.from_iterable(one.result() for one in slices))

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
        """End the threads after their current slices. Idempotent."""
        if not self._at_exit():
            self._executor.shutdown(cancel_futures=True)


def transform_error(dataset: Source, index: int, cause: Exception) -> TransformError:
    """Return the error of a failed transform, which names the sample."""
    what = f"sequence {index}"
    if not isinstance(dataset, TokenSequences):
        try:
            path = dataset.path(index)
        except DlfsError:
            path = b"?"  # the sample was read, but not its name
        what = f"sample {index} {quote(path)}"
    return TransformError(
        f"transform {what} of dataset {quote(dataset.name)}: {type(cause).__name__}: {cause}"
    )
