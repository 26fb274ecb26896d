"""Thumbnails: known images, arrays as PNG, limits, and images that are too large to decode."""

from __future__ import annotations

import io
import re
import sys
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from dlfs.notebook import thumbnails
from dlfs.notebook.thumbnails import (
    THUMBNAIL_BYTES_MAX,
    THUMBNAILS_MAX,
    Thumbnails,
    describe,
    encode_png,
    image_type,
    pixels_of,
)

RANDOM = np.random.default_rng(0)


def encoded(kind: str, size: tuple[int, int] = (20, 10), noise: bool = False) -> bytes:
    pixels = RANDOM.integers(0, 255 if noise else 1, (*size[::-1], 3)).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


def images_of(html: str) -> list[tuple[str, bytes]]:
    found = re.findall(r'src="data:(image/[a-z]+);base64,([^"]*)"', html)
    return [(kind, b64decode(data)) for kind, data in found]


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp"])
def test_images_are_known_by_their_first_bytes(kind):
    data = encoded(kind)
    assert image_type(data) == f"image/{kind}"
    assert image_type(memoryview(data)) == f"image/{kind}"
    assert images_of(Thumbnails(1).card(data, "a")) == [(f"image/{kind}", data)]


@pytest.mark.parametrize(
    "data",
    [b"", b"BM", b"BM is a text", b"GIF", b"RIFF....WAVE", b"<svg onload='x()'/>", b"\xff\xd8"],
)
def test_other_bytes_are_no_images(data):
    assert image_type(data) is None
    assert "<img" not in Thumbnails(1).card(data, "a")


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ((12, 10), "L"),
        ((12, 10, 1), "L"),
        ((1, 12, 10), "L"),
        ((12, 10, 3), "RGB"),
        ((3, 12, 10), "RGB"),
        ((12, 10, 4), "RGBA"),
        ((4, 12, 10), "RGBA"),
    ],
)
def test_arrays_of_pixels_become_png(shape, mode):
    array = RANDOM.integers(0, 256, shape).astype(np.uint8)
    last = array if shape[0] == 12 else np.moveaxis(array, 0, 2)
    ((kind, png),) = images_of(Thumbnails(1).card(array, "a"))
    assert kind == "image/png"
    with Image.open(io.BytesIO(png)) as opened:
        assert opened.mode == mode
        assert np.array_equal(np.asarray(opened).reshape(last.shape), last)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("f4", (8, 8)), ("u1", (8,)), ("u1", (8, 8, 2)), ("u1", (2, 8, 8, 3)), ("u1", (0, 8)),
     ("u1", (2, 4000))],
)  # fmt: skip
def test_other_arrays_are_described(dtype, shape):
    array = np.zeros(shape, dtype)
    assert pixels_of(array) is None
    assert str(list(shape)) in Thumbnails(1).card(array, "a")


def test_large_arrays_show_every_nth_pixel():
    array = np.zeros((1000, 500), np.uint8)
    array[::11] = 255
    ((_, png),) = images_of(Thumbnails(1).card(array, "a"))
    with Image.open(io.BytesIO(png)) as opened:
        assert opened.size == (46, 91)
        assert opened.getextrema() == (255, 255)


def test_the_bytes_of_all_thumbnails_are_bounded():
    noise = RANDOM.integers(0, 256, (96, 96, 3)).astype(np.uint8)
    made = Thumbnails(THUMBNAILS_MAX)
    cards = [made.card(noise, str(number)) for number in range(THUMBNAILS_MAX)]
    assert all("<img" in card for card in cards)
    assert sum(map(len, cards)) < THUMBNAIL_BYTES_MAX + 1000 * THUMBNAILS_MAX


def test_large_images_are_made_smaller():
    data = encoded("png", (800, 600), noise=True)
    ((kind, small),) = images_of(Thumbnails(THUMBNAILS_MAX).card(data, "a"))
    assert kind == "image/jpeg"
    with Image.open(io.BytesIO(small)) as opened:
        assert opened.size == (160, 120)


def test_large_images_without_pillow(monkeypatch):
    data = encoded("png", (800, 600), noise=True)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "too large to show" in Thumbnails(THUMBNAILS_MAX).card(data, "a")


def test_damaged_and_huge_images_are_not_decoded(monkeypatch):
    data = encoded("png", (800, 600), noise=True)
    broken = data[:1000] + bytes(len(data) - 1000)
    assert "<img" not in Thumbnails(THUMBNAILS_MAX).card(broken, "a")
    monkeypatch.setattr(thumbnails, "DECODED_PIXELS_MAX", 800 * 600 - 1)
    assert "<img" not in Thumbnails(THUMBNAILS_MAX).card(data, "a")


def test_texts_show_their_beginning():
    assert describe(b"") == "empty"
    assert describe('{"ä": 1,\n "b"}'.encode()) == '{"ä": 1,  "b"}'
    assert describe(b"abc " * 100).startswith("abc abc")
    assert describe(b"\x00\x01binary") == "8 B of data"
    assert describe(("ä" * 200).encode()[1:]) == "399 B of data"
    assert "&lt;script&gt;" in Thumbnails(1).card(b"<script>", "a")


def test_fields_are_next_to_each_other():
    sample = {"image": encoded("png"), "mask": np.zeros((4, 4), np.uint8), "<b>": "<i>"}
    card = Thumbnails(1).card(sample, "a")
    assert [kind for kind, _ in images_of(card)] == ["image/png", "image/png"]
    assert "&lt;i&gt;" in card
    assert "<i>" not in card


def test_a_png_is_what_its_specification_says():
    png = encode_png(np.array([[1, 2], [3, 4]], np.uint8))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert png[12:16] == b"IHDR"
    assert png.endswith(b"IEND\xaeB`\x82")
