"""The recipes of docs/frameworks.md for PyTorch's frameworks, and decoding by torchvision."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import suppress
from importlib import import_module

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from tests.support.documents import run_framework

torch = pytest.importorskip("torch")

from dlfs.adapters.torch import Loader  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # what other packages deprecate
]

COUNT, BATCH, EPOCHS = 90, 20, 3


def test_lightning(tmp_path):
    run_framework("Lightning", tmp_path)


def test_accelerate(tmp_path):
    run_framework("Accelerate", tmp_path)


def test_transformers(tmp_path):
    run_framework("Transformers", tmp_path)


def torchvision_io():
    """Return torchvision's decoders; a torchvision for another build of PyTorch has none."""
    try:
        return import_module("torchvision.io")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no torchvision for this PyTorch: {error}")


def test_torchvision(tmp_path):
    torchvision_io()
    run_framework("torchvision", tmp_path)


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory):
    """A dataset of JPEG images, and the pixels that torchvision decodes."""
    io = torchvision_io()
    path = str(tmp_path_factory.mktemp("jpeg") / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    random = torch.Generator().manual_seed(5)
    pixels = []
    with dlfs.open(path) as volume:
        with volume.writer("jpeg") as writer:
            for number in range(COUNT):
                noise = torch.randint(0, 256, (3, 24, 32), generator=random, dtype=torch.uint8)
                encoded = io.encode_jpeg(noise)
                pixels.append(io.decode_jpeg(encoded))
                writer.add(f"{number:02}.jpg", encoded.numpy().tobytes())
        with volume["jpeg"] as opened:
            yield opened, torch.stack(pixels)


def decode(sample):
    io = import_module("torchvision.io")
    assert threading.current_thread().name.startswith("dlfs-transform")
    return io.decode_jpeg(torch.frombuffer(bytearray(sample), dtype=torch.uint8))


def load(dataset, size=BATCH, **options):
    return Loader(dataset, size, seed=3, transform=decode, threads=3, **options)


def given(batches):
    return [index for batch in batches for index in batch.indices.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchvision_decodes_in_threads(jpeg, workers):
    dataset, pixels = jpeg
    expected = [dataset.sequence(seed=3, epoch=epoch).indices().tolist() for epoch in range(EPOCHS)]
    loader = load(dataset, num_workers=workers)
    for order in expected:
        batches = list(loader)
        assert given(batches) == order
        for batch in batches:
            assert torch.equal(batch.samples, pixels[batch.indices])
    loader.close()
    stopped, resumed = load(dataset, num_workers=workers), load(dataset, num_workers=workers)
    batches = iter(stopped)
    begun = given(next(batches) for _ in range(2))
    resumed.load_state_dict(stopped.state_dict())
    stopped.close()
    assert begun + given(resumed) == expected[0]
    resumed.close()


def test_a_worker_that_decodes_is_killed(jpeg):
    """The batches that were given are not given again, and none is lost."""
    dataset, _ = jpeg
    loader = load(dataset, 5, num_workers=2)  # more batches than workers prepare in advance
    batches = iter(loader)
    begun = [next(batches)]
    first, _ = multiprocessing.active_children()
    with suppress(RuntimeError):  # PyTorch's handler of SIGCHLD may raise here
        first.kill()
        first.join()
    first.join()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        begun.extend(batches)
    assert given([*begun, *loader]) == dataset.sequence(seed=3).indices().tolist()
    loader.close()


def test_workers_of_a_dataloader_share_a_stream(jpeg, tmp_path):
    """``datasets`` gives its shards to the workers, and torchdata resumes them in mid-epoch."""
    from dlfs.adapters.huggingface import stream

    dataset, _ = jpeg
    stateful = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    for epoch in range(EPOCHS):
        rows = stream(dataset, columns=["index"], shuffle="global", epoch=epoch, shards=8)
        found = [int(row["index"]) for row in stateful(rows, batch_size=None, num_workers=2)]
        assert sorted(found) == list(range(COUNT))

    def begin():
        rows = stream(dataset, columns=["index"], shuffle="global", shards=8)
        return stateful(rows, batch_size=None, num_workers=2)

    loader = begin()
    batches = iter(loader)
    begun = [int(next(batches)["index"]) for _ in range(31)]
    state = loader.state_dict()
    del batches
    loader = begin()
    loader.load_state_dict(state)
    rest = [int(row["index"]) for row in loader]
    assert np.array_equal(np.sort(begun + rest), np.arange(COUNT))
