"""An unfinished record is no dataset, and every change of the volume keeps it and its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

import dlfs
from dlfs._native.checksums import crc32c
from dlfs.base.units import KIB, MIB
from dlfs.connection.stored_samples import stored_step
from dlfs.connection.unfinished import load_steps
from dlfs.directory import PathBlock
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace
from dlfs.store.space import count_chunks
from tests.golden import c_reader
from tests.support.unfinished import LATER_TAG, commit_unfinished, steps_of
from tests.support.volumes import flip_copies, new_volume, write_dataset

STEPS = 2


def files(folder: Path, *numbers: int) -> list[str]:
    return [str(folder / f"{number}.img") for number in numbers]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    uris = new_volume(files(tmp_path, 0, 1), size_bytes=4 * MIB, chunk_bytes=16 * KIB, replicas=2)
    with dlfs.open(uris) as opened:
        add(opened)
        commit_unfinished(opened, "data", STEPS)
        yield opened


def add(volume: dlfs.Volume, name: str = "data") -> None:
    write_dataset(volume, name, {f"{number}": bytes([number]) * 3000 for number in range(20)})


def unpack_paths(block: PathBlock) -> list[bytes]:
    return [block.text[a:b].tobytes() for a, b in pairwise(block.offsets.tolist())]


def check(volume: dlfs.Volume) -> DatasetRecord:
    """Check that a volume has the unfinished record, with its bytes in all copies; return it."""
    volume.refresh()
    generation = volume._local("test").generation
    (record,) = generation.catalog.unfinished
    assert (record.key, record.tags[1]) == ((b"data", 0), LATER_TAG)
    steps = load_steps(generation, record).steps
    for step, (samples, *_) in zip(steps, steps_of(STEPS), strict=True):
        stored = stored_step(generation, record, step)
        (block,) = stored.blocks(1024, first_address=0, first_row=0)
        assert unpack_paths(block) == list(samples)
        assert block.locations["crc32c"].tolist() == list(map(crc32c, samples.values()))
    assert list(volume.verify()) == []
    return record


def test_readers_do_not_show_it(volume: dlfs.Volume) -> None:
    commit_unfinished(volume, "other", STEPS, uuid=UUID(int=78))
    assert [(info.name, info.version) for info in volume.datasets()] == [("data", 1)]
    assert "other" not in volume
    with pytest.raises(dlfs.NotFoundError):
        volume["other"]
    with pytest.raises(dlfs.NotFoundError):
        volume["data@0"]
    with volume.dataset() as dataset:
        assert len(dataset) == 20
    assert volume.info().dataset_count == 1
    assert list(volume.verify()) == []
    assert list(c_reader.read_volume(volume.uri.split(","))) == [(b"data", 1)]


def test_its_chunks_are_counted(volume: dlfs.Volume) -> None:
    usage = volume.usage()
    (info,) = volume.unfinished()
    assert (
        usage.unfinished_bytes == info.stored_bytes == count_chunks(check(volume).runs) * 16 * KIB
    )
    used = usage.stored_bytes + usage.unfinished_bytes + usage.catalog_bytes
    assert used + usage.free_bytes == usage.capacity_bytes


CHANGES: dict[str, Callable[[dlfs.Volume], object]] = {
    "import": add,
    "remove": lambda volume: volume.remove("data"),
    "rename": lambda volume: volume.rename("data", "new"),
    "append": lambda volume: volume.append("data").seal(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_datasets_keep_it(
    volume: dlfs.Volume, change: Callable[[dlfs.Volume], object]
) -> None:
    before = check(volume)
    change(volume)
    add(volume, "after")  # would write over chunks that were free
    add(volume, "after")
    assert check(volume) == before
    with volume.writer("data") as writer:
        writer.add("x", b"x")
    assert volume["data"].version >= 2


def test_growing_rebalancing_and_shrinking_keep_it(volume: dlfs.Volume, tmp_path: Path) -> None:
    before = check(volume)
    volume.grow(files(tmp_path, 2, 3), size_bytes=4 * MIB)
    volume.rebalance()
    assert check(volume) == before
    volume.shrink([0])
    moved = check(volume)
    assert (moved.uuid, moved.sample_count) == (before.uuid, before.sample_count)
    assert not set(moved.runs) & set(before.runs)
    add(volume, "after")
    assert check(volume) == moved


@pytest.mark.parametrize("stale", [False, True], ids=["new-device", "stale-member"])
def test_repair_copies_its_chunks(tmp_path: Path, stale: bool) -> None:
    uris = files(tmp_path, 0, 1)
    dlfs.format_volume(uris, size_bytes=4 * MIB, chunk_bytes=16 * KIB, replicas=2)
    before = Path(uris[1]).read_bytes()
    with dlfs.open(uris) as volume:
        commit_unfinished(volume, "data", STEPS)
        add(volume)
    if stale:
        Path(uris[1]).write_bytes(before)
        dlfs.repair(uris)
    else:
        uris[1] = files(tmp_path, 5)[0]
        dlfs.repair(uris[:1], replacements={1: uris[1]})
    with dlfs.open(uris) as volume:
        check(volume)
        assert list(volume.verify()) == []


@pytest.mark.parametrize("kind", ["data", "journal"])
def test_damage_is_found_in_each_copy(volume: dlfs.Volume, kind: str) -> None:
    record = check(volume)
    generation = volume._local("test").generation
    runs = record.data_runs if kind == "data" else record.journal_runs
    space = DataSpace(generation.geometry, runs)
    at = 20_000 if kind == "data" else 5000
    for copy in range(2):
        flip_copies(generation, space, at, copy)
        (finding,) = volume.verify()
        assert finding.kind == ("sample" if kind == "data" else "journal")
        assert "unfinished import of 'data'" in finding.message
        flip_copies(generation, space, at, copy)
    flip_copies(generation, space, at, 0, 1)
    assert len(list(volume.verify())) == 2 - (kind == "journal")
