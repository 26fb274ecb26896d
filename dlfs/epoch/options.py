"""The options of an epoch and the state that resumes it, as two frozen dataclasses.

``EpochOptions`` has every argument of ``Dataset.batches``. One object is carried through all
layers: ``Dataset`` makes it, ``selection`` and ``order`` take the order from it, ``Epoch`` the
share of one rank and worker, and the adapters keep it and replace the seed, epoch, rank or worker.

Datasets, views, loaders and samplers take these options as keywords: ``**options:
Unpack[EpochKeywords]``, or another of the ``TypedDict`` classes here, which tell type checkers and
editors the names and types. ``make_options`` makes the object of them. The docstring of
``Dataset.batches`` describes each keyword, for all of them.

``EpochState`` is the position of an epoch in its order. It names the dataset and the order, and no
rank and no batch size, so that an epoch is resumed at another world size.

Threads: any; both are immutable. The arrays in the options belong to the caller until
``with_copies`` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from dlfs.base.arguments import (
    READ_PLANS,
    SHUFFLES,
    OnError,
    ReadPlan,
    Shuffle,
    as_integer,
    check_choice,
    check_integer,
    check_keywords,
    check_on_error,
)
from dlfs.base.wording import join_words, show_value
from dlfs.epoch.placement import (
    PlacementSource,
    check_one_source,
    check_said,
    find_placement,
)
from dlfs.epoch.ranks import Placement
from dlfs.errors import UsageError
from dlfs.format.digests import Digests

Weights = str | ArrayLike | Callable[[int], str | ArrayLike]
"""Weights of samples: a column's name, a number for each, or a function that returns either."""

WINDOW_CHUNKS = 64
"""Chunks that chunk shuffle mixes at a time by default: 16 MiB of the default chunk size.

Where samples were packed in a random order, as import does by default, any window shuffles batches
as well as a global order. Where samples lie class by class, the number of samples of one class in a
batch varies 1 + (batch - 1) / window_chunks times as much as in a global order: for batches of 256
by 17, 4.9, 1.9 and 1.2 with windows of 16, 64, 256 and 1,024. A window larger than the memory
budget is read several times.

Source: ``python -m bench.shuffle``; docs/performance.md, "How well it shuffles".
"""

WINDOW_CHUNKS_MAX = 1 << 20
"""Largest window of chunk shuffle, in chunks."""

STATE_VERSION = 2
"""Version of the dictionary that ``EpochState.to_dict`` makes."""

_UINT64_MAX = (1 << 64) - 1

