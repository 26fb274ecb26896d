"""What a caller says of the ranks: meshes, groups, groups of consecutive ranks, numbers."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.epoch.placement import check_said, detach
from dlfs.errors import UsageError
from tests.support.forked import call_forked
from tests.support.volumes import new_volume
from tests.unit.epoch.test_ranks import no_launcher

__all__ = ["no_launcher"]  # for every test here

COUNT = 26


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[dlfs.Dataset]:
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)) as volume:
        with volume.writer("numbers") as writer:
            for number in range(COUNT):
                writer.add(b"%02d" % number, bytes([number, 0]))
        with volume["numbers"] as opened:
            yield opened


@dataclass
class Grid:
    """The part of PyTorch's ``DeviceMesh`` that is used, for one of its ranks."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


@dataclass
class Group:
    """The part of PyTorch's ``ProcessGroup`` that is used."""

    own: int
    ranks: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.ranks


def numbers(said: Any) -> tuple[int, int]:
    found = dlfs.find_placement(said)
    return found.rank, found.world_size


def grids(shape: tuple[int, ...], names: tuple[str, ...]) -> list[Grid]:
    return [Grid(shape, names, at) for at in itertools.product(*map(range, shape))]


@pytest.mark.parametrize(
    ("shape", "names", "data", "expected"),
    [
        ((2, 2), ("dp", "tp"), "dp", [0, 0, 1, 1]),
        ((2, 2), ("pp", "dp"), "dp", [0, 1, 0, 1]),
        ((4, 1), ("dp", "tp"), ["dp"], [0, 1, 2, 3]),
        ((1, 4), ("dp", "tp"), "dp", [0, 0, 0, 0]),
        ((2, 2), ("pp", "tp"), [], [0, 0, 0, 0]),
        ((2, 1, 2), ("dp", "pp", "tp"), ("dp",), [0, 0, 1, 1]),
        # The names of the dimensions are a set: all ranks count in the mesh's order.
        ((2, 2, 2), ("r", "s", "tp"), ("s", "r"), [0, 0, 1, 1, 2, 2, 3, 3]),
        ((2, 2, 2), ("r", "cp", "s"), ("r", "s"), [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_ranks_that_differ_in_data_dimensions_share(shape, names, data, expected):
    found = [numbers((grid, data)) for grid in grids(shape, names)]
    assert [rank for rank, _ in found] == expected
    assert {size for _, size in found} == {max(expected) + 1}


def test_a_mesh_of_one_dimension_a_group_and_numbers_need_no_names():
    assert numbers(Grid((3,), ("dp",), (2,))) == (2, 3)
    assert numbers(Grid((3,), None, (1,))) == (1, 3)
    assert numbers(Grid((1,), ("tp",), (0,))) == (0, 1)
    assert numbers((Grid((3,), ("tp",), (2,)), "tp")) == (2, 3)
    assert numbers((Grid((3,), ("tp",), (2,)), [])) == (0, 1)
    assert numbers(Group(1, 4)) == (1, 4)
    assert numbers(dlfs.Placement(2, 5)) == (2, 5)
    assert numbers(lambda: (Grid((2, 2), ("dp", "tp"), (1, 0)), "dp")) == (1, 2)
    assert numbers(lambda: dlfs.Placement(0, 1)) == (0, 1)


def test_consecutive_ranks_read_the_same(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        found.append(numbers(dlfs.Replicated(4)))
        assert numbers(dlfs.Replicated(8)) == (0, 1)
        assert numbers(dlfs.Replicated(1)) == (rank, 8)
    assert found == [(rank // 4, 2) for rank in range(8)]
    with pytest.raises(UsageError, match=r"ranks that Replicated\(3\) divides, got 8"):
        dlfs.find_placement(dlfs.Replicated(3))


NAMELESS = Grid((2, 2), None, (0, 0))
NAMED = Grid((2, 2), ("dp", "tp"), (0, 0))

REFUSED_WHEN_MADE = [
    (NAMED, "names of the mesh's data dimensions.* 2 dimensions, dp and tp"),
    (NAMELESS, "2 dimensions, without names"),
    (Grid((2,), ("tp",), (0,)), r"of a data dimension.*'tp'; give placement=\(mesh, 'tp'\)"),
    (Grid((2,), ("dp_shard_cp",), (0,)), "got one of 'dp_shard_cp'"),
    ((NAMELESS, "dp"), "got 'dp' for one without names"),
    ((NAMED, "data"), "got 'data' for one with dp and tp"),
    ((NAMED, ("dp", "dp")), "expected different names"),
    ((NAMED, "dp", "tp"), "expected placement as a DeviceMesh"),
    (-100, "is no member of"),
    (4, r"Replicated\(K\).*got 4"),
    ("dp", "got 'dp'"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED_WHEN_MADE)
def test_an_ambiguous_placement_is_refused_when_it_is_given(dataset, said, message):
    for made in (lambda: dataset.batches(2, placement=said), lambda: dlfs.find_placement(said)):
        with pytest.raises(UsageError, match=message):
            made()


REFUSED_AT_THE_BEGIN = [
    (Grid((2,), ("dp",), None), "mesh of which this rank is a member, got Grid"),
    ((Grid((2, 2), ("dp", "tp"), None), "dp"), "mesh of which this rank is a member"),
    (lambda: NAMED, "names of the mesh's data dimensions"),
    (lambda: None, "a function that returns None"),
    (lambda: print, "a function that returns"),
    (lambda: [][0], "got IndexError: list index out of range"),
    (dlfs.Placement(2, 2), "expected 0 <= rank < world_size from placement, got 2 and 2"),
    (dlfs.Replicated(2), r"Replicated\(2\) divides, got 1"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED_AT_THE_BEGIN)
def test_what_is_not_known_before_is_refused_when_the_epoch_begins(dataset, said, message):
    epoch = dataset.batches(2, placement=said)
    assert "rank unknown" in repr(epoch)
    with pytest.raises(UsageError, match=message):
        next(epoch)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2"])
def test_a_group_of_ranks_has_some(ranks):
    with pytest.raises(UsageError, match="replicate samples: expected ranks"):
        dlfs.Replicated(ranks)


@pytest.mark.parametrize("given", [{"rank": 0, "world_size": 2}, {"world_size": 1}, {"rank": 0}])
def test_numbers_and_a_placement_are_refused(dataset, given):
    for said in (NAMED, dlfs.Replicated(2)):
        said = (said, "dp") if said is NAMED else said
        with pytest.raises(UsageError, match="expected placement or the numbers of ranks"):
            dataset.batches(2, placement=said, **given)


def made(dataset: dlfs.Dataset, said: Any) -> list[dlfs.Epoch]:
    """Return an epoch of every kind, each position of which is one sample."""
    return [
        dataset.batches(1, placement=said),
        dlfs.concat([dataset]).batches(1, placement=said),
        dlfs.token_batches(dataset, 1, placement=said),
        dlfs.length_batches(dataset, 2, placement=said),
    ]


def test_peers_read_the_same_and_others_the_rest(dataset):
    """Saved behind one batch of a mesh of 2x2, every kind of epoch goes on at 4x1."""
    shares = [made(dataset, (grid, "dp")) for grid in grids((2, 2), ("dp", "tp"))]
    firsts = [[next(epoch).indices.tolist() for epoch in epochs] for epochs in shares]
    assert firsts[0] == firsts[1] != firsts[2] == firsts[3]
    states = [[epoch.state() for epoch in epochs] for epochs in shares]
    assert states[0] == states[1] == states[2] == states[3]
    rest = [
        [
            [int(i) for batch in epoch.resume(state) for i in batch.indices]
            for epoch, state in zip(made(dataset, (grid, "dp")), states[0], strict=True)
        ]
        for grid in grids((4, 1), ("dp", "tp"))
    ]
    for kind, whole in enumerate(made(dataset, dlfs.Placement(0, 1))):
        expected = [int(i) for batch in whole for i in batch.indices]
        taken = [firsts[0][kind][0], firsts[2][kind][0]]
        resumed = [rest[at % 4][kind][at // 4] for at in range(COUNT - 2)]
        assert taken + resumed == expected


def test_a_placement_is_looked_for_when_the_epoch_begins(dataset):
    later: list[Any] = []
    epoch = dataset.batches(1, placement=lambda: later[0])
    assert "rank unknown" in repr(epoch)
    later.append((Grid((2, 2), ("dp", "tp"), (1, 1)), "dp"))
    assert "rank 1 of 2" in repr(epoch)
    assert sum(1 for _ in epoch) == COUNT // 2


def test_a_placement_that_changes_during_an_epoch_is_refused(monkeypatch, dataset):
    now = [dlfs.Placement(0, 1)]
    epoch = dataset.batches(1, placement=lambda: now[0])
    first = next(epoch).indices.tolist()

    def go_on_in_a_mesh() -> list[int]:
        now[0] = dlfs.Placement(1, 5)
        expected = "expected rank 0 of 1, with which epoch 0 began, got rank 1 of 5: ranks or their"
        with pytest.raises(UsageError, match=expected):
            next(epoch)
        return [int(i) for batch in epoch.resume(epoch.state()) for i in batch.indices]

    order = [int(i) for batch in dataset.batches(1) for i in batch.indices]
    assert call_forked(go_on_in_a_mesh) == order[2::5]
    assert first + [int(i) for batch in epoch for i in batch.indices] == order

    epoch = dataset.batches(1, placement=dlfs.Replicated(1))
    next(epoch)

    def go_on_in_ranks() -> int:
        os.environ.update({"RANK": "2", "WORLD_SIZE": "3"})
        with pytest.raises(UsageError, match=r"got rank 2 of 3: .*resume\(state\(\)\)"):
            next(epoch)
        return len(list(epoch.resume(epoch.state())))

    assert call_forked(go_on_in_ranks) == len(order[3::3])


def here() -> dlfs.Placement:
    return dlfs.Placement(1, 3)


@pytest.mark.parametrize("said", [None, dlfs.Replicated(2), dlfs.Placement(0, 1), here])
def test_what_can_be_pickled_is(said):
    assert pickle.loads(pickle.dumps(detach(said))) == said


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (NAMED, "a DeviceMesh"),
        ((NAMED, "dp"), "a DeviceMesh"),
        (Group(0, 2), "a process group"),
        (lambda: NAMED, "a function"),
    ],
)
def test_what_belongs_to_its_process_says_so_in_another(said, what):
    detached = pickle.loads(pickle.dumps(detach(said)))
    for _ in range(2):
        with pytest.raises(UsageError, match=f"{what} belongs to the process that made it"):
            check_said(detached)
        detached = detach(detached)
