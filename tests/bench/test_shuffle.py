"""The measures of shuffles against orders whose measures are known; and a tiny run of it all."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest

from bench.shuffle import cost, measures, report, sources, training
from bench.shuffle.__main__ import TINY, Size, find, main
from bench.shuffle.orders import Buffered, Order, Shuffled, Stored
from dlfs.epoch.options import WINDOW_CHUNKS

IDENTITY = np.arange(240)
PER_CHUNK = 8


@pytest.fixture(scope="module")
def stored() -> Stored:
    return Stored.lay(60 * 64, 64)


def quality(epoch: np.ndarray, other: np.ndarray) -> measures.Quality:
    return measures.measure(epoch, other, per_chunk=PER_CHUNK, batch=8, classes=10)


def correlations(found: measures.Quality) -> tuple[float, ...]:
    return found.spearman, found.kendall, found.epochs_spearman


def test_storage_order_is_the_worst_in_every_respect() -> None:
    found = quality(IDENTITY, IDENTITY)

    assert correlations(found) == pytest.approx((1, 1, 1))
    assert found.neighbour_distance == pytest.approx(1 / 71)  # (1 - sqrt(1/2)) of 240
    assert found.pairs_of_chunk == pytest.approx(239 / 7)  # all, where chance has 7 of 239
    assert found.pairs_again == pytest.approx(239 / 7)
    assert found.class_bits == 0
    # Ten classes, eight of one class in a batch: 8 * 8 - 8 * 8 / 10 against a hypergeometric one.
    assert found.class_variance == pytest.approx((64 - 6.4) / (7.2 * 232 / 239))


def test_reversed_storage_order_has_the_opposite_rank_correlation() -> None:
    found = quality(IDENTITY[::-1].copy(), IDENTITY)
    assert correlations(found) == pytest.approx((-1, -1, -1))
    assert found.pairs_again == pytest.approx(239 / 7)


def test_batches_that_take_one_of_each_chunk_have_no_pair_of_one() -> None:
    dealt = IDENTITY.reshape(30, 8).T.ravel()
    found = quality(dealt, IDENTITY)
    assert found.pairs_of_chunk == 0
    assert found.pairs_again == 0


def test_chances_are_those_of_all_orders_of_a_few_samples() -> None:
    orders = [np.array(order) for order in permutations(range(6))]

    together = [measures.pairs_together(np.array(order).reshape(3, 2) // 4) for order in orders]
    assert np.mean(together) == pytest.approx(measures.chance_of_chunk(6, 4))

    labels = np.array([0, 0, 0, 1, 1, 2])
    sizes = np.bincount(labels)
    batches = [labels[measures.batches_of(order, 3)] for order in orders]
    bits = np.mean([measures.class_bits(batch, 3) for batch in batches])
    assert bits == pytest.approx(measures.class_bits_uniform(sizes, 3))
    variance = np.mean([measures.class_variance(batch, sizes) for batch in batches])
    assert variance == pytest.approx(1)

    again = [measures.pairs_again(orders[0], order, 4) for order in orders]
    assert np.mean(again) == pytest.approx(1)

    apart = np.concatenate([measures.distances(order) for order in orders])
    shares = [np.mean(apart <= distance) for distance in range(1, 6)]
    assert measures.distances_uniform(6) == pytest.approx(shares)


def test_pairs_are_counted_as_one_by_one() -> None:
    groups = np.random.default_rng(3).integers(0, 5, (7, 9))
    pairs = [a == b for row in groups.tolist() for a, b in combinations(row, 2)]
    assert measures.pairs_together(groups) == pytest.approx(np.mean(pairs))


def test_a_uniform_order_measures_as_one() -> None:
    random = np.random.default_rng(5)
    found = measures.measure(
        random.permutation(60_000), random.permutation(60_000), per_chunk=64, batch=64, classes=50
    )
    assert max(map(abs, correlations(found))) < 5 / math.sqrt(60_000)
    assert found.neighbour_spread < 2.5 / math.sqrt(60_000)
    assert found.neighbour_distance == pytest.approx(1, abs=0.03)
    assert found.pairs_of_chunk == pytest.approx(1, abs=0.15)
    assert found.pairs_again == pytest.approx(1, abs=0.15)
    assert found.class_variance == pytest.approx(1, abs=0.05)
    assert found.class_variance_shuffled == pytest.approx(1, abs=0.05)
    assert found.class_bits == pytest.approx(found.class_bits_uniform, rel=0.01)


@pytest.mark.parametrize(
    "order",
    [Shuffled("global"), Shuffled("chunk", 4), Shuffled(None), Buffered(100), Buffered(70, 64)],
    ids=lambda order: order.label,
)
def test_an_epoch_has_every_sample_once_and_is_the_same_again(stored: Stored, order: Order) -> None:
    epoch = order.positions(stored, seed=3, epoch=1)
    assert np.array_equal(np.sort(epoch), np.arange(stored.count))
    assert np.array_equal(epoch, order.positions(stored, seed=3, epoch=1))


def test_a_window_of_chunk_shuffle_takes_whole_chunks(stored: Stored) -> None:
    epoch = Shuffled("chunk", 5).positions(stored, seed=1, epoch=0)
    for window in epoch.reshape(12, 5 * 64):
        assert len(np.unique(window // 64)) == 5


def test_a_buffer_gives_no_sample_before_it_came(stored: Stored) -> None:
    epoch = Buffered(100).positions(stored, seed=1, epoch=0)
    assert (epoch < np.arange(stored.count) + 100).all()


@pytest.mark.parametrize(("window", "batch"), [(2, 16), (6, 32), (12, 64)])
def test_class_variance_of_chunk_shuffle_is_what_the_formula_says(window: int, batch: int) -> None:
    stored, labels = Stored.lay(960 * 16, 16), np.arange(960 * 16) // 16
    epochs = [Shuffled("chunk", window).positions(stored, seed=seed, epoch=0) for seed in range(3)]
    sizes = np.bincount(labels)
    seen = np.mean(
        [measures.class_variance(labels[measures.batches_of(one, batch)], sizes) for one in epochs]
    )
    # A pair of one chunk is of one class for certain, any other one by chance.
    near = 1 + (batch - 1) * 15 / (window * 16 - 1)
    assert seen == pytest.approx(near, rel=0.08)


def test_a_wider_window_shuffles_better(stored: Stored) -> None:
    found = []
    for window in (1, 4, 20, 60):
        order = Shuffled("chunk", window)
        epoch, other = (order.positions(stored, seed=2, epoch=number) for number in (0, 1))
        found.append(measures.measure(epoch, other, per_chunk=64, batch=64, classes=20))
    for name in ("neighbour_spread", "pairs_of_chunk", "class_variance"):
        values = [getattr(one, name) for one in found]
        assert values == sorted(values, reverse=True), name
    assert found[-1].class_variance == pytest.approx(1, abs=0.25)  # one window: all samples


def test_a_model_learns_by_global_order_and_not_by_storage_order() -> None:
    digits = training.Digits.load()
    assert (np.diff(digits.labels) >= 0).all()
    good = training.accuracies(digits, Shuffled("global"), epochs=2, seed=1)
    bad = training.accuracies(digits, Shuffled(None), epochs=2, seed=1)
    assert good[-1] > 0.85
    assert bad[-1] < 0.4


def test_windows_beyond_the_memory_are_read_more_than_once(tmp_path: Path) -> None:
    with cost.volume_of(tmp_path, 32) as volume:
        shares = cost.read_shares(volume, 8, [4, 8, 32])
    assert shares[4] == shares[8] == 1
    assert shares[32] > 1.2
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Run:
    """A tiny run of everything: what it found, wrote and said."""

    findings: report.Findings
    folder: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, said = tmp_path_factory.mktemp("results"), io.StringIO()
    found: list[report.Findings] = []

    def find_and_keep(size: Size, place: Path) -> report.Findings:
        found.append(find(size, place))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr("bench.shuffle.__main__.find", find_and_keep)
        assert main(["--tiny", "--results", str(folder)]) == 0
    return Run(found[0], folder, said.getvalue())


def test_a_tiny_run_writes_its_tables(run: Run) -> None:
    (path,) = run.folder.glob("*.json")
    found = json.loads(path.read_text())
    assert found["machine"]["commit"]
    assert len(found["quality"]) == 4 + len(TINY.windows)
    assert found["quality"]["none: storage order"][0]["kendall"] == pytest.approx(1)
    table = path.with_suffix(".md").read_text()
    assert "| chunk, window of 8 |" in table
    assert all(order in table for order in found["accuracy"])
    assert str(path) in run.said


def test_the_default_window_is_measured() -> None:
    assert WINDOW_CHUNKS in Size().windows


def test_sources_are_imported_and_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,  # type: ignore[type-arg]
) -> None:
    assert sources.main(["--size", "8MiB", "--dir", str(tmp_path)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["source"] for one in found] == ["folder", "tar.gz, one pass", "tar.gz, two passes"]
    assert {one["samples"] for one in found} == {512}
    assert not list(tmp_path.iterdir())
