"""An import is read while it goes on, in an order that its seal does not change."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import arriving, committed_steps
from dlfs.errors import DeviceTimeoutError, StaleError, UsageError
from tests.support.arriving import (
    CHUNK_BYTES,
    OPTIONS,
    PATHS,
    SAMPLES,
    WINDOW_CHUNKS,
    add,
    importing,
    leave_unfinished,
    order_of,
    take,
)
from tests.support.parts import Worker, open_parts
from tests.support.volumes import new_volume


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(arriving, "POLL_S", 0.001)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    new_volume(tmp_path / "v", size_bytes=64 * MIB, chunk_bytes=CHUNK_BYTES)
    with dlfs.open(tmp_path / "v") as opened:
        yield opened


def test_every_step_is_read_as_it_comes(volume: dlfs.Volume) -> None:
    with volume.arriving("d") as dataset, importing(volume) as writer:
        epoch = dataset.batches(8, **OPTIONS)
        seen: list[bytes] = []
        for first in range(0, len(PATHS), 10):
            add(writer, SAMPLES, PATHS[first : first + 10])
            dataset.look()
            window_bytes = WINDOW_CHUNKS * CHUNK_BYTES
            opened = dataset.opened()
            while opened.arrival is not None and opened.has(len(seen) + 8, window_bytes):
                seen += take(dataset, epoch, 8)
        assert dataset.total is None
        assert len(seen) > len(PATHS) // 2
        state = epoch.state()
        writer.seal()
        seen += take(dataset, epoch)
        assert dataset.total == len(PATHS)
        assert seen == order_of(volume)
        assert sorted(seen) == sorted(PATHS)
        rest = dataset.batches(5, **OPTIONS).resume(state)
        assert take(dataset, rest) == seen[state["position"] :]


def test_the_sealed_dataset_has_the_same_order(volume: dlfs.Volume) -> None:
    with importing(volume) as writer:
        add(writer, SAMPLES, PATHS)
    with volume.arriving("d") as dataset:
        assert take(dataset, dataset.batches(7, **OPTIONS)) == order_of(volume)


def test_samples_without_bytes_at_the_end_of_a_step(volume: dlfs.Volume) -> None:
    """They share an address with the next step's first samples, and are sorted with these."""
    samples = {b"%02d" % n: bytes(CHUNK_BYTES if n % 3 == 2 else 0) for n in range(60)}
    paths = sorted(samples, key=lambda path: (int(path) // 3, -int(path) % 7, path))
    with volume.arriving("d") as dataset:
        epoch = dataset.batches(1, shuffle=None, window_chunks=2, rank=0, world_size=1)
        seen = []
        with importing(volume, step_bytes=CHUNK_BYTES) as writer:
            for path in paths:
                add(writer, samples, [path])
                if path == paths[40]:
                    writer.end_step()
                dataset.look()
                opened = dataset.opened()
                while opened.arrival is not None and opened.has(len(seen) + 1, 2 * CHUNK_BYTES):
                    seen += dataset.paths_of(next(epoch).indices)
            before = len(seen)
        seen += [path for batch in epoch for path in dataset.paths_of(batch.indices)]
        assert 30 < before < 60
        volume.refresh()
        with volume["d"] as sealed:
            assert seen == sealed.paths_of(sealed.sequence(shuffle=None).indices())


@pytest.mark.parametrize("worlds", [(1, 4), (4, 2), (3, 3)])
def test_ranks_share_the_samples_and_another_number_goes_on(
    volume: dlfs.Volume, worlds: tuple[int, int]
) -> None:
    with importing(volume) as writer:
        add(writer, SAMPLES, PATHS[:150])
        writer.end_step()
        with volume.arriving("d") as dataset:
            parts, states = [], []
            for rank in range(worlds[0]):
                share = {"rank": rank, "world_size": worlds[0]}
                with dataset.batches(4, **OPTIONS, **share) as epoch:
                    parts.append([take(dataset, epoch, 4) for _ in range(24 // worlds[0])])
                    states.append(epoch.state())
        assert states == [states[0]] * worlds[0]
        add(writer, SAMPLES, PATHS[150:])
    with volume.arriving("d") as dataset:
        rest = [
            take(
                dataset,
                dataset.batches(4, **OPTIONS, rank=rank, world_size=worlds[1]).resume(states[0]),
            )
            for rank in range(worlds[1])
        ]
    before = [path for part in parts for batch in part for path in batch]
    after = [path for part in rest for path in part]
    assert len(before) == states[0]["position"] == 96
    assert sorted(before + after) == sorted(PATHS)


def test_workers_divide_the_batches_of_a_rank(volume: dlfs.Volume) -> None:
    with importing(volume) as writer:
        add(writer, SAMPLES, PATHS)
    with volume.arriving("d") as dataset:
        whole = [dataset.paths_of(b.indices) for b in dataset.batches(7, **OPTIONS)]
        for worker in range(3):
            share = dataset.batches(7, **OPTIONS, worker=worker, workers=3)
            assert [dataset.paths_of(b.indices) for b in share] == whole[worker::3]


def test_parts_of_the_source_arrive_in_order(volume: dlfs.Volume) -> None:
    """Steps of a part follow when the parts before it are complete."""
    paths = [path for path in PATHS if SAMPLES[path]]  # each has an address of its own
    with volume.arriving("d") as dataset, importing(volume) as writer:
        add(writer, SAMPLES, paths[:100])
        writer.end_step()
        writer.part = 2  # as a worker would, which imports another part
        add(writer, SAMPLES, paths[100:180])
        writer.end_step()
        dataset.look()
        assert dataset.arrived == 100
        writer.part = 0
        add(writer, SAMPLES, paths[180:190])
        writer.end_part()
        add(writer, SAMPLES, paths[190:195])
        writer.end_part()
        add(writer, SAMPLES, paths[195:])
        writer.end_step()
        dataset.look()
        assert dataset.arrived == len(paths)
        expected = [*paths[:100], *paths[180:195], *paths[100:180], *paths[195:]]
        options = {"shuffle": None, "window_chunks": 1}
        with dataset.batches(1, **options) as epoch:
            assert take(dataset, epoch, 150) == expected[:150]
        writer.abort()


def test_nothing_arrives_before_the_first_part(volume: dlfs.Volume) -> None:
    """Workers have chunks, or have committed steps, but none that a reader can begin with."""
    with open_parts(volume, "d", one_pass=True) as parts, volume.arriving("d") as dataset:

        def has_arrived() -> bool:
            try:
                dataset.wait(0, dataset.chunk_bytes, timeout_s=0)
            except DeviceTimeoutError:
                return False
            return True

        parts.commit([], reserve=64)
        assert not has_arrived()
        with Worker(volume, parts, "1") as worker:
            for part, expected in ((2, False), (0, True)):
                worker.write(part)
                parts.commit(worker.reports())
                assert has_arrived() == expected
        parts.abort()


def test_other_writers_move_the_chunks_meanwhile(volume: dlfs.Volume, tmp_path: Path) -> None:
    """Members join and the samples move to them, between two batches of a window."""
    with importing(volume) as writer, volume.arriving("d") as dataset:
        add(writer, SAMPLES, PATHS[:200])
        writer.end_step()
        epoch = dataset.batches(4, **OPTIONS)
        seen = take(dataset, epoch, 20)
        with dlfs.open(tmp_path / "v") as other:
            other.grow([str(tmp_path / "w")], size_bytes=64 * MIB)
            other.shrink([0])
        dataset.look()
        with (tmp_path / "v").open("r+b") as file:  # as if it had been given to someone else
            file.seek(MIB)
            file.write(bytes(63 * MIB))
        seen += take(dataset, epoch, 40)
        volume.refresh()
        add(writer, SAMPLES, PATHS[200:])
        writer.seal()
        seen += take(dataset, epoch)
        assert seen == order_of(volume)


def test_an_abandoned_import_ends_the_epoch(volume: dlfs.Volume) -> None:
    with volume.arriving("d") as dataset:
        leave_unfinished(volume)
        epoch = dataset.batches(8, **OPTIONS)
        take(dataset, epoch, 16)
        volume.abandon("d")
        with pytest.raises(StaleError, match="was abandoned"):
            take(dataset, epoch)


def test_a_state_is_of_one_import(volume: dlfs.Volume) -> None:
    states = []
    for _ in range(2):
        leave_unfinished(volume)
        with volume.arriving("d") as dataset:
            epoch = dataset.batches(8, **OPTIONS)
            take(dataset, epoch, 8)
            states.append(epoch.state())
        volume.abandon("d")
    with importing(volume) as writer:
        add(writer, SAMPLES, PATHS)
    with volume.arriving("d") as dataset, volume["d"] as sealed:
        with pytest.raises(UsageError, match="of another import of 'd'"):
            dataset.batches(8).resume(states[0])
        with pytest.raises(UsageError, match="of another version or dataset"):
            sealed.batches(8).resume(states[0])
        with pytest.raises(UsageError, match="one of another dataset"):
            dataset.batches(8).resume(sealed.batches(8).state())


def test_waiting_ends_in_time(
    volume: dlfs.Volume, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with volume.arriving("d") as dataset:
        assert dataset.total is dataset.uuid is None
        assert (dataset.arrived, dataset.fields) == (0, {})
        caplog.set_level("WARNING", "dlfs")
        monkeypatch.setattr(arriving, "NOTICE_S", 0.01)
        with pytest.raises(DeviceTimeoutError, match=r"expected a step within 0\.05 s"):
            next(dataset.batches(8, timeout_s=0.05))
        assert "the import of 'd' is waited for: 0 samples have arrived, and 8 are" in caplog.text

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            next(dataset.batches(8, check=fail))


def test_imports_of_two_passes_are_refused(volume: dlfs.Volume) -> None:
    leave_unfinished(volume, layout="shuffled", one_pass=False, stage_bytes=100 * KIB)
    with volume.arriving("d") as dataset, pytest.raises(UsageError, match="import of one pass"):
        next(dataset.batches(8))


@pytest.mark.parametrize(
    "options",
    [{"where": [1]}, {"order": [1]}, {"weights": [1.0]}, {"draws": 3}, {"on_error": "replace"}],
)
def test_options_that_need_all_samples_are_refused(
    volume: dlfs.Volume, options: dict[str, Any]
) -> None:
    with volume.arriving("d") as dataset, pytest.raises(UsageError):
        dataset.batches(8, **options)


def test_it_is_used_in_other_processes(volume: dlfs.Volume) -> None:
    with importing(volume) as writer:
        add(writer, SAMPLES, PATHS)
    with volume.arriving("d") as dataset:
        expected = take(dataset, dataset.batches(8, **OPTIONS))
        assert repr(dataset).endswith(f": {len(PATHS)} samples>")
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert repr(copy).endswith(": not open>")
            assert take(copy, copy.batches(8, **OPTIONS)) == expected
            assert copy.uuid == dataset.uuid
