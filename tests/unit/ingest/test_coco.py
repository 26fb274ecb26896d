"""Annotations in the form of COCO as attributes: joined to images, left out, damaged."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.errors import FormatError, NotFoundError, UsageError
from dlfs.ingest.attributes import AttributedSource, TableRule
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import tar, write_files
from tests.unit.ingest.taking import import_by_command, take

IMAGES = [
    {"id": 391895, "file_name": "a.jpg", "width": 640, "height": 360, "license": 3},
    {"id": 5, "file_name": "b.jpg", "width": 64, "height": 48, "license": 1},
    {"id": 6, "file_name": "sub/c.jpg", "width": 1, "height": 2, "license": 1},
]
ANNOTATIONS = [
    {"id": 1, "image_id": 5, "category_id": 18, "bbox": [3.25, 4.0, 50.5, 20], "iscrowd": 0},
    {"id": 2, "image_id": 391895, "category_id": 1, "bbox": [1, 2, 3, 4],
     "segmentation": [[1.5, 2.5, 3.5, 4.5, 5.5, 6.5]]},
    {"id": 3, "image_id": 5, "category_id": 1, "bbox": [0, 0, 1, 1],
     "segmentation": {"counts": "PlT5\\\"", "size": [48, 64]}},
]  # fmt: skip
CATEGORIES = [{"id": 1, "name": "person", "supercategory": "person"}, {"id": 18, "name": "hünd"}]
PIXELS = {"a.jpg": b"a", "b.jpg": b"bb", "sub/c.jpg": b"ccc"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of annotations; keywords replace or remove (None) its lists."""

    def write(indent: int | None = None, **lists: Any) -> Path:
        whole = {
            "info": {"year": 2017}, "images": IMAGES, "annotations": ANNOTATIONS,
            "categories": CATEGORIES, **lists,
        }  # fmt: skip
        path = tmp_path / "instances.json"
        kept = {name: value for name, value in whole.items() if value is not None}
        path.write_text(json.dumps(kept, indent=indent, ensure_ascii=False))
        return path

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "images", PIXELS)


def attributes(source: Path | str, table: Path) -> dict[str, dict[str, Any]]:
    """The attributes of each sample, by path."""
    joined = AttributedSource(open_source(source), [TableRule(str(table))])
    return {path: values for path, (_, values) in take(joined).items()}


def annotations_of(image: int) -> list[dict[str, Any]]:
    return [one for one in ANNOTATIONS if one["image_id"] == image]


@pytest.mark.parametrize("indent", [None, 2])
def test_annotations_are_joined_to_images(
    write: Callable[..., Path], folder: Path, indent: int | None
) -> None:
    got = attributes(folder, write(indent))
    assert list(got) == list(PIXELS)
    for image in IMAGES:
        values = got[str(image["file_name"])]
        assert json.loads(values.pop("annotations")) == annotations_of(image["id"])
        names = [
            {1: "person", 18: "hünd"}[one["category_id"]] for one in annotations_of(image["id"])
        ]
        assert json.loads(values.pop("category_names")) == names
        assert values == {
            "image_id": image["id"],
            "width": image["width"],
            "height": image["height"],
            "license": image["license"],
        }
    assert attributes(folder, write(indent, annotations=[]))["a.jpg"]["annotations"] == "[]"


