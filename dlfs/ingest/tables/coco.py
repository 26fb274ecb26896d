"""Reads annotations in the form of COCO as a table with a row for each image.

Such a file has a list of images, each with its ``id`` and ``file_name``; one of annotations, each
with the ``image_id`` of its image; and one of categories, with ``id`` and ``name``. The columns:

- the values that each image has: ``image_id``, ``file_name``, ``width``, ``height`` and others. A
  key is left out if an image lacks it, or has other values than numbers, bools or text there.
- ``annotations``: JSON text, the list of an image's annotations as they are in the file, in its
  order; ``[]`` if there are none. It is the target that torchvision's ``CocoDetection`` gives.
- ``category_names``: JSON text, the list of the names of their categories, in the same order; only
  if the file has categories and each annotation names one.

Captions, keypoints and panoptic segments have this form, too. A file without annotations, such as
COCO's of test images, gives the columns of images alone.

Memory: three times the size of the file while it is read, then the columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dlfs.errors import FormatError
from dlfs.ingest.records import attribute_array
from dlfs.ingest.source import Array, file_errors, left_out_names

FILE_NAME = "file_name"
"""Column of the paths of the images."""
_ANNOTATIONS, _NAMES = "annotations", "category_names"
_SCALARS = (bool, int, float, str)

_Id = int | str


class _Annotation(msgspec.Struct):
    image_id: _Id
    category_id: _Id | None = None


class _Category(msgspec.Struct):
    id: _Id
    name: str


class _File(msgspec.Struct):
    images: list[dict[str, Any]]
    annotations: list[msgspec.Raw] | None = None
    categories: list[_Category] = []


def read_coco(path: str, where: str) -> tuple[dict[str, Array], dict[str, int]]:
    """Read the columns of a file of annotations.

    Args:
        path: path of the file.
        where: name of the file, for errors.

    Returns:
        The columns by name, and the number of what is left out, by reason.

    Raises:
        NotFoundError: the file does not exist.
        FormatError: it is no such file, or an image or a category is there twice or lacks a key.
        DeviceError: it cannot be read.
    """
    with file_errors(where):
        data = Path(path).read_bytes()
    with _decoding(
        where, "COCO's lists images, annotations and categories; JSON Lines end in .jsonl"
    ):
        found = msgspec.json.decode(data, type=_File)
    rows = _numbered(found.images, where)
    columns, left_out = _image_columns(found.images, where)
    skipped = Counter(left_out_names("key of images", left_out))
    if found.annotations is not None:
        names = _category_names(found.categories, where)
        texts: list[list[str]] = [[] for _ in rows]
        named: list[list[str]] | None = [[] for _ in rows] if names else None
        for number, raw in enumerate(found.annotations):
            place = f"{where}: annotations[{number}]"
            with _decoding(place, "an annotation with image_id"):
                annotation = msgspec.json.decode(raw, type=_Annotation)
                text = bytes(raw).decode()
            row = rows.get(annotation.image_id)
            if annotation.category_id is None:
                named = None
            elif names and annotation.category_id not in names:
                raise FormatError(
                    f"{place}: expected a category of the file, got {annotation.category_id!r}"
                )
            if row is None:
                skipped["annotation without an image"] += 1
                continue
            texts[row].append(text)
            if named is not None:
                named[row].append(names[annotation.category_id])
        columns[_ANNOTATIONS] = np.array([f"[{', '.join(parts)}]" for parts in texts], object)
        if named is not None:
            columns[_NAMES] = np.array(
                [json.dumps(one, ensure_ascii=False) for one in named], object
            )
    return columns, dict(skipped)


@contextmanager
def _decoding(where: str, expected: str) -> Iterator[None]:
    """Turn the errors of decoding JSON into typed errors."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: expected {expected}: {error}") from error


def _numbered(images: Sequence[Mapping[str, Any]], where: str) -> dict[_Id, int]:
    """Return the row of each image, by its ID."""
    rows: dict[_Id, int] = {}
    for row, image in enumerate(images):
        number, name = image.get("id"), image.get(FILE_NAME)
        is_id = isinstance(number, _Id) and not isinstance(number, bool)
        if not is_id or not isinstance(name, str):
            keys = ", ".join(image) or "none"
            raise FormatError(f"{where}: images[{row}]: expected id and file_name, got {keys}")
        assert isinstance(number, _Id)
        if rows.setdefault(number, row) != row:
            raise FormatError(
                f"{where}: images[{row}]: expected each ID once, got {number!r} twice"
            )
    return rows


def _category_names(categories: Sequence[_Category], where: str) -> dict[_Id | None, str]:
    names: dict[_Id | None, str] = {}
    for one in categories:
        if names.setdefault(one.id, one.name) != one.name:
            raise FormatError(f"{where}: expected each category once, got {one.id!r} twice")
    return names


def _image_columns(
    images: Sequence[Mapping[str, Any]], where: str
) -> tuple[dict[str, Array], list[str]]:
    """Return the columns of the images' own values, and the keys that are left out."""
    columns: dict[str, Array] = {}
    left_out: list[str] = []
    for key in dict.fromkeys(key for image in images for key in image):
        name = "image_id" if key == "id" else key
        values = [image.get(key) for image in images]
        kinds = set(map(type, values))
        are_scalar = kinds <= {int, float} or (len(kinds) == 1 and kinds <= set(_SCALARS))
        if not are_scalar or key in ("image_id", _ANNOTATIONS, _NAMES):
            left_out.append(key)
        else:
            columns[name] = attribute_array(values, name, where)  # type: ignore[arg-type]
    return columns, left_out
