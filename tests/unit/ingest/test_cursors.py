"""An import goes on at the last cursor that its source gave, also in an isolated process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.dataset import committed_steps
from dlfs.format.journal import CURSOR_BYTES_MAX
from dlfs.ingest.attributes import AttributedSource, PathRule
from dlfs.ingest.isolation.source import IsolatedSource
from dlfs.ingest.records import join_blocks
from dlfs.ingest.source import (
    SampleBlock,
    Source,
    choose_samples,
    slice_samples,
    without_first,
)
from tests.unit.ingest.cursor_source import BLOCKS, EVERY, LENGTH, ROWS, CursorOptions
from tests.unit.ingest.test_steps import everything, fresh, run


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def attributed(path: str) -> Source:
    return AttributedSource(CursorOptions().open([path]), [PathRule.parse("block:int=^([0-9]+)/")])


MAKERS: dict[str, Callable[[str], Source]] = {
    "here": lambda path: CursorOptions().open([path]),
    "isolated": lambda path: IsolatedSource(CursorOptions(), [path]),
    "attributed": attributed,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_import_goes_on_at_the_last_cursor(tmp_path: Path, kind: str) -> None:
    path, volume, whole = tmp_path / "read", fresh(tmp_path / "v"), fresh(tmp_path / "w")

    def opened() -> Source:
        path.write_text("")
        source = MAKERS[kind](str(path))
        source.fingerprint = "1"
        return source

    first, report = 0, None
    for kill_at in (5, 9, 3, 14, None):
        report = run(volume, opened(), kill_at=kill_at, layout="path", step_bytes=7 * LENGTH)
        read = [int(line) for line in path.read_text().split()]
        assert read[0] == first
        with dlfs.open(volume) as target:
            samples = sum(info.sample_count for info in target.unfinished())
        complete = samples // ROWS  # blocks that the steps have used
        first = (complete - 1) // EVERY * EVERY + 1 if complete else 0
    assert report is not None
    assert dict(report.skipped) == {"left out": BLOCKS}
    assert run(whole, opened(), layout="path", step_bytes=7 * LENGTH) is not None
    assert everything(volume) == everything(whole)


def test_a_cursor_without_room_is_passed_over(tmp_path: Path) -> None:
    path, volume = tmp_path / "read", fresh(tmp_path / "v")
    for kill_at in (20, None):
        path.write_text("")
        source = CursorOptions(too_long=True).open([str(path)])
        run(volume, source, kill_at=kill_at, layout="path", step_bytes=7 * LENGTH)
    assert path.read_text().split() == [str(number) for number in range(BLOCKS)]
    with dlfs.open(volume) as target, target["x"] as dataset:
        assert len(dataset) == BLOCKS * ROWS


def test_the_longest_cursor_is_kept(tmp_path: Path) -> None:
    value = {"x": "y" * (CURSOR_BYTES_MAX - len('{"x":""}'))}
    with dlfs.open(fresh(tmp_path / "v")) as target:
        options = {"step_bytes": 1, "layout": "path"}
        samples = [b"a", b"b"], bytes(2), np.arange(2), np.ones(2, np.int64)
        for cursor, expected in ((value, value), ({"x": value["x"] + "y"}, value), (None, value)):
            writer = target.step_writer("x", {}, **options)
            writer.add_batch(*samples, cursor=cursor)
            writer.abort()
            target.refresh()
            writer = target.step_writer("x", {}, **options)
            assert writer.cursor is not None
            assert (writer.cursor.value, writer.cursor.count) == (expected, 2)
            writer.abort()


def test_a_block_that_is_cut_keeps_its_cursor_with_its_last_sample() -> None:
    def block(cursor: dict[str, int] | None) -> SampleBlock:
        lengths = np.ones(3, np.int64)
        return SampleBlock(
            [b"a", b"b", b"c"], np.zeros(3, np.uint8), np.arange(3), lengths, cursor=cursor
        )

    cursor = {"x": 1}
    whole = block(cursor)
    assert slice_samples(whole, 0, 2).cursor is None
    assert slice_samples(whole, 2, 1).cursor == slice_samples(whole, 0, 3).cursor == cursor
    assert choose_samples(whole, [True, True, False]).cursor == cursor
    assert [one.cursor for one in without_first([whole], 2)] == [cursor]
    joined = list(join_blocks([block(None), whole, block(None), block({"x": 2})], 6))
    assert [one.cursor for one in joined] == [cursor, {"x": 2}]