@pytest.mark.parametrize("ending", [".tar", ".zip"])
def test_file_names_are_the_ends_of_paths_in_archives(
    write: Callable[..., Path], tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"train2017{ending}"
    files = {f"data/train2017/{name}": data for name, data in PIXELS.items()}
    if ending == ".tar":
        path.write_bytes(tar(*files.items()))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    got = attributes(path, write())
    assert {path: values["image_id"] for path, values in got.items()} == {
        "data/train2017/a.jpg": 391895,
        "data/train2017/b.jpg": 5,
        "data/train2017/sub/c.jpg": 6,
    }


def test_two_samples_of_one_image_are_an_error(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_files(tmp_path / "both", {"train/a.jpg": b"1", "val/a.jpg": b"2"})
    with pytest.raises(UsageError, match=r"one sample for a\.jpg, got train/a\.jpg and val/a\.jpg"):
        attributes(folder, write())


def test_the_end_of_a_name_is_no_name(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_files(tmp_path / "other", {"ba.jpg": b"1"})
    with pytest.raises(UsageError, match=r"expected a row for every sample, got none: ba\.jpg"):
        attributes(folder, write())


def test_through_the_command_line(write: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    table = write()
    assert import_by_command(tmp_path, f"{folder} V --attributes {table}") == PIXELS
    with dlfs.open(str(tmp_path / "by-command.img")) as volume, volume["n"] as dataset:
        texts = dataset.column("annotations", [0, 1, 2])
        found = {one["id"] for text in texts for one in json.loads(text)}
        assert found == {1, 2, 3}


def test_what_has_no_counterpart_is_counted(
    write: Callable[..., Path], folder: Path, volume: Volume
) -> None:
    more = [*IMAGES, {"id": 8, "file_name": "gone.jpg", "width": 1, "height": 1, "license": 1}]
    lost = [*ANNOTATIONS, {"id": 9, "image_id": 99, "category_id": 1, "bbox": []}]
    rule = TableRule(str(write(images=more, annotations=lost)))
    report = import_dataset(volume, AttributedSource(open_source(folder), [rule]), "n")
    assert report.skipped == {
        "annotation without an image": 1,
        "row of attributes without a sample": 1,
    }


def test_keys_that_no_column_can_have_are_left_out_and_named(
    write: Callable[..., Path], folder: Path
) -> None:
    odd: Sequence[dict[str, Any]] = [
        {**image, "date": date, "tags": ["x"], "score": score, "annotations": 3}
        for image, date, score in zip(IMAGES, ["2013", None, "2014"], [1, 0.5, 2], strict=True)
    ]
    odd[0]["only"] = 1
    source = AttributedSource(open_source(folder), [TableRule(str(write(images=odd)))])
    got = take(source)
    assert got["b.jpg"][1]["score"] == 0.5
    assert not {"date", "tags", "only"} & set(got["b.jpg"][1])
    assert json.loads(got["b.jpg"][1]["annotations"]) == annotations_of(5)
    assert source.skipped == {
        "key of images that is not used: date, tags, annotations, only": 4,
    }


def test_images_may_have_other_paths(write: Callable[..., Path], folder: Path) -> None:
    images = [{**image, "path": f"/home/them/{image['file_name']}"} for image in IMAGES]
    assert attributes(folder, write(images=images))["b.jpg"]["path"] == "/home/them/b.jpg"


def test_captions_have_no_categories(write: Callable[..., Path], folder: Path) -> None:
    captions = [{"id": 1, "image_id": 5, "caption": 'A "dog"\n'}]
    got = attributes(folder, write(annotations=captions, categories=None))["b.jpg"]
    assert json.loads(got["annotations"]) == captions
    assert "category_names" not in got


def test_images_alone(write: Callable[..., Path], folder: Path) -> None:
    got = attributes(folder, write(annotations=None))["b.jpg"]
    assert got == {"image_id": 5, "width": 64, "height": 48, "license": 1}


def test_identifiers_may_be_text(write: Callable[..., Path], folder: Path) -> None:
    images = [{"id": name, "file_name": name} for name in PIXELS]
    annotations = [{"image_id": "a.jpg", "category_id": "x"}]
    path = write(images=images, annotations=annotations, categories=[{"id": "x", "name": "X"}])
    assert attributes(folder, path)["a.jpg"]["category_names"] == '["X"]'


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"images": None}, "expected COCO's lists images, .*missing required field `images`"),
        ({"images": {}}, "expected COCO's lists images"),
        ({"images": [{"id": 1}]}, r"images\[0\]: expected id and file_name, got id"),
        ({"images": [{"id": True, "file_name": "a"}]}, r"images\[0\]: expected id and file_name"),
        ({"images": [{"file_name": "a.jpg"}]}, r"images\[0\]: expected id and file_name, got file"),
        ({"images": [IMAGES[0], IMAGES[0]]}, r"images\[1\]: expected each ID once, got 391895"),
        ({"images": [IMAGES[0], {**IMAGES[0], "id": 2}]}, r"one row for each path, got two: a"),
        ({"images": [{**IMAGES[0], "x": 2**70}]}, "x: expected whole numbers of 64 bits"),
        ({"annotations": [{"id": 1}]}, r"annotations\[0\]: expected an annotation with image_id"),
        ({"annotations": [5]}, r"annotations\[0\]: expected an annotation with image_id"),
        ({"annotations": [{"image_id": 5, "category_id": 2}]}, "expected a category of the file"),
        ({"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}, "each category once"),
    ],
)  # fmt: skip
def test_other_files_are_refused(
    write: Callable[..., Path], lists: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        TableRule(str(write(**lists)))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"images": []} {}', b'{"images": [], "\xff"'])
def test_other_text_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"x\.json: expected COCO's lists images"):
        TableRule(str(tmp_path / "x.json"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"x\.json: there is no such file"):
        TableRule(str(tmp_path / "x.json"))


def test_bytes_that_are_no_text_are_refused(write: Callable[..., Path]) -> None:
    path = write(annotations=[{"image_id": 5, "caption": "@@"}])
    path.write_bytes(path.read_bytes().replace(b"@@", b"\xff\xff"))
    with pytest.raises(FormatError, match="expected"):
        TableRule(str(path))
