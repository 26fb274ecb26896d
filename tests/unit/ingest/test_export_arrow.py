"""Datasets as Arrow files: what pyarrow reads of them, and what comes back by importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import dlfs
from dlfs.base.extras import install_command
from dlfs.cli.commands import app
from dlfs.dataset.dataset import Dataset
from dlfs.errors import DeviceError, ExistsError, UsageError
from dlfs.ingest.export import samples
from dlfs.ingest.export.targets import export_dataset
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.progress import Progress
from dlfs.volume.volume import Volume

COUNT = 100
COLUMNS: dict[str, Any] = {
    "label": np.arange(COUNT, dtype=np.int16),
    "weight": np.where(np.arange(COUNT) == 3, np.nan, np.arange(COUNT) / 4).astype(np.float32),
    "good": np.arange(COUNT) % 2 == 0,
    "text": np.array([f"text é {i}" for i in range(COUNT)], object),
    "dlfs:dtype": np.array(["|u1"] * COUNT, object),
    "dlfs:shape": np.array([f"{i},7" for i in range(COUNT)], object),
}
PATHS = [f"d{i % 3}/{i:03d}".encode() for i in range(COUNT)]
DATA = [bytes([i]) * (i * 7) for i in range(COUNT)]


@pytest.fixture
def dataset(volume: Volume) -> Iterator[Dataset]:
    with volume.writer("n") as writer:
        for i, (path, data) in enumerate(zip(PATHS, DATA, strict=True)):
            writer.add(path, data, attributes={name: values[i] for name, values in COLUMNS.items()})
    with volume["n"] as opened:
        yield opened


def rows(dataset: Dataset) -> dict[bytes, tuple[bytes, list[Any]]]:
    """Everything that a dataset holds."""
    columns = [dataset.column(name).tolist() for name in sorted(dataset.columns)]
    return {
        path: (dataset[index], [repr(values[index]) for values in columns])
        for index, path in enumerate(dataset.paths())
    }


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet"])
@pytest.mark.parametrize("small", [False, True])
def test_what_is_exported_comes_back_the_same(
    volume: Volume,
    dataset: Dataset,
    tmp_path: Path,
    small: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small:
        monkeypatch.setattr(samples, "BATCH_SAMPLES_MAX", 7)
    seen: list[Progress] = []
    report = export_dataset(dataset, tmp_path / name, progress=seen.append)
    assert report.sample_count == seen[-1].samples_done == COUNT
    assert report.sample_bytes == dataset.sample_bytes
    import_dataset(volume, open_source(tmp_path / name), "again")
    with volume["again"] as again:
        assert {name: again.columns[name] for name in again.columns} == dict(dataset.columns)
        assert rows(again) == rows(dataset)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_others_read_it(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out", kind="arrow")
    table = pa.ipc.open_file(str(tmp_path / "out")).read_all()
    assert table.schema.names[:2] == ["path", "bytes"]
    assert table.schema.field("label").type == pa.int16()
    assert table.schema.metadata == {b"dlfs:dataset": b"n@1"}
    got = dict(zip(table["path"].to_pylist(), table["bytes"].to_pylist(), strict=True))
    assert got == {path.decode(): data for path, data in zip(PATHS, DATA, strict=True)}


def test_paths_that_are_no_text_are_binary(volume: Volume, tmp_path: Path) -> None:
    with volume.writer("b") as writer:
        writer.add(b"\xff\xfe/x", b"1")
        writer.add(b"y", b"2")
    with volume["b"] as dataset:
        export_dataset(dataset, tmp_path / "x.arrow", kind="arrow")
    import_dataset(volume, open_source(tmp_path / "x.arrow"), "again")
    with volume["again"] as again:
        assert list(again.paths()) == [b"y", b"\xff\xfe/x"]


def test_an_empty_dataset_is_exported(volume: Volume, tmp_path: Path) -> None:
    volume.writer("empty").seal()
    with volume["empty"] as dataset:
        assert export_dataset(dataset, tmp_path / "x.arrow", kind="arrow").sample_count == 0
    report = import_dataset(volume, open_source(tmp_path / "x.arrow"), "again", allow_empty=True)
    assert report.sample_count == 0


def test_a_file_that_is_there_is_kept_unless_forced(dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(b"mine")
    with pytest.raises(ExistsError, match="there already"):
        export_dataset(dataset, path, kind="arrow")
    assert path.read_bytes() == b"mine"
    export_dataset(dataset, path, force=True, kind="arrow")
    assert len(pa.ipc.open_file(str(path)).read_all()) == COUNT


def test_an_interrupted_export_leaves_nothing(dataset: Dataset, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.samples_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dataset(dataset, tmp_path / "x.arrow", progress=interrupt, kind="arrow")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_reported(
    volume: Volume, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match="export to"):
        export_dataset(dataset, tmp_path / "missing" / "x.arrow", kind="arrow")
    with volume.writer("clash") as writer:
        writer.add("a", b"", attributes={"path": 1})
    with volume["clash"] as clash, pytest.raises(UsageError, match="expected no attribute 'path'"):
        export_dataset(clash, tmp_path / "x.arrow", kind="arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=f"export to .*{re.escape(install_command('arrow'))}"):
        export_dataset(dataset, tmp_path / "x.arrow", kind="arrow")


def test_the_command_exports_and_imports(tmp_path: Path) -> None:
    image, out = tmp_path / "volume.img", tmp_path / "out"
    dlfs.format_volume(str(image), size_bytes=16 << 20)
    with dlfs.open(str(image)) as volume, volume.writer("n") as writer:
        writer.add("a", b"1", attributes={"label": 5})

    def run(*words: object) -> Any:
        return CliRunner().invoke(app, [str(word) for word in words])

    for kind, name in (("arrow", "x.ipc"), ("tar", "y.tar"), ("folder", "z.tar")):
        done = run("export", image, "n", out.with_name(name), "--to", kind)
        assert done.exit_code == 0, done.output
        assert ("1 attribute" in done.output) == (kind != "arrow")
    assert out.with_name("z.tar").is_dir()
    assert out.with_name("y.tar").is_file()
    assert run("import", out.with_name("x.ipc"), image, "-n", "again").exit_code == 0
    with dlfs.open(str(image)) as volume, volume["again"] as again:
        assert (again[0], again.column("label").tolist()) == (b"1", [5])
    assert run("export", image, "n", out.with_name("w.zip"), "--to", "tar").exit_code == 2
