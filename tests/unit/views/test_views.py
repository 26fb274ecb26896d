"""Views of several datasets: orders, proportions, shares, states, batches, columns, refusals."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import NotFoundError, UsageError
from dlfs.views import reading
from tests.support.files import flip_bit

SIZES = {"a": 700, "b": 300, "c": 41}


def content(name: str, index: int) -> bytes:
    return f"{name} {index} ".encode() * (1 + index % 50)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("views") / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(made) as volume:
        for name, size in SIZES.items():
            with volume.writer(name) as writer:
                for index in range(size):
                    attributes = {"label": index % 7, f"only {name}": 1, "text": f"{name}{index}"}
                    path = b"f%d/%04d" % (index % 5, index)
                    writer.add(path, content(name, index), attributes=attributes)
    return made


@pytest.fixture
def datasets(path: str) -> Iterator[dict[str, dlfs.Dataset]]:
    with dlfs.open(path, memory_bytes=MIB) as volume:
        opened = {name: volume[name] for name in SIZES}
        yield opened
        for dataset in opened.values():
            dataset.close()


def expected(view: dlfs.DatasetView, index: int) -> bytes:
    text = str(view.column("text", [index])[0])
    return content(text[0], int(text[1:]))


def taken(epoch: dlfs.Epoch, view: dlfs.DatasetView) -> list[int]:
    """Return the indices of an epoch, and check the bytes of every sample."""
    found: list[int] = []
    for batch in epoch:
        texts = view.column("text", batch.indices).tolist()
        for text, sample in zip(texts, batch, strict=True):
            assert bytes(sample) == content(text[0], int(text[1:]))
        found += batch.indices.tolist()
    return found


def names_of(view: dlfs.DatasetView, indices: list[int]) -> list[str]:
    return [text[0] for text in view.column("text", indices).tolist()]


# ---- concat --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
def test_an_epoch_of_a_concatenation_has_every_sample_once(datasets, shuffle) -> None:
    view = dlfs.concat(datasets.values())
    orders = [taken(view.batches(64, epoch=epoch, shuffle=shuffle), view) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(sum(SIZES.values()))) for order in orders)
    assert (orders[0] == orders[1]) == (shuffle is None)
    names = "".join(names_of(view, orders[0]))
    assert (names == "a" * 700 + "b" * 300 + "c" * 41) == (shuffle is None)


def test_the_samples_of_all_datasets_are_mixed_evenly(datasets) -> None:
    view = dlfs.concat(datasets.values())
    names = names_of(view, taken(view.batches(50), view))
    halves = [Counter(half) for half in (names[:500], names[500:1000])]
    for name, size in SIZES.items():
        assert abs(halves[0][name] - 500 * size / 1041) < 60
        assert abs(halves[1][name] - 500 * size / 1041) < 60


def test_samples_are_read_by_the_numbers_of_the_view(datasets) -> None:
    view = dlfs.concat([datasets["c"], datasets["a"]])
    assert len(view) == 741
    with view.read([740, 0, 41, 40, 0]) as batch:
        assert batch.to_list() == [
            content(name, datasets[name].column("label").size and int(text[1:]))
            for name, text in (
                ("a", view.column("text", [740])[0]),
                ("c", view.column("text", [0])[0]),
                ("a", view.column("text", [41])[0]),
                ("c", view.column("text", [40])[0]),
                ("c", view.column("text", [0])[0]),
            )
        ]
        assert batch.indices.tolist() == [740, 0, 41, 40, 0]
    assert view[-1] == view[740] == expected(view, 740)
    assert view.path(0) == datasets["c"].path(0)
    assert view.lengths([740]).tolist() == [len(expected(view, 740))]
    assert view.lengths().sum() == sum(len(expected(view, index)) for index in range(741))


def test_columns_are_those_that_all_datasets_have(datasets) -> None:
    view = dlfs.concat([datasets["c"], datasets["a"]])
    assert set(view.columns) == {"label", "text"}
    assert view.column("label").tolist() == [
        *datasets["c"].column("label").tolist(),
        *datasets["a"].column("label").tolist(),
    ]
    with pytest.raises(NotFoundError, match=r"'only c' of c \+ a.*label"):
        view.column("only c")


@pytest.mark.parametrize("shuffle", ["global", None])
def test_some_samples_of_a_view_are_chosen(datasets, shuffle) -> None:
    view = dlfs.concat(datasets.values())
    where = view.column("label") == 3
    found = taken(view.batches(10, where=where, shuffle=shuffle), view)
    assert sorted(found) == np.flatnonzero(where).tolist()
    order = [5, 1000, 5, 701]
    assert taken(view.batches(3, order=order), view) == order


# ---- mix -----------------------------------------------------------------------------------------


def test_a_mix_has_exact_proportions_over_every_1000_batches(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 0.7, datasets["b"]: 0.2, datasets["c"]: 0.1}, samples=24_000)
    found = names_of(view, view.order_epoch(dlfs.dataset.dataset.EpochOptions()).indices().tolist())
    for batch in (1, 4, 8):
        for start in range(0, len(found), 1000 * batch):
            part = Counter(found[start : start + 1000 * batch])
            assert part == {"a": 700 * batch, "b": 200 * batch, "c": 100 * batch}


def test_a_small_weight_is_not_lost(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 1, datasets["b"]: 0.00025}, samples=20_000)
    order = view.order_epoch(dlfs.dataset.dataset.EpochOptions()).indices().tolist()
    counts = Counter(names_of(view, order))
    assert counts["b"] in (4, 5)
    assert counts["a"] + counts["b"] == 20_000


def test_an_epoch_ends_before_a_dataset_is_repeated(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 0.5, datasets["c"]: 0.5})
    assert view.epoch_samples == 82
    found = taken(view.batches(10), view)
    assert max(Counter(found).values()) == 1
    assert Counter(names_of(view, found)) == {"a": 41, "c": 41}


def test_the_next_epoch_goes_on_with_samples_that_were_not_reached(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 0.5, datasets["c"]: 0.5})
    found: list[int] = []
    for epoch in range(17):
        found += taken(view.batches(16, epoch=epoch), view)
    of_a = [index for index in found if index < 700]
    assert len(set(of_a)) == len(of_a) == 17 * 41


def test_a_dataset_that_ends_is_begun_again_in_another_order(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 0.5, datasets["c"]: 0.5}, samples=410)
    found = taken(view.batches(32), view)
    of_c = [index for index in found if index >= 700]
    passes = [of_c[start : start + 41] for start in range(0, 205, 41)]
    assert all(sorted(each) == list(range(700, 741)) for each in passes)
    assert all(one != other for one, other in pairwise(passes))


def test_seeds_of_the_mix_and_the_epoch_change_the_order(datasets) -> None:
    weights = {datasets["a"]: 2, datasets["b"]: 1}
    orders = {
        tuple(taken(dlfs.mix(weights, seed=one).batches(64, seed=other), dlfs.mix(weights)))
        for one in (0, 1)
        for other in (0, 1)
    }
    assert len(orders) == 4
    again = tuple(taken(dlfs.mix(weights).batches(64), dlfs.mix(weights)))
    assert again in orders


def test_views_are_mixed(datasets) -> None:
    both = dlfs.concat([datasets["a"], datasets["b"]])
    train, _ = dlfs.split(datasets["c"], 0.5)
    view = dlfs.mix({both: 3, train: 1}, samples=4000)
    counts = Counter(names_of(view, taken(view.batches(100), view)))
    assert counts["a"] == pytest.approx(2100, abs=2)
    assert counts["c"] == pytest.approx(1000, abs=2)


# ---- ranks, workers, states ----------------------------------------------------------------------


@pytest.mark.parametrize("segment", [1 << 16, 37])
@pytest.mark.parametrize(("world", "workers"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_ranks_and_workers_share_one_order(datasets, monkeypatch, segment, world, workers) -> None:
    monkeypatch.setattr(reading, "SEGMENT_SAMPLES", segment)
    view = dlfs.mix({datasets["a"]: 0.6, datasets["b"]: 0.4})
    whole = taken(view.batches(1), view)
    assert len(whole) == view.epoch_samples
    batches: dict[tuple[int, int], list[int]] = {}
    for rank in range(world):
        for worker in range(workers):
            epoch = view.batches(5, rank=rank, world_size=world, worker=worker, workers=workers)
            for number, batch in enumerate(epoch):
                batches[number * workers + worker, rank] = batch.indices.tolist()
    for (number, rank), found in batches.items():
        start = number * 5 * world
        assert found == whole[start + rank : start + 5 * world : world][:5]
    assert sum(map(len, batches.values())) == len(whole)


def test_an_epoch_resumes_anywhere_at_another_world_size(datasets) -> None:
    view = dlfs.mix({datasets["a"]: 0.6, datasets["b"]: 0.4}, seed=5)
    whole = taken(view.batches(1, epoch=2), view)
    for batches in (0, 1, 7, 30):
        epoch = view.batches(6, epoch=2)
        before = [index for _ in range(batches) for index in next(epoch).indices.tolist()]
        state = json.loads(json.dumps(epoch.state()))
        again = pickle.loads(pickle.dumps(view))
        after = [
            taken(again.batches(4, rank=rank, world_size=2).resume(state), again)
            for rank in range(2)
        ]
        rest = whole[len(before) :]
        assert before == whole[: len(before)]
        assert after == [rest[0::2], rest[1::2]]


def test_a_state_of_other_datasets_is_refused(datasets) -> None:
    state = dlfs.mix({datasets["a"]: 0.6, datasets["b"]: 0.4}).batches(2).state()
    others = [
        dlfs.mix({datasets["a"]: 0.5, datasets["b"]: 0.5}),
        dlfs.mix({datasets["a"]: 0.6, datasets["b"]: 0.4}, seed=1),
        dlfs.concat([datasets["a"], datasets["b"]]),
        dlfs.split(datasets["a"], 0.5)[0],
    ]
    for other in others:
        with pytest.raises(UsageError, match="of another version or dataset"):
            other.batches(2).resume(state)


# ---- split ---------------------------------------------------------------------------------------


def test_a_split_is_complete_and_near_its_fraction(datasets) -> None:
    first, second = dlfs.split(datasets["a"], 0.9, seed=3)
    texts = [*first.column("text"), *second.column("text")]
    assert sorted(texts) == sorted(datasets["a"].column("text"))
    assert len(first) == pytest.approx(630, abs=40)
    assert len(dlfs.split(datasets["a"], 0)[0]) == len(dlfs.split(datasets["a"], 1.0)[1]) == 0
    assert set(first.column("text")) != set(
        dlfs.split(datasets["a"], 0.9, seed=4)[0].column("text")
    )
    assert sorted(taken(second.batches(16), second)) == list(range(len(second)))
    assert list(dlfs.split(datasets["a"], 0)[0].batches(4)) == []


def test_a_split_stays_when_the_dataset_grows(datasets, path) -> None:
    with dlfs.open(path) as volume:
        with volume.writer("grown") as writer:
            for index in range(300):
                paths = [b"f%d/%04d" % (index % 5, index), b"new/%04d" % index]
                for each in paths:
                    writer.add(each, b"", attributes={"text": each.decode()})
        with volume["grown"] as grown:
            for by in ("hash", "group"):
                old = {datasets["b"].path(i) for i in range(300)}
                sides = [
                    {view.path(i) for i in range(len(view))}
                    for view in (
                        *dlfs.split(datasets["b"], 0.5, by=by),
                        *dlfs.split(grown, 0.5, by=by),
                    )
                ]
                assert sides[0] == sides[2] & old
                assert sides[1] == sides[3] & old
        volume.remove("grown")


def test_samples_of_one_value_or_folder_stay_together(datasets) -> None:
    by_value = dlfs.split(datasets["a"], 0.5, by="attribute", column="label")
    labels = [set(part.column("label").tolist()) for part in by_value]
    assert labels[0] | labels[1] == set(range(7))
    assert not labels[0] & labels[1]
    by_folder = dlfs.split(datasets["a"], 0.5, by="group", seed=1)
    folders = [
        {part.path(index).split(b"/")[0] for index in range(len(part))} for part in by_folder
    ]
    assert len(folders[0] | folders[1]) == 5
    assert not folders[0] & folders[1]


# ---- failures and refusals -----------------------------------------------------------------------


def test_damaged_samples_are_skipped_or_named(path, tmp_path) -> None:
    copy = shutil.copy(path, tmp_path / "damaged.img")
    mark = content("b", 49)
    flip_bit(copy, Path(path).read_bytes().index(mark))
    with dlfs.open(copy, memory_bytes=MIB) as volume, volume["a"] as a, volume["b"] as b:
        view = dlfs.concat([a, b])
        with pytest.raises(dlfs.ChecksumError, match="of dataset 'b'"):
            view.read(np.arange(len(view)))
        batches = list(view.batches(100, on_error="skip"))
        found = [index for batch in batches for index in batch.indices.tolist()]
        failures = [failure for batch in batches for failure in batch.failures]
        assert len(found) == 999
        assert [failure.dataset for failure in failures] == ["b"]
        texts = view.column("text", found).tolist()
        for batch in batches:
            for text, sample in zip(view.column("text", batch.indices), batch, strict=True):
                assert bytes(sample) == content(text[0], int(text[1:]))
        assert "b49" not in texts
        replaced = list(view.batches(100, on_error="replace"))
        assert sum(map(len, replaced)) == 1000
        with pytest.raises(UsageError, match="replace"):
            dlfs.split(b, 0.5)[0].batches(4, on_error="replace")


def test_arguments_that_do_not_fit_are_refused(datasets) -> None:
    a, b = datasets["a"], datasets["b"]
    refusals = [
        (lambda: dlfs.concat([]), "one dataset or more"),
        (lambda: dlfs.concat(["a"]), "expected datasets"),
        (lambda: dlfs.concat([dlfs.mix({a: 1, b: 1})]), "got the mix"),
        (lambda: dlfs.mix({}), "one dataset or more"),
        (lambda: dlfs.mix({a: 0}), "weight"),
        (lambda: dlfs.mix({a: -1}), "weight"),
        (lambda: dlfs.mix({a: float("nan")}), "weight"),
        (lambda: dlfs.mix({a: "x"}), "weight"),
        (lambda: dlfs.mix({a: 1}, samples=0), "samples"),
        (lambda: dlfs.mix({a: 1, dlfs.split(b, 0)[0]: 1}), "samples in each dataset"),
        (lambda: dlfs.mix({a: 1, b: 1}).batches(2, where=[1]), "for a mix"),
        (lambda: dlfs.concat([a]).batches(2, weights="label"), "no weights of samples"),
        (lambda: dlfs.concat([a]).read([700]), "0..699"),
        (lambda: dlfs.concat([a])["x"], "expected an integer"),
        (lambda: dlfs.split(a, 1.5), "fraction"),
        (lambda: dlfs.split(a, 0.5, by="attribute"), "column"),
        (lambda: dlfs.split(a, 0.5, by="path"), "by"),
        (lambda: dlfs.split(dlfs.mix({a: 1}), 0.5), "the mix"),
    ]
    for call, text in refusals:
        with pytest.raises(UsageError, match=text):
            call()
    with pytest.raises(IndexError, match=r"-700\.\.699"):
        dlfs.concat([a])[700]


def test_reading_a_closed_dataset_is_refused(path) -> None:
    with dlfs.open(path, memory_bytes=MIB) as volume:
        view = dlfs.concat([volume["a"], volume["b"]])
        epoch = view.batches(10)
        next(epoch)
        view.close()
        with pytest.raises(dlfs.ClosedError):
            next(epoch)
