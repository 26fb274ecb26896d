"""PyTorch's adapter on a dataset of a service: what it gives is what a dataset of devices gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import dlfs
from tests.service.serving import Service
from tests.support.waiting import wait_for

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import ColumnLabels, Loader, SampleDataset  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    # DataLoader forks, and wants as many processors as workers.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def service(serve: Callable[..., Service], volume: str) -> Iterator[Service]:
    """Run a service of the volume; in the end it must have no clients and stop without errors."""
    started = serve(volume)
    yield started
    wait_for(lambda: started.clients() == [], "the service to forget its clients")
    started.stop()


@pytest.fixture
def connected(service: Service) -> Iterator[dlfs.Dataset]:
    """The dataset, through the service."""
    with dlfs.connect(service.uri) as opened, opened.dataset("d") as dataset:
        yield dataset


def order(batches: Iterator[dlfs.Batch]) -> list[int]:
    return [int(index) for batch in batches for index in batch.indices]


def local_order(volume: str, **arguments: object) -> list[int]:
    """The order of an epoch that reads from the devices."""
    with dlfs.open(volume) as opened, opened.dataset("d") as dataset:
        return order(dataset.batches(16, **arguments))


@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (1, PROCESSES)])
def test_map_style_in_workers(connected, samples, workers, method):
    # Here, too, before the workers start: they have their own channels all the same.
    assert connected[0] == next(iter(samples.values()))
    loader = DataLoader(
        SampleDataset(connected, labels=ColumnLabels(connected, "number")),
        batch_size=20,
        num_workers=workers,
        multiprocessing_context=method,
        collate_fn=list,
    )
    got = [item for batch in loader for item in batch]
    assert [sample.numpy().tobytes() for sample, _ in got] == list(samples.values())
    assert [label for _, label in got] == list(range(len(samples)))


@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (1, PROCESSES)])
def test_epochs_in_workers_of_the_loader(connected, service, volume, samples, workers, method):
    wanted = list(samples.values())
    loader = Loader(connected, 32, seed=3, num_workers=workers, multiprocessing_context=method)
    for epoch in range(2):
        given = []
        for batch in loader:
            given += batch.indices.tolist()
            for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
                assert sample.numpy().tobytes() == wanted[index]
        assert given == local_order(volume, seed=3, epoch=epoch)
    loader.close()
    (dataset,) = service.snapshot()["datasets"]
    assert dataset["reader"]["samples"] == 2 * len(samples)  # each once an epoch, all by it


@pytest.mark.parametrize(
    "options",
    [{"shuffle": "chunk"}, {"where": range(5, 300, 3)}, {"weights": "number", "draws": 300}],
)
def test_resumed_with_another_number_of_workers(connected, volume, options):
    given: list[int] = []
    state = None
    for workers, taken in ((2, 2), (0, 1), (3, None)):
        loader = Loader(connected, 16, seed=9, num_workers=workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader, 1):
            given += batch.indices.tolist()
            if number == taken:
                break
        state = loader.state_dict()
        loader.close()
    assert given == local_order(volume, seed=9, **options)
    assert (state["epoch"], state["position"]) == (1, 0)


def test_one_epoch_goes_on_through_the_service_from_the_devices(connected, volume):
    with dlfs.open(volume) as opened, opened.dataset("d") as local:
        loader = Loader(local, 16, seed=2)
        given = order(batch for _, batch in zip(range(4), loader, strict=False))
        state = loader.state_dict()
        loader.close()
    resumed = Loader(connected, 32, num_workers=2)
    resumed.load_state_dict(state)
    for batch in resumed:
        given += batch.indices.tolist()
    resumed.close()
    assert given == local_order(volume, seed=2)
