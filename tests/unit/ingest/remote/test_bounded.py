"""Imports of objects of which only some are copied at a time."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB
from dlfs.dataset import committed_steps
from dlfs.errors import FormatError, SpaceError, UsageError
from dlfs.ingest import importer
from dlfs.ingest.importer import ImportReport, open_source
from dlfs.ingest.remote import failures
from dlfs.ingest.remote.blocks import BlockDivision
from dlfs.ingest.remote.stores import Store
from dlfs.ingest.source import Source
from tests.support.files import write_files
from tests.unit.ingest import test_bad_records
from tests.unit.ingest.array_writers import write_hdf5
from tests.unit.ingest.remote.watching import Watch
from tests.unit.ingest.step_sources import SOURCES
from tests.unit.ingest.test_seeking import facts
from tests.unit.ingest.test_steps import everything, fresh, run

fsspec = pytest.importorskip("fsspec")
LIMIT = 128 * KIB
FILES = {
    f"c{i % 3}/{i:03}.bin": random.Random(i).randbytes((0, 100, 5000, 40_000)[i % 4])
    for i in range(120)
}
SHARDS = ["tar", "tar.gz", "zip", "webdataset", "tfrecord", "examples", "arrayrecord", "parquet"]
SHARDS += ["parquet-nulls", "arrow-file", "jsonl"]


class Reads(Watch):
    """Counts the reads of each object, too."""

    def __init__(self, spool: Path) -> None:
        super().__init__(spool)
        self.reads: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system of ``memory://``, with ``FILES`` in the folder ``data``."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, data in FILES.items():
        system.pipe(f"/data/{name}", data)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Count the reads of each object, and measure the spool directory."""
    seen, read = Reads(tmp_path / "spool"), Store.read

    def noted(self: Store, item: Any, *rest: Any) -> Any:
        seen.reads[item.name or item.url] += 1
        return read(self, item, *rest)

    monkeypatch.setattr(Store, "read", noted)
    seen.install(monkeypatch.setattr)
    return seen


def opened(place: Path, url: str = "memory://data", limit: int = LIMIT, **options: Any) -> Source:
    source = open_source(url, spool=place / "spool", spool_bytes=limit, **options)
    source.buffer_bytes = 32 * KIB
    return source


def order(volume: str) -> list[bytes]:
    """Return the paths of all samples of some bytes in the order of packing."""
    found = everything(volume)
    chosen = np.argsort(np.array(found[1]), kind="stable")
    return [found[0][place] for place in chosen if found[2][place]]


def blocks_of(path: Path, format_name: str, layout: Any) -> Iterator[set[bytes]]:
    """Yield the paths of the samples of some bytes in each block of a folder."""
    source = open_source(path, format_name=format_name)
    source.buffer_bytes = 32 * KIB
    with closing(source), closing(source.blocks(layout=layout, seed=3)) as blocks:
        for block in blocks:
            yield {path for path, size in zip(block.paths, block.lengths, strict=True) if size}


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("format_name", ["auto", "imagefolder"])
def test_a_folder_is_imported_through_a_small_spool(
    memory: Any, tmp_path: Path, watch: Reads, format_name: str, layout: str
) -> None:
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    write_files(tmp_path / "data", FILES)
    local = open_source(tmp_path / "data", format_name=format_name)
    local.buffer_bytes = 32 * KIB
    expected = run(whole, local, layout=layout)
    report = run(volume, opened(tmp_path, format_name=format_name), layout=layout)
    assert report is not None
    assert expected is not None
    assert facts(report) == facts(expected)
    packed = iter(order(volume))
    for block in blocks_of(tmp_path / "data", format_name, layout):
        assert {next(packed) for _ in block} == block
    assert next(packed, None) is None
    found, wanted = everything(volume), everything(whole)
    assert [found[i] for i in (0, 2, 3, 5, 6, 7)] == [wanted[i] for i in (0, 2, 3, 5, 6, 7)]
    assert 40 * KIB < watch.most_bytes <= LIMIT
    assert {name: 1 for name, data in FILES.items() if data} == watch.reads
    assert list((tmp_path / "spool").iterdir()) == []


def killed(
    place: Path, volume: str, watch: Reads, *, layout: str = "shuffled", **options: Any
) -> ImportReport:
    """Import; be killed again and again, and go on."""
    for kill_at in range(2, 200, 3):
        report = run(volume, opened(place, **options), layout=layout, kill_at=kill_at)
        watch.look()
        if report:
            return report
    raise AssertionError


