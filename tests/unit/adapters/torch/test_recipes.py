"""The recipes of docs/frameworks.md for PyTorch's frameworks."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from tests.support.documents import run_framework
from tests.unit.adapters.torch.conftest import COUNT

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # what other packages deprecate
]


def test_lightning(tmp_path):
    run_framework("Lightning", tmp_path)


def test_accelerate(tmp_path):
    run_framework("Accelerate", tmp_path)


def test_transformers(tmp_path):
    run_framework("Transformers", tmp_path)


def test_torchvision(tmp_path):
    try:  # one for another build of PyTorch has no decoders
        import_module("torchvision.io")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no torchvision for this PyTorch: {error}")
    run_framework("torchvision", tmp_path)


def test_workers_of_a_dataloader_share_a_stream(arrays):
    """``datasets`` gives its shards to the workers, and torchdata resumes them in mid-epoch."""
    from dlfs.adapters.huggingface import stream

    stateful = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    for epoch in range(2):
        rows = stream(arrays, columns=["index"], shuffle="global", epoch=epoch, shards=8)
        found = [int(row["index"]) for row in stateful(rows, batch_size=None, num_workers=2)]
        assert sorted(found) == list(range(COUNT))

    def begin():
        rows = stream(arrays, columns=["index"], shuffle="global", shards=8)
        return stateful(rows, batch_size=None, num_workers=2)

    loader = begin()
    batches = iter(loader)
    begun = [int(next(batches)["index"]) for _ in range(101)]
    state = loader.state_dict()
    del batches
    loader = begin()
    loader.load_state_dict(state)
    rest = [int(row["index"]) for row in loader]
    assert np.array_equal(np.sort(begun + rest), np.arange(COUNT))
