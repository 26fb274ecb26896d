"""Datasets are equal, whatever number of workers imports them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.workers.by_workers import WorkersOptions
from tests.support.files import write_files
from tests.support.volumes import new_volume
from tests.unit.ingest.remote.object_store import BUCKET, ObjectStore, object_store

__all__ = ["object_store"]

STEP_BYTES = 200 * KIB
MakeSource = Callable[[Path], tuple[list[str], dict[str, Any]]]


def random_bytes(number: int) -> bytes:
    drawn = random.Random(number)
    return drawn.randbytes(drawn.choice((0, 100, 3000, 20_000)))


def folder(path: Path) -> tuple[list[str], dict[str, Any]]:
    write_files(path / "s", {f"{n % 7}/{n:03}.bin": random_bytes(n) for n in range(200)})
    (path / "s" / "empty").mkdir()
    return [str(path / "s")], {"format_name": "folder"}


def classes(path: Path) -> tuple[list[str], dict[str, Any]]:
    write_files(path / "s", {f"c{n % 7}/{n:03}.bin": random_bytes(n) for n in range(200)})
    return [str(path / "s")], {"format_name": "imagefolder"}


def archive(names: range) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for number in names:
            info = tarfile.TarInfo(f"{number % 3}/{number:03}")
            info.size = len(random_bytes(number))
            file.addfile(info, io.BytesIO(random_bytes(number)))
        if names[0] == 40:
            empty = tarfile.TarInfo("no samples")
            empty.type = tarfile.DIRTYPE
            file.addfile(empty)
            link = tarfile.TarInfo("fifo")
            link.type = tarfile.FIFOTYPE
            file.addfile(link)
    return made.getvalue()


def shards(path: Path) -> tuple[list[str], dict[str, Any]]:
    names = {f"{n:03}.tar": archive(range(40 * n, 40 * n + 40)) for n in range(5)}
    write_files(path / "s", names)
    return sorted(str(path / "s" / name) for name in names), {}


def tables(path: Path) -> tuple[list[str], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (path / "s").mkdir()
    for n in range(5):
        rows = range(40 * n, 40 * n + 40)
        columns = {
            "path": [f"{row:03}" for row in rows],
            "data": [random_bytes(row) for row in rows],
            "label": np.arange(40) + n,
        }
        pq.write_table(pa.table(columns), path / "s" / f"{n}.parquet")
    return [str(path / "s" / f"{n}.parquet") for n in range(5)], {}


def run(volume: str, paths: list[str], options: dict[str, Any], **more: Any) -> ImportReport:
    with dlfs.open(volume) as target, closing(open_source(paths, **options)) as source:
        source.buffer_bytes = 64 * KIB
        return import_dataset(target, source, "x", step_bytes=STEP_BYTES, **more)


def seen(report: ImportReport) -> tuple[object, ...]:
    info = report.dataset
    counts = info.sample_count, info.sample_bytes, report.empty_directories
    return info.content_digest, info.packing_digest, counts, dict(report.skipped)


def volume_at(path: Path) -> str:
    return str(new_volume(path, size_bytes=24 * MIB, chunk_bytes=16 * KIB))


@pytest.mark.parametrize("make", [folder, classes, shards, tables])
@pytest.mark.parametrize("layout", ["shuffled", "path"])
def test_any_number_of_workers_makes_the_same_dataset(
    tmp_path: Path, make: MakeSource, layout: str
) -> None:
    paths, options = make(tmp_path)
    plain = run(volume_at(tmp_path / "0.img"), paths, options, layout=layout, seed=7)
    for count in (1, 2, 4):
        volume = volume_at(tmp_path / f"{count}.img")
        report = run(volume, paths, options, layout=layout, seed=7, workers=count)
        assert seen(report) == seen(plain)
        assert report.sample_count == plain.sample_count
        with dlfs.open(volume) as opened:
            assert not [*opened.verify()]
            assert not opened.unfinished()


@pytest.mark.parametrize("name", ["train", "shards"])
def test_objects_are_imported_by_workers(
    object_store: ObjectStore, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in object_store.environment.items():
        monkeypatch.setenv(variable, value)
    for number in range(60):
        object_store.put(f"train/{number:03}", random_bytes(number))
    for number in range(4):
        object_store.put(f"shards/{number}.tar", archive(range(40 * number, 40 * number + 40)))
    url = f"s3://{BUCKET}/train" if name == "train" else f"s3://{BUCKET}/shards/*.tar"
    options = {"spool": tmp_path / "spool", "spool_bytes": 300 * KIB}
    plain = run(volume_at(tmp_path / "0.img"), [url], options)
    workers = WorkersOptions(2, spool=str(tmp_path / "spool"), spool_bytes=300 * KIB)
    report = run(volume_at(tmp_path / "2.img"), [url], options, workers=workers)
    assert seen(report) == seen(plain)
    assert not [*(tmp_path / "spool").rglob("*.tar")]
