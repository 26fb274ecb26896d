"""Worker processes: one order however many there are, in DataLoader and in torchdata's."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from dlfs.errors import TransformError, UsageError
from tests.unit.adapters.torch.conftest import COUNT
from tests.unit.adapters.torch.orders import order, reference, take_all

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

import dlfs  # noqa: E402
from dlfs.adapters.torch import FolderLabels, Loader, SampleDataset  # noqa: E402
from dlfs.adapters.torch import loader as loader_module  # noqa: E402
from dlfs.adapters.torch.states import next_epoch  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # DataLoader forks, and wants as many processors as workers.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata 0.11 calls what torch 2.13 has given up.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def sum_bytes(sample: memoryview) -> torch.Tensor:
    assert get_worker_info() is not None
    return torch.tensor(sum(sample))


def refuse_some(sample: memoryview) -> int:
    if sum(sample) % 5 == 0:
        raise ValueError(f"{len(sample)} bytes")
    return len(sample)


# ---- processes of the loader's own ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_epochs_of_persistent_workers(samples, method):
    loader = Loader(
        samples,
        10,
        seed=3,
        num_workers=3 if method == "fork" else 1,
        multiprocessing_context=method,
        transform=sum_bytes,
        labels=FolderLabels(samples),
    )
    for epoch in range(2):
        batches = list(loader)
        assert order(batches) == reference(samples, seed=3, epoch=epoch)
        for batch in batches:
            assert batch.samples.tolist() == [sum(samples[i]) for i in batch.indices.tolist()]
            assert batch.labels is not None
    given = []
    for batch in loader:
        given.append(batch)
        if len(given) == 4:
            break
    assert (loader.epoch, loader.position) == (2, 40)
    state = loader.state_dict()
    # The same workers, which have read further, begin again where it stands.
    assert order([*given, *loader]) == reference(samples, seed=3, epoch=2)
    if method == "fork":
        loader.load_state_dict(
            {**state, "seed": 9}
        )  # with new workers, since running ones cannot be notified
        assert order(loader) == reference(samples, seed=9, epoch=2)[40:]
    loader.close()


def test_bytes_come_back_from_workers(samples):
    for collate in ("list", "jagged"):
        loader = Loader(samples, 16, num_workers=2, collate=collate)
        for batch in loader:
            got = [sample.numpy().tobytes() for sample in batch.samples]
            assert got == [samples[index] for index in batch.indices.tolist()]
        loader.close()


def test_an_error_in_a_worker_comes_in_its_turn(samples):
    expected = reference(samples)
    bad = next(i for i, index in enumerate(expected) if sum(samples[index]) % 5 == 0)
    loader = Loader(samples, 2, num_workers=2, transform=refuse_some)
    given = []
    with pytest.raises(TransformError, match=f"transform sample {expected[bad]} .*ValueError"):
        take_all(loader, given)
    assert order(given) == expected[: bad // 2 * 2]
    assert loader.position == len(given) * 2
    with pytest.raises(TransformError):
        list(loader)


# ---- DataLoader ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_dataloader_of_the_callers(samples, workers):
    loader = Loader(samples, 10, seed=5)
    outer = DataLoader(loader, batch_size=None, num_workers=workers)
    assert len(outer) == 23
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        assert order(outer) == reference(samples, seed=5, epoch=epoch)
    loader.set_epoch(4)
    given = []
    for batch in outer:
        given.append(batch)
        if len(given) == 5:
            break
    loader.load_state_dict(given[-1].state)
    rest = list(DataLoader(loader, batch_size=None, num_workers=2))
    assert order([*given, *rest]) == reference(samples, seed=5, epoch=4)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, PROCESSES)])
def test_map_style(samples, workers, method):
    dataset = SampleDataset(samples, labels=FolderLabels(samples))
    assert len(dataset) == COUNT
    outer = DataLoader(
        dataset,
        batch_size=20,
        num_workers=workers,
        multiprocessing_context=method,
        collate_fn=list,
    )
    got = [item for batch in outer for item in batch]
    assert [sample.numpy().tobytes() for sample, _ in got] == [samples[i] for i in range(COUNT)]
    assert [label for _, label in got] == FolderLabels(samples)(np.arange(COUNT)).tolist()


# ---- torchdata -----------------------------------------------------------------------------------


def stateful(loader, workers: int, **options):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(loader, batch_size=None, num_workers=workers, **options)


TAKEN = [(0, 1), (1, 4), (7, 1), (7, 4), (23, 1)]


@pytest.mark.parametrize(
    ("before", "after", "taken", "every"),
    [
        *((0, 0, *taken) for taken in TAKEN),
        *((2, 2, *taken) for taken in TAKEN),
        (3, 1, 7, 4),
        (0, 2, 1, 4),
        (2, 0, 7, 1),
        (2, 0, 23, 1),
    ],
)
def test_a_state_of_torchdata_at_any_number_of_workers(samples, before, after, taken, every):
    loader = Loader(samples, 10, seed=5)
    loader.set_epoch(1)
    outer = stateful(loader, before, snapshot_every_n_steps=every)
    batches = iter(outer)
    given = [next(batches) for _ in range(taken)]
    state = pickle.loads(pickle.dumps(outer.state_dict()))
    del batches, outer
    loader = Loader(samples, 10)
    if before == after:
        loader.set_epoch(1)
        outer = stateful(loader, after, snapshot_every_n_steps=every)
        outer.load_state_dict(state)  # torchdata's own way, which wants as many workers
    else:
        loader.load_state_dict(state)
        expected = (2, 0) if taken == 23 else (1, taken * 10)
        assert (loader.epoch, loader.position) == expected
        outer = stateful(loader, after)
    if taken < 23:
        assert order([*given, *outer]) == reference(samples, seed=5, epoch=1)
    elif before == after == 2:
        assert order(outer) == []  # as torchdata does over any dataset
    assert order(outer) == reference(samples, seed=5, epoch=2)
    assert order(outer) == reference(samples, seed=5, epoch=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_torchdata_has_finished(samples, workers):
    loader = Loader(samples, 10, seed=5)
    outer = stateful(loader, workers)
    assert order(outer) == reference(samples, seed=5)
    state = outer.state_dict()
    loader = Loader(samples, 10)
    loader.load_state_dict(state)
    assert order(loader) == reference(samples, seed=5, epoch=1)
    again = stateful(Loader(samples, 10, seed=5), workers)
    again.load_state_dict(state)
    for epoch in (1, 2):
        assert order(again) == reference(samples, seed=5, epoch=epoch)


def test_a_worker_refuses_the_state_of_another_division(samples):
    loader = Loader(samples, 10, seed=5)
    outer = stateful(loader, 2)
    batches = iter(outer)
    next(batches)
    state = outer.state_dict()
    del batches, outer
    outer = stateful(Loader(samples, 5), 2)
    outer.load_state_dict(state)
    with pytest.raises(UsageError, match=r"Loader\.load_state_dict before workers start"):
        list(outer)


# ---- every world, number of workers, and cut -----------------------------------------------------


def give(
    loaders: list[list[Loader]], monkeypatch, stop: int | None, state: dict
) -> tuple[list[int], dict]:
    """Take from all ranks as DataLoader would: each worker in turn, for `stop` steps at most.

    Returns the order of the samples in it, and the state behind it.
    """
    world = len(loaders)
    iterations = []
    for workers in loaders:
        row = []
        for number, loader in enumerate(workers):
            info = SimpleNamespace(id=number, num_workers=len(workers), seed=number)
            with monkeypatch.context() as patch:
                patch.setattr(loader_module, "get_worker_info", lambda info=info: info)
                row.append(iter(loader))
        iterations.append(row)
    taken: list[int] = []
    step = 0
    while stop is None or step < stop:
        batches = [next(row[step % len(row)], None) for row in iterations]
        given = [batch for batch in batches if batch is not None]
        if not given:
            break
        state = given[0].state  # the first rank has the most batches; others may be through
        assert all(batch.state in (state, next_epoch(state)) for batch in given)
        block = [-1] * sum(map(len, given))
        for rank, batch in enumerate(given):
            block[rank::world] = batch.indices.tolist()
        taken += block
        step += 1
    for row in iterations:
        for iteration in row:
            iteration.close()
    return taken, state


phases = st.lists(
    st.tuples(
        st.integers(1, 4),  # ranks
        st.integers(1, 3),  # workers of each
        st.integers(1, 40),  # samples of a rank's batch
        st.integers(0, 6),  # steps before it is killed
    ),
    max_size=4,
)


@settings(max_examples=25)
@given(phases=phases, shuffle=st.sampled_from(["global", "chunk", None]), seed=st.integers(0, 9))
def test_elastic_resume_gives_the_order_of_an_uninterrupted_run(
    torch_volume, phases, shuffle, seed
):
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        dlfs.open(str(torch_volume)) as volume,
        volume.dataset("arrays") as dataset,
    ):
        state = Loader(dataset, 1, shuffle=shuffle, seed=seed).state_dict()
        taken: list[int] = []
        for world, workers, batch_size, stop in [*phases, (2, 3, 16, None)]:
            if state["epoch"] > 0:
                break
            loaders = []
            for rank in range(world):
                loader = Loader(dataset, batch_size, rank=rank, world_size=world)
                loader.load_state_dict(state)
                row = [pickle.loads(pickle.dumps(loader)) for _ in range(workers)]
                for one in row:
                    one.dataset = dataset  # one reader is enough for all
                loaders.append(row)
            part, state = give(loaders, monkeypatch, stop, state)
            taken += part
        assert taken == reference(dataset, shuffle=shuffle, seed=seed)
        assert (state["epoch"], state["position"]) == (1, 0)
