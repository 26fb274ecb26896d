"""Iterations of worker processes: which epoch each is, and what Ctrl-C leaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dlfs
from dlfs.errors import UsageError
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference, take_all

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data._utils import worker as worker_module  # noqa: E402
from torch.utils.data._utils.worker import WorkerInfo  # noqa: E402

from dlfs.adapters.torch import Loader  # noqa: E402
from dlfs.adapters.torch import cursor as cursor_module  # noqa: E402
from dlfs.adapters.torch.cursor import Cursor  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


# ---- which epoch an iteration is -----------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_every_iteration_of_a_dataloader_is_the_next_epoch(samples, persistent):
    loader = Loader(samples, 10, seed=5)
    outer = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert order(outer) == reference(samples, seed=5, epoch=0)
    batches = iter(outer)
    given = [next(batches) for _ in range(8)]  # left early
    assert order(given) == reference(samples, seed=5, epoch=1)[:80]
    assert loader.epoch == 2
    del batches
    assert order(outer) == reference(samples, seed=5, epoch=2)
    loader.load_state_dict(given[-1].state)
    assert order(outer) == reference(samples, seed=5, epoch=1)[80:]
    assert order(outer) == reference(samples, seed=5, epoch=2)
    loader.load_state_dict({**given[-1].state, "seed": 9, "shuffle": None})
    assert order(outer) == reference(samples, shuffle=None)[80:]
    loader.set_epoch(2)  # it stands there
    loader.set_epoch(4)
    assert order(outer) == reference(samples, shuffle=None)
    assert loader.epoch == 5


def test_every_iteration_of_workers_that_take_a_pickle_is_the_next_epoch(samples):
    loader = Loader(samples, 10, seed=5)
    loader.load_state_dict({**loader.state_dict(), "position": 100})
    outer = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context=PROCESSES)
    assert order(outer) == reference(samples, seed=5)[100:]
    assert order(outer) == reference(samples, seed=5, epoch=1)


def test_the_state_is_not_known_where_others_give_the_batches(samples):
    loader = Loader(samples, 10, seed=5)
    outer = DataLoader(loader, batch_size=None, num_workers=2)
    assert loader.state_dict()["epoch"] == 0
    batches = iter(outer)
    batch = next(batches)
    with pytest.raises(UsageError, match=r"save the last batch's batch\.state, or use torchdata"):
        loader.state_dict()
    loader.load_state_dict(batch.state)
    assert loader.state_dict() == batch.state
    # Here it gives the batches itself, and goes on behind what workers were to give.
    assert order([batch, *loader]) == reference(samples, seed=5)
    assert order(outer) == reference(samples, seed=5, epoch=1)
    assert order(loader) == reference(samples, seed=5, epoch=2)
    assert loader.state_dict()["epoch"] == 3


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("options", [{}, {"order": range(100)}, {"shuffle": None}])
def test_batches_that_were_looked_at_are_given_by_workers_too(samples, options, persistent):
    loader = Loader(samples, 10, **options)
    outer = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in range(3):
        begin = loader.epoch, loader.position
        assert begin == (epoch, 0)
        first = next(iter(loader))  # workers that persist see it as well as new ones
        assert loader.position == 10
        assert order(outer) == reference(samples, epoch=epoch, **options)
        assert order([first]) == reference(samples, epoch=epoch, **options)[:10]
    loader.load_state_dict({**first.state, "position": 20})
    assert order(outer) == reference(samples, epoch=2, **options)[20:]


def test_epochs_go_on_where_the_generator_is_seeded_anew(samples):
    loader = Loader(samples, 10, seed=5)
    outer = DataLoader(loader, batch_size=None, num_workers=2)
    for epoch in range(3):
        torch.manual_seed(0)  # so DataLoader draws the same base seed
        assert order(outer) == reference(samples, seed=5, epoch=epoch)


def test_iterations_side_by_side_are_epochs_of_their_own(samples):
    loader = Loader(samples, 10, seed=5)
    one, other = (DataLoader(loader, batch_size=None, num_workers=2) for _ in range(2))
    pairs = list(zip(one, other, strict=True))
    found = [order(batch for batch, _ in pairs), order(batch for _, batch in pairs)]
    assert [sorted(indices) for indices in found] == [list(range(COUNT))] * 2
    for indices in found:
        assert indices in [reference(samples, seed=5, epoch=epoch) for epoch in range(2)]


STATE = {
    "dataset": "d",
    "packing": "p",
    "shuffle": "chunk",
    "seed": (1 << 64) - 1,
    "epoch": 3,
    "window_chunks": 64,
    "position": 70,
    "version": 2,
}


def begin_iterations(cursor: Cursor, worker: int, workers: int, barrier, results) -> None:
    """Send the results of 100 iterations, each of which all workers begin at the same time."""
    worker_module._worker_info = WorkerInfo(id=worker, num_workers=workers, seed=123, dataset=None)
    found = []
    for iteration in range(100):
        barrier.wait(60)
        found.append(cursor.begin(123, worker, workers, iteration, None))
    results.put(found)


def test_workers_that_begin_at_once_begin_alike():
    cursor = Cursor(STATE)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.SimpleQueue()
    workers = [
        context.Process(target=begin_iterations, args=(cursor, number, 4, barrier, results))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    expected = [STATE] + [{**STATE, "epoch": 3 + i, "position": 0} for i in range(1, 100)]
    assert found == [expected] * 4
    assert cursor.get()["epoch"] == 103


def test_records_take_all_slots():
    cursor = Cursor(STATE)
    for seed in range(2000):
        cursor.begin(seed, 0, 1, 1, None)
    records = cursor._words[cursor_module._RECORDS_AT :].reshape(cursor_module.RECORDS, -1)
    assert (records[:, 0] != 0).all()  # each has a tag


def test_a_cursor_that_is_set_while_workers_begin(monkeypatch):
    process = SimpleNamespace(_identity=(7,))
    monkeypatch.setattr(cursor_module.multiprocessing, "current_process", lambda: process)
    cursor = Cursor(STATE)
    first = cursor.begin(1, 0, 2, 1, None)
    later = {**STATE, "epoch": 8, "shuffle": None, "position": 0}
    cursor.set(later)
    assert cursor.begin(1, 0, 2, 1, None) == first == STATE  # one that was late
    assert (cursor.get(), cursor.was_begun) == (later, False)
    copied = pickle.loads(pickle.dumps(cursor))
    assert cursor.begin(2, 0, 2, 1, None) == later
    assert (copied.get(), copied.was_begun) == (later, False)
    loaded = {**STATE, "epoch": 5}
    assert cursor.begin(3, 0, 2, 1, loaded) == loaded  # one whose state was loaded in the worker
    assert cursor.get()["epoch"] == 6


def left_behind(others: list[Any]) -> list[Any]:
    """Return the child processes besides others; PyTorch waits for an end for 5 s, then kills."""
    made = [one for one in multiprocessing.active_children() if one not in others]
    for one in made:
        one.join(60)
    return [one for one in made if one.is_alive()]


# ---- workers that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("go_on", [False, True])
def test_the_next_iteration_has_new_workers_where_one_was_killed(samples, go_on):
    others = multiprocessing.active_children()  # workers of earlier tests that end late
    loader = Loader(samples, 10, seed=3, num_workers=2)
    batches = iter(loader)
    given = [next(batches) for _ in range(5)]
    first, second = (one for one in multiprocessing.active_children() if one not in others)
    with suppress(RuntimeError):  # PyTorch's handler of SIGCHLD may raise here
        first.kill()
        first.join()
    first.join()
    if go_on:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            take_all(batches, given)
    del batches
    assert order([*given, *loader]) == reference(samples, seed=3)
    assert not second.is_alive()
    loader.close()
    assert not left_behind(others)


# ---- Ctrl-C --------------------------------------------------------------------------------------


class Transform:
    """A transform that interrupts at its second pickling, or lets itself be interrupted."""

    pickled = 0

    def __init__(self, folder: Path, when: str) -> None:
        self.folder, self.when, self.seen = folder, when, 0

    def __getstate__(self) -> dict[str, Any]:
        Transform.pickled += 1
        if self.when == "start" and Transform.pickled == 2:  # of two workers, one is starting
            os.killpg(0, signal.SIGINT)
        return vars(self)

    def __call__(self, sample: memoryview) -> int:
        self.seen += 1
        if self.when == "wait" and self.seen == 35:
            with suppress(FileExistsError):
                (self.folder / "blocked").touch(exist_ok=False)
                (self.folder / "at").open("w").close()  # tells that it is blocked
                (self.folder / "go").open().close()
        return len(sample)


def interrupt(folder: Path) -> None:
    (folder / "at").open().close()
    os.killpg(0, signal.SIGINT)
    (folder / "go").open("w").close()


def run_cells(volume: str, folder: Path, when: str, method: str, kind: str) -> None:
    """Iterate in three cells of a notebook, of which the first is interrupted."""
    os.setsid()  # Ctrl-C reaches all processes of it
    warnings.simplefilter("ignore")
    given: list[list[int]] = []
    processes: list[list[int | None]] = []

    def run_cell(batches: Any, *, interrupted: bool = False) -> None:
        for batch in batches:
            given.append(batch.indices.tolist())
            processes.append(sorted(one.pid for one in multiprocessing.active_children()))
            if interrupted and when == "body" and len(given) == 5:
                os.killpg(0, signal.SIGINT)

    workers = {"num_workers": 2, "multiprocessing_context": method}
    with dlfs.open(volume) as opened, opened["bytes"] as dataset:
        options = {"seed": 3, "transform": Transform(folder, when), "threads": 1}
        loader = Loader(dataset, 10, **options, **(workers if kind == "own" else {}))
        outer: Any = loader
        if kind != "own":
            lasting = kind == "persistent"
            outer = DataLoader(loader, batch_size=None, persistent_workers=lasting, **workers)
        if when == "wait":
            os.mkfifo(folder / "at")
            os.mkfifo(folder / "go")
            threading.Thread(target=interrupt, args=[folder]).start()
        with pytest.raises(KeyboardInterrupt) as caught:  # keeps the traceback, as a notebook does
            run_cell(outer, interrupted=True)
        cells = [0, len(given)]
        for _ in range(2):
            run_cell(outer)
            cells.append(len(given))
        loader.close()
    del outer, caught
    assert not left_behind([])
    found = {"given": given, "cells": cells, "processes": processes}
    (folder / "found").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize(
    ("when", "method", "kind"),
    [
        ("body", "fork", "own"),
        ("wait", "fork", "own"),
        ("start", "spawn", "own"),
        ("body", "fork", "each"),
        ("body", "fork", "persistent"),
    ],
)
def test_an_interrupted_iteration_does_not_harm_the_next(
    torch_volume, samples, tmp_path, when, method, kind
):
    arguments = (str(torch_volume), tmp_path, when, method, kind)
    process = PROCESSES.Process(target=run_cells, args=arguments)
    process.start()
    process.join(120)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 0
    found = pickle.loads((tmp_path / "found").read_bytes())
    begins = found["cells"]
    cells = [
        [index for batch in found["given"][begin:end] for index in batch]
        for begin, end in pairwise(begins)
    ]
    epochs = [reference(samples, seed=3, epoch=epoch) for epoch in range(3)]
    if kind == "own":  # it goes on where it stood
        assert cells[0] + cells[1] == epochs[0]
        assert cells[2] == epochs[1]
    else:
        assert cells == [epochs[0][:50], epochs[1], epochs[2]]
    assert {len(one) for one in found["processes"]} == {2}
    if when == "body" and kind != "each":  # the same workers, with what they have in memory
        assert len({tuple(one) for one in found["processes"]}) == 1
