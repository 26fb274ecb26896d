"""An import by workers gives the dataset of a plain import, and survives what befalls it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block.lease import boot_clock
from dlfs.dataset import committed_steps, step_cutter
from dlfs.dataset.parts_writer import WorkerStep
from dlfs.errors import ExistsError, FormatError, LockedError, StaleError, UsageError
from dlfs.format.constants import ATTRIBUTE_BLOCK_BYTES
from dlfs.format.geometry import ChunkRun
from dlfs.store.space import count_chunks
from tests.support.parts import (
    COUNTS,
    ORIGIN,
    Worker,
    add_part,
    check_no_leak,
    everything,
    import_plainly,
    open_parts,
)
from tests.support.volumes import new_volume, write_dataset

CHUNK_BYTES = 16 * KIB


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


@pytest.fixture
def volume(tmp_path: Path) -> dlfs.Volume:
    return fresh(tmp_path / "v.img")


def fresh(path: Path, **layout: Any) -> dlfs.Volume:
    return dlfs.open(new_volume(path, size_bytes=8 * MIB, chunk_bytes=CHUNK_BYTES, **layout))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Any, ...]]:
    """What plain imports make, by layout and by whether there is one pass."""
    found = {}
    for layout in ("shuffled", "path"):
        for one_pass in (True, False):
            made = fresh(tmp_path_factory.mktemp("plain") / "v.img")
            import_plainly(made, layout=layout, one_pass=one_pass)
            found[layout, one_pass] = everything(made)
    return found


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_dataset_is_that_of_a_plain_import(
    volume: dlfs.Volume, plain: Any, layout: str, one_pass: bool, order: tuple[int, ...]
) -> None:
    parts = open_parts(volume, workers=2, layout=layout, one_pass=one_pass)
    parts.commit(reserve=100)
    workers = [Worker(volume, parts, name, slot) for slot, name in enumerate("ab")]
    for number, part in enumerate(order):
        worker = workers[number % 2].write(part)
        for report in worker.reports():
            parts.commit([report], reserve=4)
    assert parts.is_read
    for worker in workers:
        worker.end()
    info = parts.seal()
    assert info.sample_count == sum(COUNTS)
    assert everything(volume) == plain[layout, one_pass]
    check_no_leak(volume)


def test_steps_end_by_their_paths_and_attributes(
    tmp_path: Path, volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=100)
    worker = Worker(volume, parts, "a")
    worker.write(3)
    whole = [step.sample_count for step in worker.steps]
    worker.close()
    parts.abort()
    volume.abandon("x")
    limit_bytes = 5 * ATTRIBUTE_BLOCK_BYTES + 1200  # little more than two columns without values
    monkeypatch.setattr(step_cutter, "STEP_JOURNAL_BYTES", limit_bytes)
    plain = fresh(tmp_path / "plain.img")
    import_plainly(plain, one_pass=True)
    expected = everything(plain)
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=100)
    worker = Worker(volume, parts, "a")
    for part in range(len(COUNTS)):
        steps = [step.sample_count for step in worker.write(part).steps]
        assert part != 3 or steps != whole
        parts.commit(worker.reports(), reserve=10)
    worker.end()
    parts.seal()
    assert everything(volume) == expected


def test_what_is_granted_is_on_the_volume_before(volume: dlfs.Volume) -> None:
    free = volume.free_bytes
    parts = open_parts(volume)
    parts.commit(reserve=10)
    volume.refresh()
    (record,) = volume.session.catalog.unfinished
    assert list(record.granted_runs) == parts.grants.runs() == parts.grants.pool
    assert count_chunks(record.granted_runs) == 10
    (info,) = volume.unfinished()
    assert info.granted_bytes == 10 * CHUNK_BYTES == volume.usage().unfinished_bytes
    assert volume.free_bytes <= free - info.granted_bytes
    assert list(volume.verify()) == []
    parts.abort()
    check_no_leak(volume)


def test_as_many_chunks_are_reserved_as_are_free(volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=10_000)
    assert 0 < parts.grants.pool_chunks < volume.capacity_bytes // CHUNK_BYTES
    parts.commit(reserve=10_000)
    worker = Worker(volume, parts, "a")
    parts.commit(worker.write(0).reports())
    worker.end()
    parts.abort()


def test_others_commit_in_between(volume: dlfs.Volume, plain: Any) -> None:
    parts = open_parts(volume, layout="path", one_pass=True)
    parts.commit(reserve=20)
    worker = Worker(volume, parts, "a")
    for part in range(len(COUNTS)):
        write_dataset(volume, f"other {part}", {b"a": bytes(30_000)})
        for report in worker.write(part).reports():
            parts.commit([report], reserve=10)
        if part == 2:
            volume.remove("other 0")
            volume.rename("other 1", "another")
    worker.end()
    parts.seal()
    assert everything(volume) == plain["path", True]
    check_no_leak(volume)


# ---- ends ----------------------------------------------------------------------------------------


def test_a_new_coordinator_goes_on_and_the_old_one_is_stale(
    volume: dlfs.Volume, plain: Any
) -> None:
    old = open_parts(volume, layout="path", one_pass=True)
    old.commit(reserve=30)
    worker = Worker(volume, old, "a")
    reports = worker.write(2).write(0).reports()
    old.commit(reports[:2])
    worker.close()
    assert old.confirm() > 0
    parts = open_parts(volume, layout="path", one_pass=True)
    assert parts.progress(2).is_complete
    assert not parts.progress(0).is_complete
    assert parts.grants.runs() == []
    for action in (old.confirm, lambda: old.commit(reports[2:])):
        with pytest.raises(StaleError, match="another writer has gone on with it"):
            action()
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "b")
    for part in (0, 3, 1):
        worker.write(part)
    parts.commit(worker.reports())
    worker.end()
    parts.seal()
    assert everything(volume) == plain["path", True]
    check_no_leak(volume)


def test_who_takes_over_waits_for_living_workers(
    volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "a").write(2)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            worker.close()

    with pytest.raises(LockedError, match="worker processes that write to the volume still run"):
        open_parts(volume, wait=lambda _seconds: None)
    open_parts(volume, wait=wait).abort()
    assert len(waits) == 5
    with pytest.raises(StaleError):
        parts.confirm()
    check_no_leak(volume)


def test_a_plain_import_goes_on_with_one_by_workers(volume: dlfs.Volume, plain: Any) -> None:
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "a")
    parts.commit(worker.write(1).write(0).reports())
    worker.close()
    import_plainly(volume, one_pass=True)
    assert everything(volume) == plain["shuffled", True]
    check_no_leak(volume)


def test_an_import_of_another_source_ends_nothing(volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=3)
    other = {"source": "another", "fingerprint": "2"}
    for opened in (volume.step_writer, partial(volume.parts_writer, part_count=4)):
        with pytest.raises(UsageError, match="an unfinished import of a test"):
            opened("x", other)
    assert parts.confirm() > 0
    parts.abort()


def test_workers_go_on_with_a_plain_import(volume: dlfs.Volume, plain: Any) -> None:
    writer = volume.step_writer("x", ORIGIN, step_bytes=40_000, seed=3, stage_bytes=15_000)
    add_part(writer, 0)
    writer.abort()
    parts = open_parts(volume)
    assert 0 < parts.progress(0).source_count < COUNTS[0]
    parts.commit(reserve=60)
    worker = Worker(volume, parts, "a")
    for part in (3, 2, 0, 1):
        worker.write(part)
    parts.commit(worker.reports())
    worker.end()
    parts.seal()
    assert [*everything(volume)[0]] == [*plain["shuffled", False][0]]
    check_no_leak(volume)


def test_abandoning_frees_what_was_granted(volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "a")
    parts.commit(worker.write(2).reports())
    worker.close()
    volume.refresh()
    volume.abandon("x")
    with pytest.raises(StaleError, match="it is gone"):
        parts.confirm()
    check_no_leak(volume)


def test_one_import_by_workers_at_a_time(volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=3)
    with pytest.raises(UsageError, match=r"no other import by workers.* got that of 'x'"):
        volume.parts_writer("y", ORIGIN, part_count=1)
    parts.abort()
    volume.parts_writer("y", ORIGIN, part_count=1).abort()
    assert volume.unfinished() == []


def test_an_unfinished_seal(volume: dlfs.Volume) -> None:
    with open_parts(volume) as parts:
        parts.commit(reserve=30)
        worker = Worker(volume, parts, "a")
        parts.commit(worker.write(0).write(2).reports())
        with pytest.raises(UsageError, match="all 4 parts, got not all of 1 and 3"):
            parts.seal()
        parts.commit(worker.write(1).write(3).reports())
        with pytest.raises(UsageError, match="expected all workers to have ended, but 'a'"):
            parts.seal()
        worker.end()
        parts.seal()


def test_two_parts_with_one_path(volume: dlfs.Volume) -> None:
    with pytest.raises(ExistsError, match="'2/0") as raised:  # noqa: PT012, SIM117
        with open_parts(volume, part_count=2) as parts:
            parts.commit(reserve=30)
            worker = Worker(volume, parts, "a")
            for part in (0, 1):
                with worker.writer(part) as writer:
                    add_part(writer, 2)
            parts.commit(worker.reports())
            worker.end()
            parts.seal()
    assert "are kept as an unfinished import of 'x'" in "".join(raised.value.__notes__)
    volume.refresh()
    (info,) = volume.unfinished()
    assert info.sample_count == 2 * COUNTS[2]
    volume.abandon("x")
    check_no_leak(volume)


def test_what_a_lost_worker_writes_late_is_in_no_dataset(volume: dlfs.Volume, plain: Any) -> None:
    now = [0.0]
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    parts = open_parts(volume, one_pass=True, clock=lambda: now[0], wait=wait, workers=2)
    parts.commit(reserve=80)
    lost, living = Worker(volume, parts, "lost"), Worker(volume, parts, "living", 1)
    lost.take(1)
    runs = parts.grants.held["lost"]
    parts.grants.lose("lost", 30.0)
    for part in range(len(COUNTS)):
        living.write(part)
        parts.commit(living.reports(), reserve=5)
        for run in runs:  # they are still granted, and nobody else has them
            for chunk in range(run.first_chunk, run.end_chunk):
                member, offset = lost.geometry.locate(chunk, 0)
                lost.devices[member].write(offset, b"\xee" * CHUNK_BYTES)
        now[0] += 5
    assert parts.grants.lost
    lost.close()
    living.end()
    parts.seal()
    assert waits == [10.0]
    assert everything(volume) == plain["shuffled", True]
    check_no_leak(volume)


def test_chunks_of_a_lost_worker_are_free_when_it_cannot_write(volume: dlfs.Volume) -> None:
    now = [0.0]
    parts = open_parts(volume, clock=lambda: now[0])
    parts.commit(reserve=20)
    Worker(volume, parts, "lost").close()
    parts.grants.take("lost", 20)
    parts.grants.lose("lost", 30.0)
    for time_s, left in ((29.9, 20), (30.0, 0)):
        now[0] = time_s
        parts.commit()
        volume.refresh()
        (record,) = volume.session.catalog.unfinished
        assert count_chunks(record.granted_runs) == left
    parts.abort()
    check_no_leak(volume)


# ---- reports -------------------------------------------------------------------------------------


def change_names(report: WorkerStep) -> WorkerStep:
    names = report.content.names.copy()
    names[100] ^= 1
    return replace(report, content=replace(report.content, names=names))


def with_content(**changes: Any) -> Any:
    return lambda report: replace(report, content=replace(report.content, **changes))


def with_end(**changes: Any) -> Any:
    def change(report: WorkerStep) -> WorkerStep:
        content = report.content
        return replace(report, content=replace(content, end=replace(content.end, **changes)))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_content(runs=(ChunkRun(400, 2),)), "expected chunks that were granted to it"),
        (lambda r: replace(r, worker="b"), "from worker 'b': .*chunks that were granted to it"),
        (with_content(number=1), "step 1 of part 2 .*expected step 0, got 1"),
        (with_content(part=-1), "expected a part in 0"),
        (with_content(part=4), "expected one of 4 parts"),
        (with_content(part=0), "expected no step of a complete part"),
        (with_content(sample_count=8), "expected"),
        (with_content(sample_bytes=8), "expected 8 bytes of samples"),
        (with_content(sample_bytes=-1), "expected counts and sizes"),
        (with_content(window_count=-1), "expected 0 windows or more"),
        (with_end(source_count=-1), "at least 0 samples of the source"),
        (with_end(source_count=2), "a cursor in the first 2 samples"),
        (change_names, "checksum mismatch"),
        (with_content(attributes=()), "expected"),
    ],
)
def test_a_wrong_report_commits_nothing(volume: dlfs.Volume, change: Any, message: str) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "a")
    parts.commit(worker.write(0).reports())
    volume.refresh()
    granted, generation = parts.grants.runs(), volume.generation
    (report,) = worker.write(2).reports()
    with pytest.raises((UsageError, FormatError), match=message) as raised:
        parts.commit([change(report)])
    assert "worker" in str(raised.value)
    assert "part" in str(raised.value)
    volume.refresh()
    assert volume.generation == generation
    assert parts.grants.runs() == granted
    parts.commit([report])
    assert parts.progress(2).is_complete
    worker.end()
    parts.abort()


def test_parts_with_other_attributes_are_refused(volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=30)
    worker = Worker(volume, parts, "a")
    one = worker.writer(2)
    add_part(one, 2)
    with worker.writer(1) as other:
        data = np.zeros(3, np.uint8), np.zeros(1, np.int64), np.array([3])
        other.add_batch([b"1/a"], *data, attributes={"number": np.array([1.5])})
    one.end_part()
    other_step, first_step = worker.reports()
    parts.commit([first_step])
    with pytest.raises(UsageError, match=r"part 1 from worker 'a'.*(number|part)"):
        parts.commit([other_step])
    worker.end()
    parts.abort()


def test_an_import_that_fails_after_its_lost_workers_have_ended_leaves_nothing(
    volume: dlfs.Volume,
) -> None:
    writer = open_parts(volume)
    writer.commit(reserve=100)
    worker = Worker(volume, writer, "1")
    worker.take(3)
    worker.close()
    writer.grants.lose("1", boot_clock())
    writer.abort()
    volume.refresh()
    assert volume.unfinished() == []
    check_no_leak(volume)
