"""Attributes on the command line: given at import, shown by info and stat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dlfs
from tests.support.files import flip_bit, write_files


@pytest.fixture
def images(tmp_path: Path) -> Path:
    arrays = {f"{number}.raw": np.full((2, 2), number, np.uint8).tobytes() for number in range(3)}
    for label in ("cat", "dog"):
        write_files(tmp_path / "images" / label, arrays)
    return tmp_path / "images"


def test_import_with_attributes(run, volume, images) -> None:
    rows = [f"{label}/{number}.raw,{number / 4}" for label in ("cat", "dog") for number in range(3)]
    table = images.parent / "weights.csv"
    table.write_text("\n".join(["path,weight", *rows, "elsewhere,1", ""]))
    done = run(
        "import", images, volume, "--name", "images", "--label-from-path",
        "--attribute", r"number:int=/(\d)\.raw", "-a", "folder=0", "--attributes", table,
        "--array-dtype", "u1", "--array-shape", "2,2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "1 x row of attributes without a sample" in done.err
    expected = {
        "label": "string", "number": "int64", "folder": "string", "weight": "float64",
        "dlfs:dtype": "string", "dlfs:shape": "string",
    }  # fmt: skip
    assert run("stat", volume, "images", "--json").json["columns"] == expected
    text = run("stat", volume, "images").out.decode()
    assert " columns  label: string\n          number: int64\n" in text
    info = run("info", volume, "--json").json
    assert {d["name"]: d["columns"] for d in info["datasets"]}["images"] == expected
    assert (
        b"columns of images@1: label: string, number: int64, folder: string, weight: float64"
        in (run("info", volume).out)
    )
    with dlfs.open(str(volume)) as opened, opened["images"] as dataset:
        assert dataset.column("label").tolist() == ["cat"] * 3 + ["dog"] * 3
        assert dataset.column("weight").tolist() == [0, 0.25, 0.5] * 2
        assert dataset.read_arrays([1, 5]).tolist() == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]


def test_stat_shows_the_attributes_of_samples(run, volume, images) -> None:
    assert run("import", images, volume, "-n", "images", "-a", "class=0").code == 0
    found = run("stat", volume, "images", "dog/1.raw", "--json").json["samples"]
    assert [sample["attributes"] for sample in found] == [{"class": "dog"}]
    assert "class = dog\n" in run("stat", volume, "images", "dog/1.raw").out.decode()
    assert run("stat", volume, "small", "top", "--json").json["samples"][0]["attributes"] == {}


def test_numbers_that_json_does_not_have_are_null(run, volume) -> None:
    with dlfs.open(str(volume)) as opened, opened.writer("odd") as writer:
        writer.add("a", b"", attributes={"x": float("nan"), "y": float("inf"), "z": 1.5})
    (sample,) = run("stat", volume, "odd", "a", "--json").json["samples"]
    assert sample["attributes"] == {"x": None, "y": None, "z": 1.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--array-dtype", "f4"], "expected --array-dtype and --array-shape"),
        (["--path-column", "x"], "expected --attributes for --path-column"),
        (["--attribute", "x"], "expected an attribute as NAME=PATTERN"),
        (["--attribute", "x=5"], "expected '5' in every path"),
        (["--array-dtype", "u1", "--array-shape", "2"], "expected 2 bytes"),
        (["--attributes", "missing.csv"], "there is no such file"),
    ],
)
def test_options_that_are_wrong(run, volume, images, options, message) -> None:
    done = run("import", images, volume, "--name", "images", *options)
    assert done.code in (2, 3)
    assert message in done.err
    assert b"images" not in run("ls", volume).out


def test_info_of_a_volume_with_damaged_attributes(run, volume, images) -> None:
    assert run("import", images, volume, "-n", "images", "--label-from-path").code == 0
    flip_bit(volume, volume.read_bytes().index(b"DLFSATT1") + 60)
    done = run("info", volume)
    assert done.code == 0
    assert "read attributes: expected CRC32C" in done.err
    done = run("verify", volume, "--json")
    assert [problem["kind"] for problem in done.json["problems"]] == ["attributes"]
    assert done.code == 4


def test_an_import_appends_the_same_attributes_or_declared_ones(run, volume, tmp_path) -> None:
    write_files(tmp_path, {"old/cat/old-cat": b"x", "new/dog/new-dog": b"x"})
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert run("import", old, volume, "--name", "pets", "--label-from-path").code == 0
    append = ["import", new, volume, "--name", "pets", "--append"]
    refused = run(*append)
    assert refused.code == 2
    assert "got none of 'label'" in refused.err
    assert "or declare a default for those without one" in refused.err
    wrong = run(*append, "--default", "label:int=one")
    assert wrong.code == 2
    assert "--default 'label:int=one': invalid literal" in wrong.err
    done = run(*append, "--default", "label=unknown", "-a", "kind=-2", "--default", "kind=")
    assert done.code == 0, done.err
    with dlfs.open(volume) as opened, opened["pets"] as dataset:
        assert dataset.paths() == [b"cat/old-cat", b"dog/new-dog"]
        assert dataset.column("label").tolist() == ["cat", "unknown"]
        assert dataset.column("kind").tolist() == ["", "dog"]
