"""Epochs of TensorFlow's adapter in their order, without TensorFlow; see also ``cases_tf``."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dlfs.adapters.tf import _epoch_starter
from dlfs.epoch.options import EpochOptions
from dlfs.errors import UsageError

OPTIONS = EpochOptions(batch_size=64, seed=3, epoch=5)


def number_of(epoch) -> int:
    with epoch:
        return epoch.state()["epoch"]


def test_epochs_follow_each_other(numbers):
    start = _epoch_starter(numbers, OPTIONS, None)
    assert [number_of(start()) for _ in range(3)] == [5, 6, 7]


def test_a_state_gives_the_rest_of_its_epoch_first(numbers):
    with numbers.start_epoch(OPTIONS) as epoch:
        taken = next(epoch).indices.tolist()
        state = epoch.state()
    start = _epoch_starter(numbers, replace(OPTIONS, epoch=0), state)
    state.clear()  # the caller's own
    with start() as rest:
        assert len(taken) + sum(len(batch) for batch in rest) == len(numbers)
        ended = rest.state()
    assert [number_of(start()) for _ in range(2)] == [6, 7]
    assert number_of(_epoch_starter(numbers, OPTIONS, ended)()) == 6


def test_an_epoch_that_fails_to_start_does_not_end_the_others(numbers, monkeypatch):
    start = _epoch_starter(numbers, OPTIONS, None)
    with monkeypatch.context() as failing:
        failing.setattr(type(numbers), "start_epoch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start()
    assert number_of(start()) == 6


def test_iterators_of_several_threads_start_epochs(numbers):
    start = _epoch_starter(numbers, OPTIONS, None)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(number_of(start()) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(5, 85))


def test_a_state_that_is_none_is_refused_at_once(numbers):
    with pytest.raises(UsageError, match="expected an epoch's state"):
        _epoch_starter(numbers, OPTIONS, {"position": 3})
