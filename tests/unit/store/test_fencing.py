"""Changes of the members of a volume end imports by workers first; others let them go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps
from dlfs.errors import DeviceError, LockedError, StaleError
from dlfs.format.journal import Term, find_term
from dlfs.store import fencing
from tests.support.parts import COUNTS, Worker, check_no_leak, everything, open_parts
from tests.support.volumes import write_dataset

CHUNK_BYTES = 16 * KIB


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


@pytest.fixture
def volume(tmp_path: Path) -> dlfs.Volume:
    members = [str(tmp_path / name) for name in "ab"]
    dlfs.format_volume(members, size_bytes=6 * MIB, chunk_bytes=CHUNK_BYTES, replicas=2)
    volume = dlfs.open(members)
    volume.grow([str(tmp_path / name) for name in "cd"], size_bytes=4 * MIB)
    write_dataset(volume, "other", {b"a": bytes(300_000)})
    return volume


def grow(volume: dlfs.Volume, place: Path) -> str:
    volume.grow([str(place / name) for name in "ef"], size_bytes=4 * MIB)
    return volume.uri


def shrink(volume: dlfs.Volume, _place: Path) -> str:
    volume.shrink([2])
    return volume.uri


def replace_member(volume: dlfs.Volume, place: Path) -> str:
    (place / "b").unlink()
    left = [member.uri for member in volume.members if not member.uri.endswith("b")]
    return dlfs.repair(left, replacements={1: str(place / "new")}).uri


@pytest.mark.parametrize("change", [grow, shrink, replace_member])
def test_a_change_of_the_members_ends_an_import_by_workers(
    tmp_path: Path, volume: dlfs.Volume, change: Callable[[dlfs.Volume, Path], str]
) -> None:
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=50)
    worker = Worker(volume, parts, "a")
    parts.commit(worker.write(0).write(3).reports())
    worker.close()
    with dlfs.open(change(volume, tmp_path)) as changed:
        (record,) = changed.session.catalog.unfinished
        assert (record.granted_runs, find_term(record.tags)) == ((), None)
        with pytest.raises(StaleError):
            parts.confirm()
        with pytest.raises((StaleError, DeviceError)):  # an old member may be gone
            parts.commit(reserve=1)
        again = open_parts(changed, one_pass=True)
        assert again.progress(0).is_complete
        assert again.progress(3).is_complete
        again.commit(reserve=50)
        other = Worker(changed, again, "b")
        again.commit(other.write(1).write(2).reports())
        other.end()
        assert again.seal().sample_count == sum(COUNTS)
        everything(changed)
        check_no_leak(changed)


def test_a_living_worker_keeps_the_members_as_they_are(
    tmp_path: Path, volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "WORKERS_END_S", 0.0)
    parts = open_parts(volume)
    parts.commit(reserve=50)
    worker = Worker(volume, parts, "a")
    for change in (grow, shrink):
        with pytest.raises(LockedError, match="worker processes that write to the volume still"):
            change(volume, tmp_path)
    volume.refresh()
    assert len(volume.members) == 4
    worker.close()
    grow(volume, tmp_path)
    assert len(volume.members) == 6


def test_data_is_rebalanced_while_workers_write(volume: dlfs.Volume) -> None:
    parts = open_parts(volume, one_pass=True)
    parts.commit(reserve=50)
    worker = Worker(volume, parts, "a")
    for part in range(len(COUNTS)):
        volume.rebalance()
        parts.commit(worker.write(part).reports())
        write_dataset(volume, f"more {part}", {b"a": bytes(100_000)})
    worker.end()
    parts.seal()
    everything(volume)
    check_no_leak(volume)


def test_a_repair_leaves_granted_chunks_alone(tmp_path: Path, volume: dlfs.Volume) -> None:
    parts = open_parts(volume)
    parts.commit(reserve=50)
    worker = Worker(volume, parts, "a")
    run = worker.take(1)
    member, offset = worker.geometry.locate(run.first_chunk, 1)
    worker.devices[member].write(offset, b"\xee" * CHUNK_BYTES)
    worker.close()
    assert list(volume.verify()) == []
    report = dlfs.repair([member.uri for member in volume.members])
    assert (report.written_bytes, report.damaged) == (0, ())
    assert parts.confirm() > 0  # nothing was changed


def test_terms_differ_and_are_kept_with_their_expiry() -> None:
    terms = [Term.draw(42_000) for _ in range(20)]
    assert len({term.value for term in terms}) == 20
    assert find_term([terms[0].tag, (9, b"x")]) == terms[0]
    assert find_term([]) is None
