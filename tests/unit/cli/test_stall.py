"""``dlfs stall``: what it measures is what was read."""

import importlib
from dataclasses import fields
from types import ModuleType
from xml.etree import ElementTree

import pytest
from PIL import Image

import dlfs
from dlfs.cli import stall_picture
from dlfs.cli.stall_picture import Picture
from dlfs.diagnosis.consuming import Moment
from dlfs.service.statistics import Activity, verdict


@pytest.mark.parametrize("shuffle", ["global", "chunk", "none"])
def test_stall_tells_where_the_time_goes(run, volume, shuffle):
    command = ("stall", volume, "small", "--seconds", 0.1, "--batch", 2, "--shuffle", shuffle)
    found = run(*command, "--json").json
    assert found["dataset"] == "small@1"
    assert found["seconds"] >= 0.1
    # On a busy machine the first batch may take all of the time.
    assert found["batches"] >= 1
    assert found["samples"] >= 2 * found["batches"]
    assert 0 < found["waited_seconds"] <= found["seconds"]
    assert found["requests"] >= 1
    assert found["errors"] == 0
    assert set(found["phase_seconds"]) == {"device", "checking", "planning", "rest"}
    assert [member["uri"] for member in found["members"]] == [str(volume)]
    measured = Activity(**{field.name: found[field.name] for field in fields(Activity)})
    assert found["verdict"] == verdict(measured, found["waited_seconds"] / found["seconds"])


def test_a_consumer_that_works_on_its_batches(run, volume):
    done = run("stall", volume, "small", "--seconds", 0.2, "--step-ms", 50)
    assert done.code == 0
    text = done.out.decode()
    assert "small@1: " in text
    assert str(volume) in text
    found = run("stall", volume, "small", "--seconds", 0.2, "--step-ms", 50, "--json").json
    assert found["seconds"] - found["waited_seconds"] >= 0.05 * found["batches"] > 0


def test_an_empty_dataset_is_nothing_to_read(run, volume):
    with dlfs.open(str(volume)) as opened, opened.writer("empty"):
        pass
    done = run("stall", volume, "empty", "--seconds", 0.1)
    assert done.code == 0
    assert "nothing was read" in done.out.decode()


def test_a_dataset_that_is_not_there(run, volume):
    assert run("stall", volume, "nothing").code == 3


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_result_as_a_picture(run, volume, tmp_path, suffix):
    path = tmp_path / f"stall{suffix}"
    done = run("stall", volume, "small", "--seconds", 0.2, "--batch", 2, "--plot", path)
    assert done.code == 0
    assert path.stat().st_size > 1000
    if suffix == ".png":
        with Image.open(path) as image:
            assert image.size == (1350, 840)
    if suffix == ".svg":
        texts = {text.strip() for text in ElementTree.parse(path).getroot().itertext()}
        assert any(text.startswith("small@1: ") for text in texts)
        assert {"consumer", "reading", "MiB/s of samples"} <= texts
        assert [text for text in texts if text.startswith("waits for batches ")]


def test_a_picture_of_nothing(run, volume, tmp_path):
    with dlfs.open(str(volume)) as opened, opened.writer("empty $x$"):
        pass
    path = tmp_path / "stall.svg"
    assert run("stall", volume, "empty $x$", "--seconds", 0.1, "--plot", path).code == 0
    assert "empty $x$@1" in path.read_text()  # no formula


@pytest.mark.parametrize("epochs", [1, 5, 100])
def test_beginnings_of_epochs_are_drawn_while_they_are_few(tmp_path, epochs):
    history = [Moment(i / 10, i << 20, i * epochs // 101) for i in range(101)]
    path = tmp_path / "stall.svg"
    picture = Picture("title", "verdict", {"waits": 1.0, "works": 0.0}, {}, history)
    stall_picture.draw(picture, path)
    assert ("dotted" in path.read_text()) is (epochs == 5)


def test_a_picture_that_cannot_be_written(run, volume, tmp_path, monkeypatch):
    command = ("stall", volume, "small", "--seconds", 0.1, "--plot")
    done = run(*command, tmp_path / "stall.txt")
    assert done.code == 2
    assert "expected a file that ends in .png, .svg or .pdf" in done.err
    done = run(*command, tmp_path / "no" / "stall.png")
    assert done.code == 2
    assert "expected a folder that exists" in done.err
    (tmp_path / "folder.png").mkdir()
    assert run(*command, tmp_path / "folder.png").code == 7
    real = importlib.import_module

    def without_matplotlib(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_matplotlib)
    done = run(*command, tmp_path / "stall.png")
    assert done.code == 2
    assert "expected matplotlib to be installed (" in done.err
    assert "pip install" in done.err
    assert not (tmp_path / "stall.png").exists()
