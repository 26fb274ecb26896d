"""Mixes of random datasets: exact shares, one order for all ranks and workers, resumed anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.views import order as order_module

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
    options = dlfs.dataset.dataset.EpochOptions(seed=seed, epoch=epoch)
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


@settings(max_examples=40, print_blob=True)
@given(
    weights=mixes(),
    shuffle=st.sampled_from(["global", "chunk", None]),
    seed=st.integers(0, 2**64 - 1),
    first=st.sampled_from([0, 1, 1000, 10**9]),
    parts=st.booleans(),
)
def test_no_epoch_of_a_mix_has_a_sample_twice(
    datasets, weights, shuffle, seed, first, parts
) -> None:
    """What one epoch did not reach comes in the next ones, in another order each time."""
    chosen = {d: w for d, w in zip(datasets, weights, strict=True) if w is not None}
    if parts:  # chosen samples instead of whole datasets
        halves = {dlfs.split(d, 0.6, seed=3)[0]: w for d, w in chosen.items()}
        chosen = {view: w for view, w in halves.items() if len(view)} or chosen
    view = dlfs.mix(chosen, seed=3)
    taken = np.zeros(len(view), np.int64)
    sizes = np.array(view.sources.sizes)
    for epoch in range(first, first + 6):
        options = dlfs.dataset.dataset.EpochOptions(seed=seed, epoch=epoch, shuffle=shuffle)
        order = view.order_epoch(options).indices().astype(np.int64)
        assert len(np.unique(order)) == len(order) == view.epoch_samples
        taken += np.bincount(order, minlength=len(view))
        if shuffle is not None:
            starts = view.sources.starts.astype(np.int64)
            for source, size in enumerate(sizes.tolist()):
                part = taken[starts[source] : starts[source] + size]
                assert part.max() - part.min() <= 1  # round and round


@settings(max_examples=20, print_blob=True)
@given(weights=mixes(), samples=st.integers(1, 5000), seed=st.integers(0, 2**64 - 1))
def test_a_longer_epoch_takes_whole_passes(datasets, weights, samples, seed) -> None:
    view = mixed(datasets, weights, samples)
    for epoch in range(3):
        counts = np.bincount(order_of(view, seed, epoch), minlength=len(view))
        starts = view.sources.starts.astype(np.int64)
        for low, high in pairwise(starts.tolist()):
            assert counts[low:high].max() - counts[low:high].min() <= 1


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_the_rest_of_a_large_dataset_is_taken_in_runs(datasets, shuffle, monkeypatch) -> None:
    monkeypatch.setattr(order_module, "RUN_SAMPLES", 64)
    monkeypatch.setattr(order_module, "RUN_SAMPLES_CHUNK", 50)
    monkeypatch.setattr(order_module, "BLOCK_SAMPLES", 16)
    view = dlfs.mix({datasets[3]: 1, datasets[2]: 1}, seed=3)
    assert view.epoch_samples == 380
    orders, taken = [], np.zeros(len(view), np.int64)
    for epoch in range(13):
        options = dlfs.dataset.dataset.EpochOptions(seed=1, epoch=epoch, shuffle=shuffle)
        order = view.order_epoch(options)
        whole = order.indices()
        assert len(np.unique(whole)) == 380
        assert order.at(np.arange(5, 380, 7)).tolist() == whole[5::7].tolist()
        taken += np.bincount(whole.astype(np.int64), minlength=len(view))
        orders.append([one for one in whole.tolist() if one < 1200])
    assert sorted(set(taken[:1200].tolist())) == [2, 3]
    again = set(orders[0]) & set(orders[7])  # the circle has gone round once
    common = [[one for one in orders[at] if one in again] for at in (0, 7)]
    assert len(again) > 50
    assert common[0] != common[1]


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
