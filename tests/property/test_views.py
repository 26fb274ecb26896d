"""Mixes of random datasets: exact shares, one order for all ranks and workers, resumed anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.units import KIB, MIB

SIZES = (1, 7, 190, 1200)
BATCHES = 1000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dlfs.Dataset]]:
    """Return a dataset of each size, each on a volume of its own."""
    volumes = []
    for size in SIZES:
        path = tmp_path_factory.mktemp("views") / "volume.img"
        dlfs.format_volume(path, size_bytes=4 * MIB, chunk_bytes=16 * KIB)
        volumes.append(dlfs.open(path, memory_bytes=MIB))
        with volumes[-1].writer("ds") as writer:
            for index in range(size):
                writer.add(b"%04d" % index, b"%d of %d" % (index, size))
    yield [volume["ds"] for volume in volumes]
    for volume in volumes:
        volume.close()


@st.composite
def mixes(draw: st.DrawFn) -> list[int | float | None]:
    """Return a weight for each dataset, or None for one that is left out; two have one or more."""
    weight = st.none() | st.integers(1, 20) | st.floats(0.001, 1)
    weights = draw(st.lists(weight, min_size=len(SIZES), max_size=len(SIZES)))
    if sum(value is not None for value in weights) < 2:
        weights[:2] = [1, 2.5]
    return weights


def mixed(
    datasets: list[dlfs.Dataset], weights: list[int | float | None], samples: int
) -> dlfs.DatasetView:
    chosen = {d: w for d, w in zip(datasets, weights, strict=True) if w is not None}
    return dlfs.mix(chosen, seed=len(chosen), samples=samples)


def order_of(view: dlfs.DatasetView, seed: int, epoch: int) -> list[int]:
    options = dlfs.dataset.EpochOptions(seed=seed, epoch=epoch)
    return view.order_epoch(options).indices().tolist()


@settings(max_examples=20)
@given(weights=mixes(), batch_size=st.integers(1, 9), epoch=st.integers(0, 3))
def test_every_1000_batches_have_their_shares(datasets, weights, batch_size, epoch) -> None:
    samples = 2 * BATCHES * batch_size + 137
    view = mixed(datasets, weights, samples)
    shares = np.array([value for value in weights if value is not None], float)
    shares /= shares.sum()
    starts = view.sources.starts.astype(np.int64)
    owners = np.searchsorted(starts, order_of(view, 3, epoch), side="right") - 1
    for first in range(0, 2 * BATCHES * batch_size, BATCHES * batch_size):
        part = Counter(owners[first : first + BATCHES * batch_size].tolist())
        for source, share in enumerate(shares):
            assert abs(part[source] - share * BATCHES * batch_size) <= len(shares)


@settings(max_examples=20)
@given(
    weights=mixes(),
    world=st.sampled_from([1, 2, 3, 8]),
    workers=st.integers(1, 3),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
    share=st.floats(0, 1),
    other_world=st.sampled_from([1, 2, 3, 8]),
)
def test_one_order_for_all_and_resumed_anywhere(
    datasets, weights, world, workers, batch_size, seed, epoch, share, other_world
) -> None:
    view = mixed(datasets, weights, 700)
    whole = order_of(view, seed, epoch)
    taken: dict[int, list[int]] = {}
    for rank in range(world):
        for worker in range(workers):
            batches = view.batches(
                batch_size,
                seed=seed,
                epoch=epoch,
                rank=rank,
                world_size=world,
                worker=worker,
                workers=workers,
            )
            for number, batch in enumerate(batches):
                first = (number * workers + worker) * batch_size * world + rank
                taken |= zip(range(first, len(whole), world), batch.indices.tolist(), strict=False)
                check(view, batch)
    assert [taken[position] for position in range(len(whole))] == whole
    epoch_before = view.batches(batch_size, seed=seed, epoch=epoch)
    before = [next(epoch_before) for _ in range(int(share * len(epoch_before)))]
    position = sum(map(len, before))
    state = json.loads(json.dumps(epoch_before.state()))
    ranks = [
        view.batches(5, rank=rank, world_size=other_world).resume(state)
        for rank in range(other_world)
    ]
    after = [
        list(chain.from_iterable(batch.indices.tolist() for batch in batches)) for batches in ranks
    ]
    assert after == [whole[position + rank :: other_world] for rank in range(other_world)]


def check(view: dlfs.DatasetView, batch: dlfs.Batch) -> None:
    for part in view.sources.split(batch.indices):
        size = view.sources.sizes[part.source]
        for place, index in zip(part.places.tolist(), part.indices.tolist(), strict=True):
            assert bytes(batch[place]) == b"%d of %d" % (index, size)
