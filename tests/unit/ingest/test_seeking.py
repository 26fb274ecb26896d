"""An import that goes on reads what the last step had not, and gives what one import gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB
from dlfs.dataset import committed_steps
from dlfs.ingest import files
from dlfs.ingest.archives.archive import Archive
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.archives.zip_archive import ZipArchive
from dlfs.ingest.formats import mds
from dlfs.ingest.formats.npy import NpyFile, NpzFile
from dlfs.ingest.importer import ImportReport, open_source
from dlfs.ingest.patterns import expand
from dlfs.ingest.records import ShardSource
from dlfs.ingest.registry import find_format, make_options
from dlfs.ingest.source import Source
from dlfs.ingest.tables import files as tables
from dlfs.ingest.tables import json_lines
from tests.unit.ingest.step_sources import GROUP, SOURCES, Made
from tests.unit.ingest.test_steps import everything, fresh, run


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", 50_000)


def opened(made: Made) -> Source:
    source = open_source(made.path, format_name=made.format_name, options=made.options)
    source.buffer_bytes = 64 * KIB
    return source


def opened_here(made: Made) -> Source:
    """Open a source in this process, also one that is isolated otherwise."""
    row = find_format(made.format_name)
    source = make_options(row, made.options).open(expand(str(made.path)))
    source.buffer_bytes = 64 * KIB
    if source.fingerprint is None:
        source.fingerprint = "unchanged"
    return source


def facts(report: ImportReport) -> tuple[Any, ...]:
    """Return what a report says that does not depend on the number of imports."""
    total = report.kept_count + report.sample_count
    return total, dict(report.skipped), report.empty_directories


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_killed_import_goes_on_to_the_same_dataset(
    tmp_path: Path, kind: str, layout: str
) -> None:
    made = SOURCES[kind](tmp_path)
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    report = run(whole, opened(made), layout=layout)
    assert report is not None
    kept = []
    found = None
    for kill_at in range(2, 60):
        found = run(killed, opened(made), layout=layout, kill_at=kill_at)
        if found:
            break
        with dlfs.open(killed) as volume:
            kept += [info.sample_count for info in volume.unfinished()]
    assert found is not None
    assert kept == sorted(kept)
    assert len(set(kept)) > 1
    assert facts(found) == facts(report)
    assert everything(killed) == everything(whole)


def rows_of_groups(_file: object, *_rest: Any, row_groups: list[int], **_named: Any) -> int:
    return GROUP * len(row_groups)


def _module(name: str) -> Any:
    return pytest.importorskip(name)


READS: dict[str, tuple[Callable[[], Any], str, Callable[..., int], int]] = {
    "folder": (lambda: files, "read_files", lambda _d, _n, chosen, *_, **__: len(chosen), 0),
    "list": (lambda: files, "read_files", lambda _d, _n, chosen, *_, **__: len(chosen), 0),
    "tar": (lambda: RangeReader, "read_ranges", lambda _, places, __: places.shape[1], 0),
    "tfrecord": (lambda: RangeReader, "read_ranges", lambda _, places, __: places.shape[1], 0),
    "arrayrecord": (
        lambda: _module("array_record.python.array_record_module").ArrayRecordReader,
        "read",
        lambda _: 1,
        1,
    ),
    "webdataset": (lambda: Archive, "read", lambda _, one: one.path.endswith(b".bin"), 0),
    "tar.gz": (lambda: Archive, "read", lambda *_: 1, 0),
    "zip": (lambda: ZipArchive, "read_into", lambda *_: 1, 0),
    "parquet": (lambda: _module("pyarrow.parquet").ParquetFile, "iter_batches", rows_of_groups, 1),
    "parquet-nulls": (
        lambda: _module("pyarrow.parquet").ParquetFile,
        "iter_batches",
        rows_of_groups,
        2,  # and the rows without a value
    ),
    "examples": (lambda: RangeReader, "read_ranges", lambda _, places, __: places.shape[1], 1),
    "arrow-file": (lambda: tables, "_validated", lambda batch: batch.num_rows, 1),
    "arrow-stream": (lambda: tables, "_validated", lambda batch: batch.num_rows, 1),
    "jsonl": (lambda: json_lines, "_sound_parts", lambda rows, _: sum(map(bool, rows)), 1),
    "hdf5": (lambda: _hdf5(), "read", lambda _file, _array, _first, out: len(out), 1),
    "npy": (lambda: NpyFile, "read", lambda _file, _array, _first, out: len(out), 1),
    "npz": (lambda: NpzFile, "read", lambda _file, _array, _first, out: len(out), 1),
    "zarr": (lambda: _zarr(), "read", lambda _file, _array, _first, out: len(out), 1),
    "lmdb": (lambda: RangeReader, "read_ranges", lambda _, places, __: places.shape[1], 0),
    "mds": (lambda: mds, "_read", lambda *_: GROUP, 1),
}
"""For each kind: what reads samples or rows, how many a call reads, and units read in part."""


def _hdf5() -> Any:
    from dlfs.ingest.formats.hdf5.source import Hdf5File

    return Hdf5File


def _zarr() -> Any:
    from dlfs.ingest.formats.zarr.source import ZarrFile

    return ZarrFile


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("kind", READS)
def test_what_earlier_steps_have_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    place, name, measure, parts = READS[kind]
    made, volume, owner = SOURCES[kind](tmp_path), fresh(tmp_path / "v.img"), place()
    read = getattr(owner, name)
    counts: list[int] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        counts.append(measure(*arguments, **named))
        return read(*arguments, **named)

    blocks = {"mds": 5, "jsonl": 40}.get(kind, 9)  # that are added before the kill
    assert run(volume, opened_here(made), kill_at=blocks, layout=layout) is None
    with dlfs.open(volume) as target:
        (unfinished,) = target.unfinished()
    assert unfinished.sample_count
    source = opened_here(made)
    monkeypatch.setattr(owner, name, counted)
    report = run(volume, source, layout=layout)
    assert report is not None
    assert report.kept_count == unfinished.sample_count
    assert 0 <= sum(counts) - report.sample_count <= parts * GROUP


@pytest.mark.parametrize("kind", ["tar.gz-files", "tfrecord.gz", "webdataset", "mds"])
def test_files_before_that_of_the_last_step_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made, volume = SOURCES[kind](tmp_path), fresh(tmp_path / "v.img")
    assert run(volume, opened_here(made), kill_at=5 if kind == "mds" else 16, layout="path") is None
    source = opened_here(made)
    assert isinstance(source, ShardSource)
    read, numbers = type(source).read_shard, list[int]()

    def noted(self: ShardSource, number: int) -> Any:
        numbers.append(number)
        return read(self, number)

    monkeypatch.setattr(type(source), "read_shard", noted)
    report = run(volume, source, layout="path")
    assert report is not None
    assert report.kept_count > 0
    assert 0 < len(numbers) < len(source.shards)
