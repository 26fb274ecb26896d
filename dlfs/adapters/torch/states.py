"""States of loaders and samplers: where an epoch stands.

A state is what ``Epoch.state`` says: dataset, order, seed, epoch and position; the position counts
the samples that all ranks and workers together have been given. One that a worker process tells
carries ``dealt`` too: where that worker goes on if there are as many of them as before.

torchdata's ``StatefulDataLoader`` keeps the state of each worker within its own, and takes it back
at the same number of workers only. ``plain_state`` finds the position in it, which is good for any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlfs.errors import UsageError

State = dict[str, Any]

INDEX_ORDER = "index_order"
"""Key of a sampler's state in index order, which no other state has: a ``Loader``'s order of
``shuffle=None`` is that of the storage."""
_DEPTH_MAX = 16
"""Of nested dictionaries that are searched."""


def plain_state(state: State, total: int) -> State:
    """The state of the epoch as a whole, out of a loader's or of a ``StatefulDataLoader``'s.

    Args:
        state: of a ``Loader`` or sampler, in whatever process; or of a ``StatefulDataLoader`` over
            one.
        total: samples of the dataset.

    Raises:
        UsageError: there is no such state in it.
    """
    found = list(_search(state, 0))
    if not found:
        raise UsageError(f"resume an epoch: expected a loader's state, got {state!r:.200}")
    newest = max(found, key=lambda one: (one["epoch"], one["position"]))
    plain = {key: value for key, value in newest.items() if key != "dealt"}
    # Batches that were given since the workers were last asked (snapshot_every_n_steps).
    steps = state.get("_steps_since_snapshot", 0)
    if steps:
        plain["position"] = min(total, plain["position"] + steps * _step(newest))
    if state.get("_iterator_finished") and plain["position"] > 0:
        plain = next_epoch(plain)
    return plain


def next_epoch(state: State) -> State:
    """The beginning of the epoch behind a plain state's."""
    return {**state, "epoch": state["epoch"] + 1, "position": 0}


def _search(state: object, depth: int) -> Iterator[State]:
    if not isinstance(state, dict) or depth > _DEPTH_MAX:
        return
    if {"dataset", "epoch", "position"} <= state.keys():
        yield state
        return
    for value in state.values():
        yield from _search(value, depth + 1)


def _step(state: State) -> int:
    dealt = state.get("dealt")
    return int(dealt["step"]) if isinstance(dealt, dict) else 0
