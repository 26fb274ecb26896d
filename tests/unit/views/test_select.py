"""``dlfs.select``: chosen samples of a dataset or view, read as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB

SIZES = {"a": 70, "b": 50}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dlfs.Dataset]]:
    path = str(tmp_path_factory.mktemp("select") / "volume.img")
    dlfs.format_volume(path, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path, memory_bytes=MIB) as volume:
        for name, size in SIZES.items():
            with volume.writer(name) as writer:
                for number in range(size):
                    full = f"{name}{number:03}"
                    writer.add(full, full.encode(), attributes={"number": number})
        with volume["a"] as a, volume["b"] as b:
            yield {"a": a, "b": b}


READABLE: dict[str, Callable[..., Any]] = {
    "dataset": lambda a, b: a,
    "concat": lambda a, b: dlfs.concat([b, a]),
    "part": lambda a, b: dlfs.split(a, 0.6)[0],
    "selected": lambda a, b: dlfs.select(dlfs.concat([a, b]), range(5, 100)),
    "mix": lambda a, b: dlfs.mix({a: 0.5, b: 0.5}, seed=4),
}


def paths_of(view: Any, indices: Any = None) -> list[str]:
    chosen = np.arange(len(view)) if indices is None else indices
    return [path.decode() for path in view.paths_of(chosen)]


@pytest.mark.parametrize("name", READABLE)
def test_the_chosen_samples_are_read(datasets, name) -> None:
    whole = READABLE[name](datasets["a"], datasets["b"])
    mask = whole.column("number") % 3 == 1
    view = dlfs.select(whole, mask)
    expected = [path for path in paths_of(whole) if int(path[1:]) % 3 == 1]
    assert paths_of(view) == expected
    assert view.name == f"{len(expected)} of {whole.name}"
    indices = np.flatnonzero(mask)
    assert paths_of(dlfs.select(whole, indices[::-1].tolist())) == expected
    assert dlfs.select(whole, indices).digests == view.digests
    read = [bytes(one).decode() for batch in view.batches(7, seed=1) for one in batch]
    if name == "mix":
        assert len(read) == len(set(read)) == view.epoch_samples
        shares = [sum(path[0] == kind for path in read) for kind in "ab"]
        assert abs(shares[0] - shares[1]) <= 2
        assert set(read) <= set(expected)
    else:
        assert sorted(read) == sorted(expected)
        ranks = [view.batches(7, seed=1, rank=rank, world_size=3) for rank in range(3)]
        shared = [bytes(one).decode() for epoch in ranks for batch in epoch for one in batch]
        assert sorted(shared) == sorted(expected)


def test_a_mix_keeps_its_samples(datasets) -> None:
    mixed = dlfs.mix({datasets["a"]: 3, datasets["b"]: 1}, seed=4, samples=400)
    view = dlfs.select(mixed, np.arange(len(mixed)) % 2 == 0)
    assert (view.epoch_samples, view.weights, len(view)) == (400, (3, 1), 60)
    assert dlfs.select(mixed, np.ones(len(mixed), bool)).weights == mixed.weights


def test_choices_that_cannot_be(datasets) -> None:
    a, b = datasets["a"], datasets["b"]
    mixed = dlfs.mix({a: 1, b: 1})
    for view, where, message in (
        (a, np.ones(69, bool), "select samples of a: expected where as a mask of 70 samples"),
        (a, [70], r"select samples of a: expected where 0\.\.69, got 70"),
        (a, np.ones(70, int), "got 1 70 times; a mask is of bools"),
        (a, [1, 2, 1], "each once, got 1 2 times"),
        (mixed, range(70), "expected samples of each dataset of a mix, got none of 'b'"),
        ("a", [1], "make a view: expected datasets"),
    ):
        with pytest.raises(dlfs.UsageError, match=message):
            dlfs.select(view, where)
    assert len(dlfs.select(a, [])) == 0
