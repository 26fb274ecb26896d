"""Folders of classes: the labels that torchvision would give, whatever the policy of links."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlfs.errors import UsageError
from dlfs.ingest.formats.folder import ImageFolderOptions
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import write_files
from tests.unit.ingest.taking import import_by_command, take

CLASSES = ["a", "a-b", "Zebra", "b"]
"""Not in the order of their paths, where ``a-b/`` comes before ``a/``."""


def write(folder: Path) -> dict[str, bytes]:
    files = {
        f"{name}/{sub}{i}.jpg": f"{name} {sub} {i}".encode() * i
        for name in CLASSES
        for sub in ("", "sub/")
        for i in range(5)
    }
    write_files(folder, files)
    return files


def test_the_first_folder_is_the_class(volume: Volume, tmp_path: Path) -> None:
    files = write(tmp_path / "f")
    labels = {name: number for number, name in enumerate(sorted(CLASSES))}
    want = {
        path: (data, {"label": labels[path.split("/")[0]], "class": path.split("/")[0]})
        for path, data in files.items()
    }
    for layout in ("path", "shuffled"):
        source = open_source(tmp_path / "f", format_name="imagefolder")
        assert source.sample_count == len(files)
        assert take(source, layout=layout, seed=3) == want
    import_dataset(volume, open_source(tmp_path / "f", format_name="imagefolder"), "n")
    with volume["n"] as dataset:
        for index, path in enumerate(dataset.paths()):
            data, attributes = want[path.decode()]
            assert dataset[index] == data
            for name, value in attributes.items():
                assert dataset.column(name, [index])[0] == value
    got = import_by_command(tmp_path, f"{tmp_path}/f V --format imagefolder --links error")
    assert got == files


def test_a_file_outside_of_the_classes_is_reported(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "README").touch()
    with pytest.raises(UsageError, match="README: expected files in class folders only"):
        open_source(tmp_path, format_name="imagefolder")


def test_a_class_that_is_not_utf_8_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9").mkdir()
    (tmp_path / "caf\udce9" / "a").touch()
    assert list(take(open_source(tmp_path, format_name="imagefolder")).values()) == [
        (b"", {"label": 0, "class": r"caf\xe9"})
    ]


def test_one_folder_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected one folder, got 2"):
        ImageFolderOptions().open([str(tmp_path), str(tmp_path)])
    assert take(open_source(tmp_path, format_name="imagefolder")) == {}
