"""States of loaders and samplers: the positions of epochs.

A state is the value of ``Epoch.state``: dataset, order, seed, epoch and position. The position is
the number of samples that all ranks and workers together have been given. The state of a worker
process also has ``dataloader``: where the worker continues if the number of workers is the same.

torchdata's ``StatefulDataLoader`` stores the state of each worker in its own, and takes it back at
the same number of workers only. ``plain_state`` finds the position in it, which is valid for any
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlfs.base.arguments import as_integer, check_integer
from dlfs.base.wording import show_value
from dlfs.epoch.options import EpochState
from dlfs.errors import UsageError

State = dict[str, Any]

INDEX_ORDER = "index_order"
"""Key in the state of a sampler in index order. A ``Loader`` with ``shuffle=None`` has storage
order instead, and no such key."""
DATALOADER = "dataloader"
"""Key in the state of a sampler or worker: where it continues."""
_DATALOADER_KEYS = ({"step"}, {"step", "worker", "workers", "next"})
_DEPTH_MAX = 16
"""Most levels of nested dictionaries that are searched."""


def plain_state(state: State, total: int | Callable[[State], int]) -> State:
    """Return the state of the whole epoch, from a loader's state or a ``StatefulDataLoader``'s.

    Args:
        state: state of a ``Loader`` or sampler in any process, or of a ``StatefulDataLoader`` over
            one.
        total: samples of the epoch, or a function that returns them for a plain state.

    Raises:
        UsageError: it contains no such state, or one with a value of another type.
    """
    found = [_check(one) for one in _search(state, 0)]
    if not found:
        raise UsageError(f"resume an epoch: expected a loader's state, got {state!r:.200}")
    newest = max(found, key=lambda one: (one["epoch"], one["position"]))
    plain = {key: value for key, value in newest.items() if key != "dataloader"}
    # Batches that were given since the workers were last asked (snapshot_every_n_steps).
    steps = check_integer(
        state.get("_steps_since_snapshot", 0),
        0,
        option="_steps_since_snapshot",
        action="resume an epoch",
    )
    if steps:
        most = total if isinstance(total, int) else total(plain)
        plain["position"] = min(most, plain["position"] + steps * _step(newest))
    if state.get("_iterator_finished") and plain["position"] > 0:
        plain = next_epoch(plain)
    return plain


def next_epoch(state: State) -> State:
    """Return the begin of the epoch after a plain state's."""
    return {**state, "epoch": state["epoch"] + 1, "position": 0}


def _search(state: object, depth: int) -> Iterator[State]:
    if not isinstance(state, dict) or depth > _DEPTH_MAX:
        return
    if {"dataset", "epoch", "position"} <= state.keys():
        yield state
        return
    for value in state.values():
        yield from _search(value, depth + 1)


def _check(state: State) -> State:
    """Return a state whose values have the right types.

    Raises:
        UsageError: one has not; the message names it.
    """
    EpochState.from_dict({key: state[key] for key in state if key not in (DATALOADER, INDEX_ORDER)})
    dataloader = state.get(DATALOADER, {"step": 0})
    keys = set(dataloader) if isinstance(dataloader, dict) else set()
    numbers = map(as_integer, dataloader.values()) if keys else ()
    integers = all(number is not None and number >= 0 for number in numbers)
    if keys not in _DATALOADER_KEYS or not integers:
        raise UsageError(
            "resume an epoch: expected dataloader as integers by the names step, or next, step, "
            f"worker and workers, got {show_value(dataloader)}"
        )
    return state


def _step(state: State) -> int:
    dataloader = state.get("dataloader")
    return int(dataloader["step"]) if isinstance(dataloader, dict) else 0
