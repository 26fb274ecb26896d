"""Imports that leave bad records out go on after a kill with the same result."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.arguments import Layout
from dlfs.dataset import committed_steps
from dlfs.errors import DlfsError, FormatError
from dlfs.ingest import files
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.attributes import AttributedSource, PathRule
from dlfs.ingest.bad_records import BadRecords, SkipBad, TooManyBadError
from dlfs.ingest.importer import ImportReport, open_source
from dlfs.ingest.source import SampleBlock, Source
from tests.unit.ingest.test_bad_records import (
    COUNT,
    WRITERS,
    Write,
    Written,
    each_format,
    write_examples,
    write_folder,
    write_tfrecord,
)
from tests.unit.ingest.test_steps import everything, fresh, run

STEP_BYTES = 40  # two samples
BAD = {1, 4, 5, 8}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def opened(written: Written, skip_bad: int | str | None = COUNT) -> Source:
    source = open_source(written.path, skip_bad=skip_bad, **written.options)
    source.buffer_bytes = 50
    return source


def go_on(volume: str, written: Written, skip_bad: int | str = COUNT, **options: Any) -> Any:
    """Import, and be killed after each number of blocks, until the import is complete."""
    kept: list[int] = []
    for kill_at in range(2, 4 * COUNT):
        source = opened(written, skip_bad)
        report = run(volume, source, kill_at=kill_at, step_bytes=STEP_BYTES, **options)
        if report is not None:
            return report, kept
        with dlfs.open(volume) as target:
            kept += [info.sample_count for info in target.unfinished()]
    raise AssertionError


def facts(report: ImportReport) -> tuple[Any, ...]:
    count = report.kept_count + report.sample_count
    records = sorted((one.source, one.record, one.reason) for one in report.bad.records)
    return count, dict(report.skipped), report.bad.count, dict(report.bad.reasons), records


@each_format
@pytest.mark.parametrize("layout", ["shuffled", "path"])
def test_bad_records_count_once_over_kills(tmp_path: Path, write: Write, layout: Layout) -> None:
    written = write(tmp_path / "source", BAD)
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    report = run(whole, opened(written), step_bytes=STEP_BYTES, layout=layout)
    assert report is not None
    assert report.bad.count == len(BAD)
    found, kept = go_on(killed, written, layout=layout)
    assert kept == sorted(kept)
    assert kept
    assert facts(found) == facts(report)
    assert everything(killed) == everything(whole)
    with dlfs.open(killed) as volume, volume["x"] as dataset:
        assert dataset.bad_records() == found.bad


@each_format
def test_limits_hold_over_kills(tmp_path: Path, write: Write) -> None:
    written, volume = write(tmp_path / "source", BAD), fresh(tmp_path / "v.img")
    limit = len(BAD) - 1 if WRITERS.index(write) % 2 else "44%"
    with pytest.raises(TooManyBadError, match=r"got 4( of 9 records)?; "):
        go_on(volume, written, limit)
    report, _ = go_on(volume, written, "45%")
    assert report.bad.count == len(BAD)


def test_files_before_the_cursor_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, volume = write_folder(tmp_path / "source", BAD), fresh(tmp_path / "v.img")
    assert run(volume, opened(written), kill_at=3, step_bytes=STEP_BYTES) is None
    read, counts = files.read_files, list[int]()

    def counted(directory: int, names: Any, chosen: Any, *rest: Any, **named: Any) -> int:
        counts.append(len(chosen))
        return read(directory, names, chosen, *rest, **named)

    monkeypatch.setattr(files, "read_files", counted)
    report = run(volume, opened(written), step_bytes=STEP_BYTES)
    assert report is not None
    assert report.kept_count > 0
    assert sum(counts) == report.sample_count


@pytest.mark.parametrize("write", [write_tfrecord, write_examples])
def test_records_before_the_cursor_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    written, volume = write(tmp_path / "source", {1, 8}), fresh(tmp_path / "v.img")
    assert run(volume, opened(written), kill_at=5, step_bytes=STEP_BYTES, layout="path") is None
    with dlfs.open(volume) as target:
        (unfinished,) = target.unfinished()
    read, places_read = RangeReader.read_ranges, list[int]()

    def counted(self: RangeReader, places: Any, buffer: Any) -> Any:
        places_read.extend(places[1].tolist())
        return read(self, places, buffer)

    monkeypatch.setattr(RangeReader, "read_ranges", counted)
    assert run(volume, opened(written), step_bytes=STEP_BYTES, layout="path") is not None
    first = write is write_examples  # it says what the others have
    assert len(places_read) == COUNT - unfinished.sample_count - 1 + first


def test_an_import_that_a_bad_record_ended_goes_on_when_it_is_allowed(tmp_path: Path) -> None:
    written, volume = write_tfrecord(tmp_path / "source", {6}), fresh(tmp_path / "v.img")
    whole = fresh(tmp_path / "whole.img")
    options: dict[str, Any] = {"step_bytes": STEP_BYTES, "layout": "path"}
    with pytest.raises(DlfsError, match="record 6"):
        run(volume, opened(written, None), **options)
    report = run(volume, opened(written), **options)
    assert report is not None
    assert report.kept_count > 0
    assert report.bad.count == 1
    assert run(whole, opened(written), **options) is not None
    assert everything(volume)[0] == everything(whole)[0]


def test_what_was_left_out_is_not_forgotten(tmp_path: Path) -> None:
    written, volume = write_tfrecord(tmp_path / "source", {0}), fresh(tmp_path / "v.img")
    options: dict[str, Any] = {"step_bytes": STEP_BYTES, "layout": "path"}
    assert run(volume, opened(written), kill_at=4, **options) is None
    with pytest.raises(TooManyBadError, match="the unfinished import has left out 1"):
        run(volume, opened(written, None), **options)


class ListedSource(Source):
    """A source of samples of given paths, one in each block, which can go on nowhere."""

    gives_shuffled = True
    name = fingerprint = "listed"

    def __init__(self, *paths: bytes) -> None:
        self._paths = paths
        self.bad = BadRecords(SkipBad(9))

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        for number, path in enumerate(self._paths):
            data = np.full(50, number, np.uint8)
            yield SampleBlock([path], data, np.zeros(1, np.int64), np.array([50]))


@pytest.mark.parametrize("kill_at", [None, 3, 7, 9])
def test_paths_that_an_earlier_step_has_are_left_out(tmp_path: Path, kill_at: int | None) -> None:
    volume = fresh(tmp_path / "v.img")
    paths = [b"a", b"b/c/d", b"a", b"b/c", b"a/x", b"e", b"b", b"f"]
    if kill_at is not None:
        assert run(volume, ListedSource(*paths), kill_at=kill_at, step_bytes=1) is None
    report = run(volume, ListedSource(*paths), step_bytes=1)
    assert report is not None
    assert dict(report.bad.reasons) == {"path of another sample": 4}
    assert [one.record for one in report.bad.records] == ["a", "b/c", "a/x", "b"]
    with dlfs.open(volume) as target, target["x"] as dataset:
        assert dataset.paths() == [b"a", b"b/c/d", b"e", b"f"]
        assert dataset.get("a")[:1] == b"\0"


@pytest.mark.parametrize("kill_at", [None, 3, 7, 9])
def test_paths_that_the_earlier_version_has_are_left_out(
    tmp_path: Path, kill_at: int | None
) -> None:
    volume = fresh(tmp_path / "v.img")
    paths = [b"d", b"a", b"d", b"b", b"e", b"b/c/x"]
    assert run(volume, ListedSource(b"a", b"b/c", b"a"), step_bytes=1) is not None
    if kill_at is not None:
        source = ListedSource(*paths)
        assert run(volume, source, kill_at=kill_at, step_bytes=1, append=True) is None
    report = run(volume, ListedSource(*paths), step_bytes=1, append=True)
    assert report is not None
    assert [one.record for one in report.bad.records] == ["a", "d", "b", "b/c/x"]
    with dlfs.open(volume) as target, target["x"] as dataset:
        assert dataset.paths() == [b"a", b"b/c", b"d", b"e"]
        found = [(one.record, one.version) for one in dataset.bad_records().records]
        assert found == [("a", 1), ("a", None), ("d", None), ("b", None), ("b/c/x", None)]


def test_samples_without_an_attribute_count_once(tmp_path: Path) -> None:
    written, volume = write_folder(tmp_path / "source", set()), fresh(tmp_path / "v.img")
    report = None
    for kill_at in range(2, 4 * COUNT):
        rule = PathRule("number", r"([0-46-9])\.bin", "int")
        source = AttributedSource(opened(written), [rule])
        source.buffer_bytes = 50
        report = run(volume, source, kill_at=kill_at, step_bytes=STEP_BYTES)
        if report is not None:
            break
    assert report is not None
    assert report.kept_count > 0
    assert report.bad.count == 1
    with dlfs.open(volume) as target, target["x"] as dataset:
        assert dataset.column("number").tolist() == [0, 1, 2, 3, 4, 6, 7, 8]


def test_what_is_read_ahead_does_not_count_yet() -> None:
    bad = BadRecords(SkipBad(2))
    with bad.hold_back() as held:
        bad.note("x", "1", FormatError("short"))
        bad.note("x", "2", FormatError("short"))
        with pytest.raises(TooManyBadError, match="got 3; such as x: 3: short"):
            bad.note("x", "3", FormatError("short"))
    assert bad.count == 0
    bad.release(held)
    assert bad.count == 3
    assert [one.record for one in bad.report().records] == ["1", "2", "3"]
