"""The second pass of an import: chunks have samples from everywhere, whenever it was killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dlfs
from bench.shuffle.measures import class_variance
from dlfs.base.units import KIB, MIB
from dlfs.connection.unfinished import load_step, load_steps
from dlfs.dataset import committed_steps, second_pass, step_writer
from dlfs.dataset.step_writer import StepWriter
from dlfs.errors import ChecksumError, DegradedError, NotFoundError, SpaceError, UsageError
from dlfs.format.geometry import DataSpace
from dlfs.ingest.attributes import AttributedSource, label_rule
from dlfs.ingest.importer import finish_import, open_source
from dlfs.ingest.progress import Progress
from dlfs.ingest.source import Source
from tests.support.volumes import flip_copies, write_dataset
from tests.unit.ingest.step_sources import SOURCES
from tests.unit.ingest.test_steps import everything, fresh, run

WINDOW_BYTES = 64 * KIB
CHUNK_BYTES = 16 * KIB
CLASSES = 16


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(step_writer, "STAGE_BYTES_SHUFFLED", WINDOW_BYTES)


def archives(place: Path) -> Path:
    """Make compressed archives with samples of many sizes, empty folders, and what is skipped."""
    return SOURCES["tar.gz"](place).path


def opened(path: Path) -> Source:
    source = AttributedSource(open_source(path), [label_rule()])
    source.buffer_bytes = 64 * KIB
    return source


def killed_in_second_pass(path: Path, volume: str, **options: Any) -> None:
    """Import until the second pass has committed a step, and be killed then."""
    for kill_at in range(2, 100):
        assert run(volume, opened(path), kill_at=kill_at, **options) is None
        with dlfs.open(volume) as target:
            if any(info.packed_again for info in target.unfinished()):
                return
    raise AssertionError("the second pass has committed no step")


@pytest.mark.parametrize("kind", ["tar.gz", "parquet", "npz", "mds"])
def test_an_import_killed_in_both_passes_gives_the_same_dataset(tmp_path: Path, kind: str) -> None:
    made = SOURCES[kind](tmp_path)

    def source() -> Source:
        found = open_source(made.path, format_name=made.format_name, options=made.options)
        found.buffer_bytes = 64 * KIB
        return found

    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    report = run(whole, source())
    assert report is not None
    seen: set[int | None] = set()
    found = None
    for kill_at in range(2, 100):
        found = run(killed, source(), kill_at=kill_at)
        if found:
            break
        with dlfs.open(killed) as volume:
            seen |= {info.packed_again for info in volume.unfinished()}
            assert list(volume.verify()) == []
    assert found is not None
    assert len(seen) > 3
    assert found.kept_count == report.sample_count
    assert (dict(found.skipped), found.empty_directories) == (
        dict(report.skipped),
        report.empty_directories,
    )
    assert everything(killed) == everything(whole)
    with dlfs.open(killed) as first, dlfs.open(whole) as second:
        assert first.usage().stored_bytes == second.usage().stored_bytes
        assert first.usage().free_bytes == second.usage().free_bytes


def by_class(writer: StepWriter, count: int, sample_bytes: int, *, small: int = 0) -> None:
    """Add samples class by class; the last of them, as many as ``small``, have ten bytes."""
    lengths = np.full(count, sample_bytes)
    lengths[count - small :] = 10
    for first in range(0, count, 100):
        chosen = lengths[first : first + 100]
        paths = [b"%06d" % number for number in range(first, first + len(chosen))]
        offsets = np.cumsum(chosen) - chosen
        writer.add_batch(paths, bytes(int(chosen.sum())), offsets, chosen)


def classes_by_place(volume: str, count: int) -> NDArray[np.int64]:
    """Return the class of each sample of more than ten bytes, in the order of their addresses."""
    with dlfs.open(volume) as target, target["x"] as dataset:
        directory = dataset.session.directory
        order = np.argsort(directory.addresses(), kind="stable")
        return order[directory.lengths()[order] > 10] * CLASSES // count


def variance(classes: NDArray[np.int64], per_chunk: int) -> float:
    """Return the variance of the classes in chunks, over that of chunks drawn at random."""
    full = len(classes) // per_chunk * per_chunk
    return class_variance(classes[:full].reshape(-1, per_chunk), np.bincount(classes))


@pytest.mark.parametrize("step_bytes", [1 << 40, 300_000], ids=["one step", "steps"])
def test_each_chunk_has_samples_from_everywhere(tmp_path: Path, step_bytes: int) -> None:
    found = {}
    for one_pass in (True, False):
        volume, count = fresh(tmp_path / f"{one_pass}.img"), 2048
        options: dict[str, Any] = {"step_bytes": step_bytes, "one_pass": one_pass, "seed": 1}
        with dlfs.open(volume) as target:
            with target.step_writer("x", {"fingerprint": 1}, **options) as writer:
                by_class(writer, count, 512)  # 16 windows
            assert not writer.warnings
        classes = classes_by_place(volume, count)
        found[one_pass] = variance(classes, CHUNK_BYTES // 512)
        windows = classes.reshape(16, -1)
        assert (len(set(windows[0].tolist())) == CLASSES) is not one_pass
    assert found[True] > 15
    assert found[False] < 1.15


def test_windows_of_other_sample_sizes_are_everywhere_too(tmp_path: Path) -> None:
    volume, count = fresh(tmp_path / "v.img"), 3000
    with (
        dlfs.open(volume) as target,
        target.step_writer("x", {"fingerprint": 1}, seed=1) as writer,
    ):
        by_class(writer, count, 700, small=1000)
    with dlfs.open(volume) as target, target["x"] as dataset:
        directory = dataset.session.directory
        groups = directory.addresses() * 8 // directory.data_bytes
        small = np.bincount(groups[directory.lengths() == 10].astype(np.int64))
        assert len(small) == 8
        assert 0.4 * small.mean() < small.min() <= small.max() < 1.7 * small.mean()


def test_blocks_of_few_large_samples_are_balanced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = second_pass.SecondPass.read

    def noted(self: Any, base: Any, space: Any, batch: Any) -> Any:
        found = read(self, base, space, batch)
        sizes.append(int(found.lengths.sum()))
        return found

    monkeypatch.setattr(second_pass.SecondPass, "read", noted)
    with (
        dlfs.open(fresh(tmp_path / "v.img")) as target,
        target.step_writer("x", {"fingerprint": 1}, seed=1) as writer,
    ):
        by_class(writer, 200, 20_000)  # three of them in a window
    assert sum(sizes) == 200 * 20_000
    assert max(sizes) <= WINDOW_BYTES * 5 // 4


def test_a_sample_larger_than_a_block_is_a_batch(tmp_path: Path) -> None:
    large = bytes(range(250)) * 1000
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        with target.step_writer("x", {"fingerprint": 1}, seed=1) as writer:
            by_class(writer, 300, 900)
            writer.add_batch([b"large", b"z"], large, np.array([0, 5]), np.array([250_000, 9]))
        with target["x"] as dataset:
            assert dataset.get("large") == large
            assert dataset.get("z") == large[5:14]
            assert len(dataset) == 302
        assert list(target.verify()) == []


def test_few_windows_have_one_pass(tmp_path: Path) -> None:
    calls: list[object] = []
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        for options in ({}, {"layout": "path"}, {"source_shuffled": True}, {"one_pass": True}):
            name = f"x{len(options)}-{options.get('layout')}-{options.get('one_pass')}"
            count = 20 if not options else 300
            with target.step_writer(
                name, {}, on_second_pass=lambda *given: calls.append(given), **options
            ) as writer:
                by_class(writer, count, 900)
        assert calls == []


def test_an_import_is_finished_without_its_source(tmp_path: Path) -> None:
    path, whole, volume = archives(tmp_path), fresh(tmp_path / "w.img"), fresh(tmp_path / "v.img")
    report = run(whole, opened(path))
    assert report is not None
    killed_in_second_pass(path, volume)
    shutil.rmtree(path.parent)
    shown: list[Progress] = []
    with dlfs.open(volume) as target:
        (info,) = target.unfinished()
        assert info.packed_again is not None
        assert 0 < info.packed_again < info.sample_count == report.sample_count
        assert info.sample_bytes == report.sample_bytes
        assert target.usage().unfinished_bytes == info.stored_bytes > 1.5 * info.sample_bytes
        found = finish_import(target, "x", shown.append)
        with pytest.raises(NotFoundError, match="whose source has been read"):
            finish_import(target, "x")
    assert everything(volume) == everything(whole)
    assert found.skipped == report.skipped
    assert found.empty_directories == report.empty_directories == 2
    assert all(each.second_pass for each in shown)
    assert shown[0].samples_done == info.packed_again
    assert shown[-1].samples_done == shown[-1].samples_total == report.sample_count


def test_a_source_that_was_read_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, volume = archives(tmp_path), fresh(tmp_path / "v.img")
    killed_in_second_pass(path, volume)
    source = opened(path)

    def blocks(**_options: Any) -> Any:
        raise AssertionError("the source is read again")

    monkeypatch.setattr(source, "blocks", blocks)
    assert run(volume, source) is not None


def test_the_number_of_passes_is_part_of_an_import(tmp_path: Path) -> None:
    path, volume = archives(tmp_path), fresh(tmp_path / "v.img")
    killed_in_second_pass(path, volume)
    with pytest.raises(UsageError, match="its source, or options of it, are not those of now"):
        run(volume, opened(path), one_pass=True)


def test_abandoning_frees_both_passes(tmp_path: Path) -> None:
    path, volume = archives(tmp_path), fresh(tmp_path / "v.img")
    with dlfs.open(volume) as target:
        before = target.usage().free_bytes
    killed_in_second_pass(path, volume)
    with dlfs.open(volume) as target:
        target.abandon("x")
        assert target.usage().free_bytes == before
        assert target.unfinished() == []


def test_moved_chunks_of_both_passes_are_found(tmp_path: Path) -> None:
    path, whole, volume = archives(tmp_path), fresh(tmp_path / "w.img"), fresh(tmp_path / "v.img")
    run(whole, opened(path))
    killed_in_second_pass(path, volume)
    members = [volume, str(tmp_path / "more.img")]
    with dlfs.open(volume) as target:
        target.grow([members[1]], size_bytes=32 * MIB)
    with dlfs.open(members) as target:
        target.rebalance()
    with dlfs.open(members) as target:
        assert list(target.verify()) == []
        finish_import(target, "x")
    assert everything(",".join(members))[:7] == everything(whole)[:7]


def test_others_move_chunks_between_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, volume = archives(tmp_path), fresh(tmp_path / "w.img"), fresh(tmp_path / "v.img")
    run(whole, opened(path))
    members = [volume, str(tmp_path / "more.img")]
    with dlfs.open(volume) as target:
        target.grow([members[1]], size_bytes=32 * MIB)
    moved: list[int] = []

    def pause() -> None:
        with dlfs.open(members) as other:
            write_dataset(other, f"other-{len(moved)}", {"a": bytes(50_000)})
            moved.append(other.rebalance().moved_bytes)

    monkeypatch.setattr(committed_steps, "let_others_lock", pause)
    with dlfs.open(members) as target:
        assert run(",".join(members), opened(path)) is not None
        target.refresh()
        assert list(target.verify()) == []
    assert len(moved) > 8
    assert everything(",".join(members))[:4] == everything(whole)[:4]


# ---- space ---------------------------------------------------------------------------------------


def test_without_room_the_samples_stay_in_windows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = archives(tmp_path)
    expected = {}
    for one_pass in (False, True):
        volume = fresh(tmp_path / f"{one_pass}.img")
        run(volume, opened(path), one_pass=one_pass)
        expected[one_pass] = everything(volume)[:7]
    outcomes = []
    for size_bytes in range(2 * MIB, 8 * MIB, 512 * KIB):
        volume = str(tmp_path / f"{size_bytes}.img")
        dlfs.format_volume(volume, size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES)
        caplog.clear()
        try:
            report = run(volume, opened(path))
        except SpaceError:
            outcomes.append(0)
            continue
        assert report is not None
        if report.warnings:
            assert "within windows of 64.0 KiB only: the second pass needs" in report.warnings[0]
            assert report.warnings[0] in caplog.text
        outcomes.append(1 if report.warnings else 2)
        assert everything(volume)[:7] == expected[bool(report.warnings)]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1, 2}


def test_too_little_room_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = str(tmp_path / "v.img")
    dlfs.format_volume(volume, size_bytes=4 * MIB, chunk_bytes=CHUNK_BYTES)
    with dlfs.open(volume) as target:
        options: dict[str, Any] = {"expected_bytes": 2_000_000, "expected_samples": 2000}
        with target.step_writer("x", {}, **options) as writer:
            assert "the second pass needs" in caplog.text
            by_class(writer, 2000, 1000)
        assert len(writer.warnings) == 1
        assert len(target["x"]) == 2000


def test_room_that_others_took_ends_the_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, volume = archives(tmp_path), fresh(tmp_path / "v.img")
    killed_in_second_pass(path, volume)
    with dlfs.open(volume) as target:
        free = target.usage().free_bytes
        write_dataset(target, "other", {"a": bytes(free - 600 * KIB)})
        report = finish_import(target, "x")
        assert "there was no room for the second pass" in report.warnings[0]
        assert target.unfinished() == []
        target.remove("other")
    one = fresh(tmp_path / "one.img")
    run(one, opened(path), one_pass=True)
    assert everything(volume)[:7] == everything(one)[:7]


# ---- damage --------------------------------------------------------------------------------------


def damaged(volume: str, *copies: int) -> bytes:
    """Damage copies of the largest sample of the first step; return its path."""
    with dlfs.open(volume) as target, target._transaction("a test") as transaction:
        base = transaction.base
        record = base.catalog.find_unfinished(b"x")
        assert record is not None
        directory, _ = load_step(base, record, load_steps(base, record).steps[0])
        with directory:
            index = int(np.argmax(directory.lengths()))
            address = int(directory.addresses([index])[0])
            path = directory.name(index)
        flip_copies(base, DataSpace(base.geometry, record.data_runs), address + 100, *copies)
    return path


def killed_before_second_pass(path: Path, volume: str) -> None:
    """Import until the source has been read, and be killed then."""
    kill_at = 1
    with dlfs.open(volume) as target:
        while not any(info.packed_again == 0 for info in target.unfinished()):
            kill_at += 1
            assert run(volume, opened(path), kill_at=kill_at) is None
            target.refresh()


def test_a_damaged_sample_of_the_first_pass_is_named(tmp_path: Path) -> None:
    path, volume = archives(tmp_path), fresh(tmp_path / "v.img")
    killed_before_second_pass(path, volume)
    name = damaged(volume, 0)
    with dlfs.open(volume) as target:
        assert [finding.path for finding in target.verify()] == [name]
        with pytest.raises(ChecksumError, match=f"read sample '{name.decode()}' of the unfin") as e:
            finish_import(target, "x")
        assert any("are kept as an unfinished import" in note for note in e.value.__notes__)


def test_a_damaged_copy_is_read_from_another_one(tmp_path: Path) -> None:
    path, whole = archives(tmp_path), fresh(tmp_path / "whole.img")
    run(whole, opened(path))
    members = [str(tmp_path / f"{number}.img") for number in range(2)]
    dlfs.format_volume(members, size_bytes=32 * MIB, chunk_bytes=CHUNK_BYTES, replicas=2)
    volume = ",".join(members)
    killed_before_second_pass(path, volume)
    damaged(volume, 0)
    with dlfs.open(volume) as target:
        finish_import(target, "x")
        assert list(target.verify()) == []
    assert everything(volume)[:7] == everything(whole)[:7]


def test_a_second_pass_waits_for_a_missing_member(tmp_path: Path) -> None:
    path, whole = archives(tmp_path), fresh(tmp_path / "whole.img")
    run(whole, opened(path))
    members = [tmp_path / f"{number}.img" for number in range(3)]
    volume = ",".join(map(str, members))
    dlfs.format_volume(volume, size_bytes=32 * MIB, chunk_bytes=CHUNK_BYTES, replicas=2)
    killed_in_second_pass(path, volume)
    members[1].rename(tmp_path / "away")
    with dlfs.open(volume) as target, pytest.raises(DegradedError, match=r"member 1 .* missing"):
        finish_import(target, "x")
    (tmp_path / "away").rename(members[1])
    with dlfs.open(volume) as target:
        finish_import(target, "x")
        assert list(target.verify()) == []
    assert everything(volume)[:7] == everything(whole)[:7]


def test_appended_samples_have_a_second_pass_too(tmp_path: Path) -> None:
    path, whole, volume = archives(tmp_path), fresh(tmp_path / "w.img"), fresh(tmp_path / "v.img")
    options: dict[str, Any] = {"append": True, "defaults": {"more": 3, "label": "none"}}
    for target in (whole, volume):
        write_dataset(target, "x", {f"old/{number}": bytes([number]) * 900 for number in range(9)})
    assert run(whole, opened(path), **options) is not None
    killed_in_second_pass(path, volume, **options)
    with dlfs.open(volume) as target:
        report = finish_import(target, "x")
        assert (report.dataset.version, report.dataset.sample_count) == (2, report.kept_count + 9)
        assert target["x"].column("more").tolist() == [3] * report.dataset.sample_count
    assert everything(volume) == everything(whole)
