"""Volumes whose datasets are spread over all groups of members."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.connection.connection import LocalVolume
from dlfs.format.catalog import DatasetRecord
from dlfs.store.balancing import share_out
from tests.support.volumes import read_dataset
from tests.unit.store.test_growing import CHUNK, SIZE, fill, make


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"member{number}") for number in range(6)]


def records(volume: dlfs.Volume) -> tuple[DatasetRecord, ...]:
    return volume.session.catalog.datasets


def chunks_by_group(volume: dlfs.Volume, record: DatasetRecord) -> list[int]:
    session = volume.session
    assert isinstance(session, LocalVolume)
    return [
        sum(run.chunk_count for run in record.data_runs if group.has(run))
        for group in session.superblock.geometry.groups
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_datasets_are_spread_over_all_groups(files: list[str], replicas: int) -> None:
    with make(files[:replicas], replicas=replicas) as volume:
        first = fill(volume, "first", 20)
        second = fill(volume, "second", 7)
        with volume.append("second") as writer:  # its chunks are shared
            writer.add(b"more", bytes(CHUNK))
        small = [fill(volume, f"small{number}", 1) for number in range(6)]
        stored = volume.usage().stored_bytes
        volume.grow(files[replicas : 3 * replicas], size_bytes=SIZE)
        done: list[tuple[int, int]] = []
        report = volume.rebalance(progress=lambda *now: done.append(now))
        assert report.moved_bytes == done[-1][0] == done[-1][1] > 0
        assert done == sorted(done)
        shares = {(r.name, r.version): chunks_by_group(volume, r) for r in records(volume)}
        capacities = [group.chunk_count for group in volume.session.superblock.geometry.groups]
        for counts in shares.values():
            for count, capacity in zip(counts, capacities, strict=True):
                assert abs(count - sum(counts) * capacity / sum(capacities)) < 1
        tiny = [counts for (name, _), counts in shares.items() if name.startswith(b"small")]
        assert all(sum(column) > 0 for column in zip(*tiny, strict=True))
        assert volume.usage().stored_bytes == stored
        generation = volume.generation
        assert volume.rebalance().moved_bytes == 0
        assert volume.generation == generation
        assert (read_dataset(volume, "first"), read_dataset(volume, "second@1")) == (first, second)
        assert [read_dataset(volume, f"small{number}") for number in range(6)] == small
        assert list(volume.verify()) == []


def test_full_groups_exchange_their_data(files: list[str]) -> None:
    with make(files[:1]) as volume:
        first = fill(volume, "first", 50)
        volume.grow(files[1], size_bytes=SIZE)
        second = fill(volume, "second", 55)
        assert volume.free_bytes < 20 * CHUNK
        assert volume.rebalance().moved_bytes >= 45 * CHUNK
        assert max(max(chunks_by_group(volume, record)) for record in records(volume)) <= 28
        assert (read_dataset(volume, "first"), read_dataset(volume, "second")) == (first, second)
        assert list(volume.verify()) == []


def test_a_full_volume_is_not_balanced(files: list[str]) -> None:
    with make(files[:1]) as volume:
        samples = fill(volume, "first", 55)
        volume.grow(files[1], size_bytes=1 * MIB + 6 * CHUNK)
        with contextlib.suppress(dlfs.SpaceError):
            for number in range(20):
                fill(volume, f"more{number}", 1)
        volume.refresh()
        generation = volume.generation
        with pytest.raises(
            dlfs.SpaceError, match=r"rebalance volume .*: \d+ bytes .* room for \d+"
        ):
            volume.rebalance()
        volume.refresh()
        assert volume.generation == generation
        assert read_dataset(volume, "first") == samples
    with make(files[2:3]) as volume:
        assert volume.rebalance().moved_bytes == 0  # one group


def test_shares_are_final_and_fill_groups_evenly() -> None:
    chance = random.Random(5)
    for _ in range(200):
        capacities = [chance.randint(1, 50) for _ in range(chance.randint(1, 5))]
        counts = [
            [chance.choice([0, 0, 1, 2, 30]) for _ in capacities]
            for _ in range(chance.randint(0, 20))
        ]
        goals = share_out(counts, capacities)
        assert [sum(goal) for goal in goals] == [sum(have) for have in counts]
        assert share_out(goals, capacities) == goals
        total, capacity = sum(map(sum, counts)), sum(capacities)
        for goal in goals:
            for chunks, share in zip(goal, capacities, strict=True):
                assert abs(chunks - sum(goal) * share / capacity) < 1
        if len(capacities) == 2 and total:
            used = sum(goal[0] for goal in goals)
            assert abs(used - total * capacities[0] / capacity) <= 1
