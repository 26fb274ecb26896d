"""States of loaders and samplers with values of wrong types: errors that name them."""

from __future__ import annotations

import pytest

from dlfs.epoch.options import EpochState
from dlfs.errors import UsageError

pytest.importorskip("torch")

from dlfs.adapters.torch.states import plain_state

pytestmark = pytest.mark.torch

PLAIN = EpochState("a dataset", "its packing", "global", 1, 2, 64, 30).to_dict()
WORKER = {"worker": 0, "workers": 2, "step": 10, "next": 40}


def stateful(*workers: dict[str, object], **more: object) -> dict[str, object]:
    """Return the state of a ``StatefulDataLoader`` with these states of its workers."""
    snapshots = {str(number): {"dataset": state} for number, state in enumerate(workers)}
    return {"_snapshot": {"workers": snapshots}, "_steps_since_snapshot": 0, **more}


def test_the_newest_state_of_the_workers_is_found() -> None:
    newer = {**PLAIN, "position": 50, "dataloader": WORKER}
    assert plain_state(stateful({**PLAIN, "dataloader": WORKER}, newer), 100)["position"] == 50
    assert plain_state(stateful(newer, _steps_since_snapshot=3), 100)["position"] == 80
    assert plain_state({**PLAIN, "dataloader": {"step": 10}, "index_order": True}, 100) == {
        **PLAIN,
        "index_order": True,
    }


@pytest.mark.parametrize("value", [None, "3", 1.5, [], {}, True, -1])
@pytest.mark.parametrize("field", ["epoch", "position", "seed", "dataset", "version"])
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    if field == "dataset" and isinstance(value, str):
        return
    wrong = {**PLAIN, field: value}
    for state in (wrong, stateful(PLAIN, wrong), stateful({**wrong, "dataloader": WORKER}, PLAIN)):
        with pytest.raises(UsageError, match=f"resume an epoch: expected .*{field}.*got"):
            plain_state(state, 100)


@pytest.mark.parametrize(
    "dataloader",
    [
        None,
        3,
        [],
        {},
        {"step": "1"},
        {"step": -1},
        {"worker": 1},
        {**WORKER, "next": None},
        {**WORKER, "more": 1},
        {"step": True},
    ],
)
def test_a_wrong_share_of_a_worker_is_named(dataloader: object) -> None:
    with pytest.raises(UsageError, match=r"resume an epoch: expected dataloader as .*got"):
        plain_state({**PLAIN, "dataloader": dataloader}, 100)


def test_a_wrong_count_of_steps_is_named() -> None:
    for steps in ("1", None, -1, 1.5):
        with pytest.raises(UsageError, match="expected _steps_since_snapshot as an integer"):
            plain_state(stateful(PLAIN, _steps_since_snapshot=steps), 100)


@pytest.mark.parametrize("state", [None, [], 3, {}, {"a": {"b": PLAIN["epoch"]}}])
def test_what_has_no_state_is_none(state: object) -> None:
    with pytest.raises(UsageError, match="expected a loader's state"):
        plain_state(state, 100)  # type: ignore[arg-type]