_ORDER_RANGES = (
    ("seed", 0, _UINT64_MAX),
    ("epoch", 0, _UINT64_MAX),
    ("window_chunks", 1, WINDOW_CHUNKS_MAX),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOptions:
    """The order of an epoch, and the part of it that one consumer reads.

    ``Dataset.batches`` says what each value means for its users.

    Attributes:
        batch_size: samples of this rank in a batch, >= 1.
        seed: seed of the order, 0..2^64-1.
        epoch: number of the epoch, 0..2^64-1.
        rank: rank of this process, 0..world_size-1; None, like ``world_size``, to find it when the
            epoch begins.
        world_size: number of ranks that share the samples of the epoch, >= 1.
        placement: mesh, group or function that says the rank, as ``dlfs.epoch.placement``
            describes, instead of numbers.
        worker: number of this consumer within its rank, 0..workers-1.
        workers: consumers that share the batches of a rank, >= 1.
        shuffle: ``global``, ``chunk``, or None for storage order.
        window_chunks: chunks that ``chunk`` shuffle mixes at a time, 1..2^20.
        where: samples to take, each once, as ``bool[n_samples]`` or indices.
        weights: weight of each sample, ``[n_samples]``, the name of a column, or a function that
            returns either of an epoch.
        draws: samples of a weighted epoch.
        order: indices of the epoch's samples in their order.
        drop_last: True to leave out a last global batch that is not full.
        on_error: policy for samples that cannot be read: ``raise``, ``skip`` or ``replace``.
        plan: how samples are read ahead: ``auto``, ``direct``, ``chunks`` or ``chunk_copy``.
        fields: names of the fields that batches have; None for all.

    Raises:
        UsageError: a value is out of range. ``dlfs.epoch.selection.select`` checks ``where``,
            ``weights``, ``draws`` and ``order``, for which it needs the dataset.
    """

    batch_size: int = 1
    seed: int = 0
    epoch: int = 0
    rank: int | None = None
    world_size: int | None = None
    placement: PlacementSource | None = None
    worker: int = 0
    workers: int = 1
    shuffle: Shuffle | None = "global"
    window_chunks: int = WINDOW_CHUNKS
    where: ArrayLike | None = None
    weights: Weights | None = None
    draws: int | None = None
    order: ArrayLike | None = None
    drop_last: bool = False
    on_error: OnError = "raise"
    plan: ReadPlan = "auto"
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check_shuffle(self.shuffle)
        check_on_error(self.on_error)
        check_choice(self.plan, READ_PLANS, option="plan", action="take batches")
        _check_integers(self, _ORDER_RANGES, action="order an epoch")
        counts = (("batch_size", 1, None), ("workers", 1, None))
        _check_integers(self, counts, action="take batches")
        _check_integers(self, (("worker", 0, self.workers - 1),), action="take batches")
        self._check_ranks()

    def _check_ranks(self) -> None:
        check_said(self.placement)
        if self.rank is None and self.world_size is None:
            return
        check_one_source(self.rank, self.world_size, self.placement)
        for option, missing in (("rank", 0), ("world_size", 1)):
            if getattr(self, option) is None:
                object.__setattr__(self, option, missing)
        _check_integers(self, (("world_size", 1, None),), action="take batches")
        assert self.world_size is not None
        _check_integers(self, (("rank", 0, self.world_size - 1),), action="take batches")

    @property
    def has_choice(self) -> bool:
        """True if the epoch is over chosen samples: where, weights, draws or order are given."""
        chosen = (self.where, self.weights, self.draws, self.order)
        return any(value is not None for value in chosen)

    @property
    def is_repeated(self) -> bool:
        """True if all epochs have the same order, as an evaluation in storage order."""
        return self.weights is None and (self.order is not None or self.shuffle is None)

    @property
    def order_key(self) -> tuple[object, ...]:
        """The options that a resume changes, and that determine the order with the choice."""
        return self.seed, self.epoch, self.shuffle, self.window_chunks

    def has_order_of(self, other: EpochOptions) -> bool:
        """Return True if other options give the same order, with the same arrays."""
        chosen = ("where", "weights", "draws", "order")
        return self.order_key == other.order_key and all(
            getattr(self, name) is getattr(other, name) for name in chosen
        )

    def whole(self) -> Self:
        """Return the options of the same epoch for one consumer of all samples, one in a batch."""
        alone = self.placed(Placement(0, 1))
        return replace(alone, batch_size=1, worker=0, workers=1, drop_last=False)

    def placed(self, placement: Placement | None = None) -> Self:
        """Return the same options with the rank and world size of a placement.

        Args:
            placement: placement; by default that of this process, if no rank is given.

        Raises:
            UsageError: this process's rank cannot be found.
        """
        if placement is None:
            if self.rank is not None:
                return self
            placement = find_placement(self.placement)
        return replace(self, rank=placement.rank, world_size=placement.world_size, placement=None)

    def with_copies(self) -> Self:
        """Return the same options with copies of the arrays.

        Adapters keep options for many epochs, which must not change with the caller's arrays.
        """
        is_same = isinstance(self.weights, str) or callable(self.weights)
        return replace(
            self,
            where=None if self.where is None else np.array(self.where),
            weights=self.weights if is_same or self.weights is None else np.array(self.weights),
            order=None if self.order is None else np.array(self.order),
        )

    def at(self, state: EpochState) -> Self:
        """Return the same options with the seed, epoch and shuffle of a state."""
        return replace(
            self,
            seed=state.seed,
            epoch=state.epoch,
            shuffle=state.shuffle,
            window_chunks=state.window_chunks,
        )

    def state(self, dataset: Digests, position: int, selection: str | None) -> EpochState:
        """Return the state of this epoch.

        Args:
            dataset: digests of the dataset.
            position: samples of the epoch that all ranks together have taken.
            selection: fingerprint of the chosen samples; None for all samples.
        """
        return EpochState(
            dataset.content,
            dataset.packing,
            self.shuffle,
            self.seed,
            self.epoch,
            self.window_chunks,
            position,
            selection=selection,
        )


class SelectionKeywords(TypedDict, total=False):
    """Keywords that choose the samples of an epoch."""

    where: ArrayLike | None
    weights: Weights | None
    draws: int | None
    order: ArrayLike | None


class OrderKeywords(SelectionKeywords, total=False):
    """Keywords that determine the order of any epoch."""

    seed: int
    shuffle: Shuffle | None
    window_chunks: int


class ReadKeywords(OrderKeywords, total=False):
    """Keywords of what reads one epoch after the other, of whole samples."""

    rank: int | None
    world_size: int | None
    placement: PlacementSource | None
    drop_last: bool
    on_error: OnError
    plan: ReadPlan


class EpochKeywords(ReadKeywords, total=False):
    """Keywords of what reads one epoch: those of ``Dataset.batches``."""

    epoch: int
    worker: int
    workers: int
    fields: Sequence[str] | None


def make_options(
    function: Callable[..., Any], taken: type, keywords: Mapping[str, object], **others: Any
) -> EpochOptions:
    """Make the options of an epoch from the keywords of a call.

    Args:
        function: class or function that was called.
        taken: ``TypedDict`` of the keywords that it takes.
        keywords: keywords of the call.
        others: options that have parameters of their own.

    Raises:
        TypeError: the function has no such keyword.
        UsageError: a value is out of range.
    """
    check_keywords(function, taken, keywords)
    return EpochOptions(**{**keywords, **others})


@dataclass(frozen=True, slots=True)
class EpochState:
    """The position of an epoch: enough to resume it in another process, at another world size.

    Attributes:
        dataset: content digest of the dataset, in hexadecimal.
        packing: its packing digest, which matters if the order is that of storage or of chunks.
        shuffle, seed, epoch, window_chunks: order of the epoch, as in ``EpochOptions``.
        position: samples of the epoch that all ranks together have taken.
        version: version of the dictionary form.
        selection: fingerprint of the chosen samples; None for all samples.
    """

    dataset: str
    packing: str
    shuffle: Shuffle | None
    seed: int
    epoch: int
    window_chunks: int
    position: int
    version: int = STATE_VERSION
    selection: str | None = None

    def __post_init__(self) -> None:
        action = "resume an epoch"
        _check_text(self.dataset, option="dataset", action=action)
        _check_text(self.packing, option="packing", action=action)
        if self.selection is not None:
            _check_text(self.selection, option="selection", action=action)
        _check_shuffle(self.shuffle, action)
        ranges = (*_ORDER_RANGES, ("position", 0, _UINT64_MAX))
        _check_integers(self, ranges, action=action)

    @property
    def follows_packing(self) -> bool:
        """True if the order of the epoch depends on how the samples are packed."""
        return self.shuffle != "global" and self.selection is None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint (JSON, pickle, ``torch.save``)."""
        values = asdict(self)
        if self.selection is None:
            del values["selection"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read the dictionary that ``to_dict`` made.

        Raises:
            UsageError: it is no such dictionary, or its version is unknown to this release.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise UsageError(
                f"resume an epoch: expected an epoch's state, got {show_value(values)}"
            )
        if as_integer(values["version"]) != STATE_VERSION:
            raise UsageError(
                f"resume an epoch: expected a state of version {STATE_VERSION}, got version "
                f"{show_value(values['version'])}, of another release"
            )
        names = {field.name for field in fields(cls)}
        missing = [name for name in names - {"selection"} if name not in values]
        unknown = [key for key in values if key not in names]
        if missing or unknown:
            problem = f"without {missing[0]}" if missing else f"with {show_value(unknown[0])}"
            expected = join_words(sorted(names), "and")
            raise UsageError(
                f"resume an epoch: expected an epoch's state with {expected}, got one {problem}: "
                f"{show_value(values)}"
            )
        return cls(**{**values, "version": STATE_VERSION})


def _check_shuffle(shuffle: object, action: str = "order an epoch") -> None:
    check_choice(shuffle, (*SHUFFLES, None), option="shuffle", action=action)


def _check_text(value: object, *, option: str, action: str) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{action}: expected {option} as text, got {show_value(value)}")


def _check_integers(
    values: EpochOptions | EpochState,
    ranges: tuple[tuple[str, int, int | None], ...],
    *,
    action: str,
) -> None:
    """Check integer fields of a frozen dataclass and make numpy's integers plain ones.

    Args:
        values: options or state, in its ``__post_init__``.
        ranges: name, least and greatest value of each field; None for no greatest.
        action: action that error messages name.

    Raises:
        UsageError: a field is no integer, or out of range.
    """
    for option, low, high in ranges:
        number = check_integer(getattr(values, option), low, high, option=option, action=action)
        object.__setattr__(values, option, number)
