"""Tests ``Loader`` over documents packed into sequences of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import TransformError, UsageError
from tests.unit.adapters.torch.orders import order

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlfs.adapters.torch import Loader, SampleContext, TensorBatch  # noqa: E402
from tests.support.torch_processes import PROCESSES  # noqa: E402

pytestmark = pytest.mark.torch

LENGTH = 50


@pytest.fixture(scope="module")
def tokens_volume(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("packed") / "volume.img")
    random = np.random.default_rng(3)
    dlfs.format_volume(path, size_bytes=8 * MIB)
    with dlfs.open(path) as volume:
        for name, types in (("plain", None), ("fields", {"ids": "<i4[?]", "title": "text"})):
            with volume.writer(name, fields=types) as writer:
                for index in range(120):
                    ids = np.append(index, random.integers(0, 60_000, random.integers(0, 90)))
                    sample = ids.astype("<u2").tobytes()
                    if types is not None:
                        sample = {"ids": ids.astype(np.int32), "title": "t"}
                    writer.add(f"{index:04}", sample)
    return path


@pytest.fixture
def plain(tokens_volume: str) -> Iterator[dlfs.Dataset]:
    with dlfs.open(tokens_volume) as volume, volume["plain"] as dataset:
        yield dataset


def expected(dataset, epoch: int, **options) -> np.ndarray:
    """Return the tokens of an epoch, ``int64[n, LENGTH]``."""
    found = dlfs.token_batches(dataset, LENGTH, epoch=epoch, **options)
    return np.concatenate([batch.tokens for batch in found]).astype(np.int64)


def tokens_of(batches: list[TensorBatch]) -> np.ndarray:
    """Return the tokens of batches, and check their form."""
    for batch in batches:
        assert batch["tokens"].dtype == torch.int64
        assert batch["tokens"].shape == batch["documents"].shape == (len(batch), LENGTH)
    return np.concatenate([batch["tokens"].numpy() for batch in batches])


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_those_of_token_batches(plain, workers) -> None:
    sequences = dlfs.TokenSequences(plain, LENGTH)
    loader = Loader(sequences, 4, seed=5, num_workers=workers)
    for epoch in range(3):
        found = list(loader)
        assert len(found) == -(-len(expected(plain, epoch, seed=5)) // 4)
        assert (tokens_of(found) == expected(plain, epoch, seed=5)).all()
    assert loader.epoch == 3
    loader.close()


def test_a_field_has_the_tokens_and_a_view_the_documents(tokens_volume) -> None:
    with dlfs.open(tokens_volume) as volume, volume["fields"] as dataset:
        view = dlfs.select(dataset, np.arange(0, 120, 3))
        loader = Loader(dlfs.TokenSequences(view, LENGTH, field="ids", separator=7), 4, seed=2)
        whole = expected(view, 0, seed=2, field="ids", separator=7)
        assert (tokens_of(list(loader)) == whole).all()


def test_epochs_of_other_lengths(plain) -> None:
    # Draws with replacement: every epoch has other documents, and so other tokens.
    options = {"weights": np.arange(120.0), "draws": 60, "seed": 1}
    loader = Loader(dlfs.TokenSequences(plain, LENGTH), 4, **options)
    counts = set()
    for epoch in range(5):
        whole = expected(plain, epoch, **options)
        assert len(loader) == -(-len(whole) // 4)
        found = list(loader)
        assert (tokens_of(found) == whole).all()
        counts.add(len(whole))
        again = Loader(dlfs.TokenSequences(plain, LENGTH), 4, **options)
        again.load_state_dict(json.loads(json.dumps(found[2].state)))
        assert (tokens_of(list(again)) == whole[12:]).all()
        assert again.epoch == epoch + 1
    assert len(counts) > 1


@pytest.mark.parametrize("uneven", ["pad", "drop", "leave"])
def test_ranks_and_a_resume_at_others(plain, uneven) -> None:
    def loaders(size: int, batch_size: int) -> list[Loader]:
        return [
            Loader(
                dlfs.TokenSequences(plain, LENGTH),
                batch_size,
                seed=5,
                uneven=uneven,
                rank=rank,
                world_size=size,
            )
            for rank in range(size)
        ]

    whole = expected(plain, 0, seed=5)
    parts = [iter(loader) for loader in loaders(2, 4)]
    seen: list[TensorBatch] = [next(part) for part in parts for _ in range(3)]
    state = seen[-1].state
    size = next(size for size in (3, 4, 5) if (len(whole) - 24) % size)  # a round is not full
    rest = loaders(size, 5)
    for loader in rest:
        loader.load_state_dict(state)
        seen += list(loader)
    numbers = sorted(order(seen))
    left = (len(whole) - 24) % size
    extra = range(size - left) if uneven == "pad" else []
    missing = left if uneven == "drop" else 0
    assert numbers == sorted([*range(len(whole) - missing), *extra])
    tokens = dict(zip(order(seen), tokens_of(seen), strict=True))
    assert all((tokens[number] == whole[number]).all() for number in tokens)


@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (1, PROCESSES)])
def test_workers_of_a_caller(plain, workers, method) -> None:
    loader = Loader(dlfs.TokenSequences(plain, LENGTH), 4, seed=5)
    given = DataLoader(loader, batch_size=None, num_workers=workers, multiprocessing_context=method)
    assert (tokens_of(list(given)) == expected(plain, 0, seed=5)).all()


def first_token(sample: dict[str, torch.Tensor], context: SampleContext) -> dict[str, object]:
    ids = sample["tokens"]
    return {"input_ids": ids, "labels": ids, "at": context.position, "drawn": context.seed >> 2}


def test_a_transform_makes_what_a_model_takes(plain) -> None:
    arguments = {"seed": 5, "transform": first_token, "with_context": True}
    loader = Loader(dlfs.TokenSequences(plain, LENGTH), 4, **arguments)
    found = list(loader)
    assert list(found[0]) == ["input_ids", "labels", "at", "drawn"]
    ids = np.concatenate([batch["input_ids"].numpy() for batch in found])
    assert (ids == expected(plain, 0, seed=5)).all()
    assert [at for batch in found for at in batch["at"].tolist()] == list(range(len(ids)))
    assert found[0]["drawn"].tolist() != next(iter(loader))["drawn"].tolist()


def test_refusals(plain, tmp_path: Path) -> None:
    sequences = dlfs.TokenSequences(plain, LENGTH)
    for name, value in (("labels", len), ("dtype", np.int32), ("arrays", True)):
        with pytest.raises(UsageError, match=f"of packed tokens: expected no {name}"):
            Loader(sequences, 4, **{name: value})
    with pytest.raises(UsageError, match="expected no on_error"):
        Loader(sequences, 4, on_error="skip")
    with pytest.raises(UsageError, match="expected no fields"):
        Loader(sequences, 4, fields=["tokens"])
    state = Loader(dlfs.TokenSequences(plain, LENGTH + 1), 4).state_dict()
    with pytest.raises(UsageError, match="of another version or dataset"):
        Loader(sequences, 4).load_state_dict(state)
    with pytest.raises(TransformError, match="transform sequence 0 of dataset 'plain, packed'"):
        next(iter(Loader(sequences, 4, shuffle=None, transform=lambda sample: 1 / 0)))