@pytest.mark.parametrize("layout", ["shuffled", "path"])
def test_a_killed_import_of_a_folder_fetches_nothing_twice(
    memory: Any, tmp_path: Path, watch: Reads, layout: str
) -> None:
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    assert run(whole, opened(tmp_path), layout=layout) is not None
    watch.reads.clear()
    killed(tmp_path, volume, watch, layout=layout)
    assert everything(volume) == everything(whole)
    assert {name: 1 for name, data in FILES.items() if data} == watch.reads
    assert watch.most_bytes <= LIMIT


def test_an_object_larger_than_the_spool_is_fetched_alone(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    memory.pipe("/data/c1/large", bytes(300_000))
    memory.pipe("/data/c2/large", bytes(100_000))
    volume = fresh(tmp_path / "v.img")
    assert run(volume, opened(tmp_path)) is not None
    assert len(everything(volume)[0]) == len(FILES) + 2
    assert watch.most_bytes <= 303_104
    assert set(watch.reads.values()) == {1}


def test_a_copy_that_was_damaged_on_the_disk_is_fetched_again(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    assert run(whole, opened(tmp_path)) is not None
    watch.reads.clear()
    assert run(volume, opened(tmp_path), kill_at=20) is None
    blocks = [*(tmp_path / "spool").glob("*/blocks/*/*")]
    assert blocks
    for block in blocks:
        block.write_bytes(bytes(block.stat().st_size))
    assert run(volume, opened(tmp_path)) is not None
    assert everything(volume) == everything(whole)
    assert max(watch.reads.values()) == 2
    assert min(watch.reads.values()) == 1  # of those whose samples were committed


def test_a_spool_that_was_deleted_costs_nothing_of_what_is_committed(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    assert run(whole, opened(tmp_path)) is not None
    assert run(volume, opened(tmp_path), kill_at=30) is None
    shutil.rmtree(tmp_path / "spool")
    watch.reads.clear()
    with dlfs.open(volume) as target:
        (unfinished,) = target.unfinished()
    assert run(volume, opened(tmp_path)) is not None
    assert watch.reads.total() < len(FILES) - unfinished.sample_count
    assert everything(volume) == everything(whole)


def test_an_abandoned_import_in_another_order_leaves_no_copies(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    volume = fresh(tmp_path / "v.img")
    assert run(volume, opened(tmp_path), kill_at=20) is None
    with dlfs.open(volume) as target:
        target.abandon("x")
    assert run(volume, opened(tmp_path), seed=9) is not None
    assert watch.most_bytes <= LIMIT
    assert max(watch.reads.values()) == 2


def test_appending_leaves_known_objects_out(memory: Any, tmp_path: Path, watch: Reads) -> None:
    volume = fresh(tmp_path / "v.img")
    write_files(tmp_path / "data", dict(list(FILES.items())[:60]))
    assert run(volume, open_source(tmp_path / "data")) is not None
    options = {"append": True, "skip_existing": True}
    report = run(volume, opened(tmp_path), **options)
    assert report is not None
    assert report.sample_count == 60
    assert watch.most_bytes <= LIMIT
    assert {name: 1 for name, data in list(FILES.items())[60:] if data} == watch.reads


def test_bad_objects_are_left_out(memory: Any, tmp_path: Path, watch: Reads) -> None:
    memory.pipe("/data/no-class", b"x")
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    options: dict[str, Any] = {"format_name": "imagefolder", "skip_bad": 1}
    assert run(whole, opened(tmp_path, **options)) is not None
    watch.reads.clear()
    report = killed(tmp_path, volume, watch, **options)
    assert (report.bad.count, report.kept_count + report.sample_count) == (1, len(FILES))
    assert everything(volume) == everything(whole)
    assert watch.most_bytes <= LIMIT
    assert set(watch.reads.values()) == {1}


def test_a_full_disk_is_an_error_and_the_import_goes_on(
    memory: Any, tmp_path: Path, watch: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    assert run(whole, opened(tmp_path)) is not None
    watch.reads.clear()
    write, calls = os.pwrite, 0

    def full(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise OSError(errno.ENOSPC, "no space")
        return write(*arguments)

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", full)
        with pytest.raises(SpaceError, match=r"write a local copy in .*: no space is left"):
            run(volume, opened(tmp_path))
    with dlfs.open(volume) as target:
        assert target.unfinished()[0].sample_count > 0
    assert run(volume, opened(tmp_path)) is not None
    assert everything(volume) == everything(whole)
    assert watch.reads.total() == 91  # that which was in flight twice
    assert max(watch.reads.values()) == 2


def test_a_change_of_the_bound_is_another_import(memory: Any, tmp_path: Path) -> None:
    volume = fresh(tmp_path / "v.img")
    assert run(volume, opened(tmp_path), kill_at=20) is None
    with pytest.raises(UsageError, match="are not those of now"):
        run(volume, opened(tmp_path, limit=2 * LIMIT))
    memory.pipe("/data/c0/000.bin", b"other")
    with pytest.raises(UsageError, match="are not those of now"):
        run(volume, opened(tmp_path))


def test_blocks_come_while_further_objects_are_fetched(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, read = threading.Event(), Store.read

    def waiting(self: Store, item: Any, *rest: Any) -> Any:
        if item.name == "c2/119.bin":
            assert taken.wait(60)
        return read(self, item, *rest)

    monkeypatch.setattr(Store, "read", waiting)
    source = opened(tmp_path, limit=1 << 30)
    count = 0
    with closing(source), closing(source.blocks(layout="path", seed=0)) as blocks:
        for block in blocks:
            count += len(block.paths)
            taken.set()
        opened_now = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
        assert not [path for path in opened_now if "/blocks/" in path]
    assert count == len(FILES)


@pytest.mark.parametrize("block_bytes", [0, 10_000, 40_000])
@pytest.mark.parametrize("group_bytes", [0, 1, 50_000, 200_000])
def test_samples_are_divided_by_their_sizes(block_bytes: int, group_bytes: int) -> None:
    chance = np.random.default_rng(3)
    sizes = chance.choice([0, 1, 3000, 9000, 60_000], 500).tolist()
    division = BlockDivision(7, 0, block_bytes, group_bytes)
    for size in sizes:
        division.add(size)
    blocks = division.blocks
    assert [size for block in blocks for size in block.sizes] == sizes
    position, used = 7, 0
    for before, block in zip([None, *blocks[:-1]], blocks, strict=True):
        assert block.first == position
        position += len(block.sizes)
        assert block.size_bytes == sum(block.sizes)
        assert block.size_bytes <= block_bytes or not any(block.sizes[1:-1])
        if before is not None:  # it was full
            assert before.is_closed
            assert before.size_bytes + block.sizes[0] > block_bytes
        if block.begins_group:
            assert used + block.disk_bytes > group_bytes
            used = 0
        assert block.group_bytes == used
        used += block.disk_bytes
        assert used in (0, block.disk_bytes) or used <= group_bytes
    for block in blocks[1:]:  # an import that goes on behind a block divides in the same way
        again = BlockDivision(block.first, block.group_bytes, block_bytes, group_bytes)
        if block.begins_group:
            break
        for size in sizes[block.first - 7 :]:
            again.add(size)
        found = [(one.first, one.begins_group, one.group_bytes) for one in again.blocks]
        expected = [(one.first, one.begins_group, one.group_bytes) for one in blocks]
        assert found == expected[-len(found) :]


# ---- shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "shuffled") for kind in SHARDS), *((kind, "path") for kind in ("tar", "webdataset"))],
)
def test_shards_are_imported_one_by_one(
    memory: Any, tmp_path: Path, watch: Reads, kind: str, layout: str
) -> None:
    made = SOURCES[kind](tmp_path)
    sizes = []
    for path in sorted(made.path.parent.rglob("*")):
        if path.is_file():
            memory.pipe(f"/shards/{path.relative_to(tmp_path)}", path.read_bytes())
            sizes.append(path.stat().st_size)
    if kind == "zip":
        for name in ("y", "z"):
            memory.pipe(f"/shards/{name}.zip", memory.cat("/shards/x.zip"))
        sizes *= 3
        made.options["prefix_shards"] = True
    url = f"memory://shards/{'*.zip' if kind == 'zip' else made.path.relative_to(tmp_path)}"
    options: dict[str, Any] = {"format_name": made.format_name, "options": made.options}
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    expected = run(whole, opened(tmp_path, url, 1 << 30, **options), layout=layout)
    assert expected is not None
    limit = max(sizes) + 4096
    watch.reads.clear()
    watch.most_bytes = 0
    report = killed(tmp_path, volume, watch, url=url, limit=limit, layout=layout, **options)
    assert facts(report) == facts(expected)
    found, wanted = everything(volume), everything(whole)
    assert [found[i] for i in (0, 2, 3, 5, 6, 7)] == [wanted[i] for i in (0, 2, 3, 5, 6, 7)]
    assert set(watch.reads.values()) == {1}
    assert watch.most_bytes <= limit + 8192
    uninterrupted = fresh(tmp_path / "u.img")
    source = opened(tmp_path, url, limit, **options)
    assert run(uninterrupted, source, layout=layout) is not None
    assert everything(uninterrupted) == everything(volume)


def tars(memory: Any, place: Path) -> None:
    for number in range(5):
        made = SOURCES["tar"](place / str(number))
        for path in made.path.parent.iterdir():
            data = path.read_bytes()
            memory.pipe(f"/tars/{number}-{path.name}", data)


URL = "memory://tars/*.tar"
PREFIXED = {"options": {"prefix_shards": True}}


def test_what_shards_have_besides_samples_is_found_again_after_the_spool_was_deleted(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    tars(memory, tmp_path)
    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    expected = run(whole, opened(tmp_path, URL, **PREFIXED))
    assert run(volume, opened(tmp_path, URL, **PREFIXED), kill_at=60) is None
    shutil.rmtree(tmp_path / "spool")
    report = run(volume, opened(tmp_path, URL, **PREFIXED))
    assert report is not None
    assert expected is not None
    assert report.kept_count > 0
    assert facts(report) == facts(expected)
    assert everything(volume) == everything(whole)


def test_appending_shards_leaves_known_samples_out(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    tars(memory, tmp_path)
    volume = fresh(tmp_path / "v.img")
    first = opened(tmp_path, "memory://tars/[01]-*.tar", **PREFIXED)
    before = run(volume, first)
    options = {"append": True, "skip_existing": True}
    report = run(volume, opened(tmp_path, URL, **PREFIXED), **options)
    assert report is not None
    assert before is not None
    assert report.sample_count + before.sample_count == report.dataset.sample_count
    assert report.skipped["sample that the dataset has already"] == before.sample_count


def test_a_damaged_shard_is_named_by_its_url(memory: Any, tmp_path: Path) -> None:
    tars(memory, tmp_path)
    memory.pipe("/tars/2-1.tar", b"x" * 600_000)
    with pytest.raises(FormatError, match=r"import memory:///tars/2-1.tar: "):
        run(fresh(tmp_path / "v.img"), opened(tmp_path, URL, **PREFIXED))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("tar", "shuffled"),
        ("packed_tar", "path"),
        ("zip", "shuffled"),
        ("webdataset", "path"),
        ("tfrecord", "path"),
        ("parquet", "shuffled"),
    ],
)
def test_bad_records_of_shards_count_once_over_kills(
    memory: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    written = getattr(test_bad_records, f"write_{kind}")(tmp_path / "source", {1, 4, 5, 8})
    data, name = written.path.read_bytes(), written.path.name
    for number in range(3):
        memory.pipe(f"/bad/{number}{name}", data)
    written.options.setdefault("options", {})
    if kind in ("tar", "packed_tar", "zip", "webdataset"):
        written.options["options"] |= {"prefix_shards": True}

    def source() -> Source:
        options = {**written.options, "skip_bad": 12}
        found = opened(tmp_path, f"memory://bad/*{name}", len(data) + 1, **options)
        found.buffer_bytes = 50
        return found

    volume, whole = fresh(tmp_path / "v.img"), fresh(tmp_path / "w.img")
    options: dict[str, Any] = {"layout": layout, "step_bytes": 40}
    expected, report = run(whole, source(), **options), None
    for kill_at in range(2, 60, 2):
        report = report or run(volume, source(), kill_at=kill_at, **options)
    assert report is not None
    assert expected is not None
    assert report.kept_count > 0
    assert (report.bad.count, report.bad.reasons) == (12, expected.bad.reasons)
    assert set(report.bad.records) == set(expected.bad.records)
    assert everything(volume) == everything(whole)


# ---- what is copied whole ------------------------------------------------------------------------


def test_files_that_are_read_together_are_copied_before(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hdf5(tmp_path / "a.h5", {"x": np.zeros((100, 1000))})
    memory.pipe("/arrays/a.h5", (tmp_path / "a.h5").read_bytes())
    url = "memory://arrays/a.h5"
    with pytest.raises(
        UsageError, match=r"expected at least 78\d.* KiB for .* of format hdf5 .* got"
    ):
        opened(tmp_path, url)
    monkeypatch.setattr(importer, "SPOOL_BYTES", LIMIT)
    source = open_source(url, spool=tmp_path / "spool")
    assert run(fresh(tmp_path / "v.img"), source) is not None


def test_a_bound_is_a_number(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="spool_bytes"):
        opened(tmp_path, limit=0)


def test_two_shards_of_one_name_are_refused_before_they_are_fetched(
    memory: Any, tmp_path: Path, watch: Reads
) -> None:
    for folder in "ab":
        memory.pipe(f"/twice/{folder}/x.tfrecord", bytes(100_000))
    with pytest.raises(UsageError, match="expected shards of different names"):
        opened(tmp_path, "memory://twice/*/x.tfrecord")
    assert not watch.reads
