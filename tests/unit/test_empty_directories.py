"""Directories without samples: kept by writers, imports, copies, exports; seen by every reader."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray

import dlfs
from dlfs.errors import ExistsError, LimitError, NotFoundError, UsageError
from dlfs.ingest.copying import copy_dataset
from dlfs.ingest.export.targets import export_dataset
from dlfs.ingest.importer import import_dataset, open_source
from tests.golden.c_reader import mounted, opened
from tests.support.files import write_files

EMPTY = [b"a-/x", b"a/empty", b"b/c/d", b"z"]
SAMPLES = {b"a/1": b"one", b"a/b/2": b"two", b"c": b"three"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a volume with the dataset ``d``."""
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=8 << 20, chunk_bytes=16 << 10)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for directory in [b"b", b"b/c", *EMPTY, b"a", b"z"]:
            writer.add_directory(directory)
        for name, data in SAMPLES.items():
            writer.add(name, data)
    return path


@pytest.fixture
def volume(path: str) -> Iterator[dlfs.Volume]:
    with dlfs.open(path) as volume:
        yield volume


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the same files and directories as the dataset."""
    folder = write_files(tmp_path / "folder", SAMPLES)
    for directory in EMPTY:
        (folder / os.fsdecode(directory)).mkdir(parents=True)
    return folder


def same(one: Path, other: Path) -> bool:
    return subprocess.run(["diff", "-r", one, other], check=False).returncode == 0


def test_only_the_deepest_are_listed(volume: dlfs.Volume) -> None:
    with volume["d"] as dataset:
        assert dataset.empty_directories() == EMPTY
        assert dataset.paths() == sorted(SAMPLES)
        directory = dataset.directory
        assert directory.empty_directories(b"b") == directory.empty_directories(b"b/c/d")
        assert directory.empty_directories(b"a") == [b"a/empty"]
        for known in (b"b", b"b/c", b"b/c/d", b"a-", b"a/b", b"z"):
            assert directory.is_directory(known)
        for unknown in (b"b/c/d/e", b"c", b"a/1", b"y", b"a/e"):
            assert not directory.is_directory(unknown)
        names = [(entry.name, entry.is_directory) for entry in dataset.children()]
        assert names == [(b"a-", True), (b"a", True), (b"b", True), (b"c", False), (b"z", True)]
        assert [entry.name for entry in dataset.children(b"a")] == [b"1", b"b", b"empty"]
        assert [entry.name for entry in dataset.children(b"a", b"b")] == [b"empty"]
        assert [entry.name for entry in dataset.children(b"", b"b")] == [b"c", b"z"]
        assert list(dataset.children(b"z")) == []
    assert list(volume.verify()) == []


def test_a_dataset_of_directories_alone(volume: dlfs.Volume, path: str, tmp_path: Path) -> None:
    with volume.writer("alone") as writer:
        writer.add_directory("x/y")
    with volume["alone"] as dataset:
        assert len(dataset) == 0
        assert dataset.empty_directories() == [b"x/y"]
        assert [entry.name for entry in dataset.children()] == [b"x"]
        export_dataset(dataset, tmp_path / "out/")
    assert [p.name for p in tmp_path.glob("out/**/*")] == ["x", "y"]
    with mounted([path]) as (c, found), opened(c, found, b"alone"):
        pass


def test_names_that_clash_are_refused(volume: dlfs.Volume) -> None:
    writer = volume.writer("e", layout="path")
    writer.add_batch([b"a/b"], b"x", *_one())
    writer.add_directory("d")
    for directory in ("a/b", "a/b/c"):
        with pytest.raises(ExistsError, match="sample"):
            writer.add_directory(directory)
    with pytest.raises(UsageError):
        writer.add_directory("a/../b")
    with pytest.raises(LimitError, match="4094"):
        writer.add_directory("/".join(["x" * 255] * 16))
    with pytest.raises(ExistsError, match="a directory has this path"):
        writer.add_batch([b"d"], b"x", *_one())


def _one() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offset and length of a batch of one sample of one byte."""
    return np.zeros(1, np.int64), np.ones(1, np.int64)


def test_the_next_version_has_them_but_where_samples_came(volume: dlfs.Volume) -> None:
    with volume.append("d") as writer:
        writer.add("z/sample", b"z")
        writer.add_directory("new")
    with volume["d"] as dataset:
        assert dataset.empty_directories() == [b"a-/x", b"a/empty", b"b/c/d", b"new"]


def test_a_copy_has_them(volume: dlfs.Volume) -> None:
    with volume["d"] as dataset:
        copy_dataset(dataset, volume, "copy")
    with volume["copy"] as copy:
        assert copy.empty_directories() == EMPTY


def test_a_folder_is_the_same_after_import_and_export(
    volume: dlfs.Volume, folder: Path, tmp_path: Path
) -> None:
    report = import_dataset(volume, open_source(folder), "folder")
    assert report.empty_directories == 7  # those that contain others, too
    with volume["folder"] as dataset:
        assert dataset.empty_directories() == EMPTY
        export_dataset(dataset, tmp_path / "out/")
        export_dataset(dataset, tmp_path / "out.tar")
        export_dataset(dataset, tmp_path / "out.zip")
    assert same(folder, tmp_path / "out")
    with tarfile.open(tmp_path / "out.tar") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "tar")
    assert same(folder, tmp_path / "tar")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        archive.extractall(tmp_path / "zip")
    assert same(folder, tmp_path / "zip")


@pytest.mark.parametrize("name", ["in.tar", "in.tar.gz"])
def test_an_archive_keeps_its_directories(
    volume: dlfs.Volume, folder: Path, tmp_path: Path, name: str
) -> None:
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
        archive.add(folder, ".")
    import_dataset(volume, open_source(tmp_path / name), "archive")
    with volume["archive"] as dataset:
        assert dataset.empty_directories() == EMPTY


def test_a_folder_of_directories_alone_is_an_empty_dataset(
    volume: dlfs.Volume, tmp_path: Path
) -> None:
    (tmp_path / "bare/train").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="1 x directory without samples"):
        import_dataset(volume, open_source(tmp_path / "bare"), "bare")
    import_dataset(volume, open_source(tmp_path / "bare"), "bare", allow_empty=True)
    with volume["bare"] as dataset:
        assert dataset.empty_directories() == [b"train"]


def test_fsspec_shows_them(path: str) -> None:
    files, root = fsspec.core.url_to_fs(f"dlfs://{path}!/d")
    assert files.isdir(root + "/b/c/d")
    assert not files.exists(root + "/b/c/x")
    assert files.ls(root + "/b/c/d") == []
    found = [name.rpartition("/")[2] for name in files.ls(root, detail=False)]
    assert found == ["a-", "a", "b", "c", "z"]
    walked = {name[len(root) + 1 :] for name in files.find(root, withdirs=True)}
    assert {os.fsdecode(one) for one in EMPTY} <= walked
    assert {"b", "b/c", "a", "a/b", "c"} <= walked
    assert len(files.find(root)) == len(SAMPLES)


def test_a_folder_without_samples_is_no_class(volume: dlfs.Volume) -> None:
    pytest.importorskip("torch")
    from dlfs.adapters.torch import FolderLabels

    with volume.writer("classes") as writer:
        for name in ("cat", "dog"):
            writer.add(f"{name}/1", b"x")
        for name in ("bird", "cat/empty", "zebra/deep"):
            writer.add_directory(name)
    with volume["classes"] as dataset:
        assert FolderLabels(dataset).classes == ("cat", "dog")
