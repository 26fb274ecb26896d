"""Makes thumbnails of samples: small images as data URIs.

A sample that a browser can show, by its first bytes, is its own thumbnail if it is small. A large
one is made smaller by Pillow where that is installed. An array of pixels becomes a PNG, which needs
zlib only. Samples of text show their beginning.

Limits: the constants below. No sample is trusted: one that cannot be decoded is described instead.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from base64 import b64encode
from codecs import getincrementaldecoder
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.base.units import format_bytes
from dlfs.notebook.markup import Html, element, fragment, image, readable

THUMBNAILS_MAX = 8
"""Most samples that a page shows."""
THUMBNAIL_BYTES_MAX = 120 << 10
"""Most bytes of all thumbnails of a page, as text of data URIs."""
SIDE_PIXELS = 96
"""Width and height of the space for a thumbnail on the page."""
SIDES_PIXELS = (96, 64, 32)
"""Most pixels on a side of an array's thumbnail: the first that fits into its bytes is taken."""
SHRUNK_PIXELS = 160
"""Most pixels on a side of a thumbnail that Pillow makes; more than shown, for fine screens."""
DECODED_PIXELS_MAX = 50_000_000
"""Most pixels of an image that Pillow decodes."""
ASPECT_MAX = 16
"""Most that one side of an array may exceed the other; above, it is no image."""
FIELDS_MAX = 4
"""Most fields of a sample that are shown."""

_BOX = f"width:{SIDE_PIXELS}px;height:{SIDE_PIXELS}px;"
_MAGIC = re.compile(
    rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8[79]a)"
    rb"|(?P<webp>RIFF....WEBPVP8)|(?P<avif>....ftypavif)"
    rb"|(?P<bmp>BM....\0\0\0\0....\x28\0\0\0)",
    re.DOTALL,
)
"""First bytes of the images that browsers show, by the name of their media type."""


def image_type(data: bytes | memoryview) -> str | None:
    """Return the media type of an image that browsers show, by its first bytes; else None."""
    found = _MAGIC.match(data[:32])
    return None if found is None else f"image/{found.lastgroup}"


# ---- arrays --------------------------------------------------------------------------------------


def pixels_of(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return an array that looks like an image with its channels last; None if it does not.

    Images are ``uint8`` with two dimensions, or three of which the last or first is 1, 3 or 4.
    """
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or not array.size:
        return None
    pixels = array
    if array.ndim == 3:
        if array.shape[2] not in (1, 3, 4):
            if array.shape[0] not in (1, 3, 4):
                return None
            pixels = np.moveaxis(array, 0, 2)
        if pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
    short, long = sorted(pixels.shape[:2])
    return pixels if long <= ASPECT_MAX * short else None


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG.

    Args:
        pixels: ``uint8[height, width]`` grey, or with a last dimension of 3 (RGB) or 4 (RGBA).

    Source: PNG specification (ISO/IEC 15948), sections 5 and 11.
    """
    height, width = pixels.shape[:2]
    colour_type = 0 if pixels.ndim == 2 else {3: 2, 4: 6}[pixels.shape[2]]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    filtered = np.zeros((height, 1 + rows.shape[1]), np.uint8)  # filter 0 of each row: none
    filtered[:, 1:] = rows
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def _array_png(pixels: NDArray[np.uint8], bytes_max: int) -> bytes | None:
    """Return every n-th pixel as a PNG of at most ``bytes_max`` bytes; None if none is as small."""
    for side in SIDES_PIXELS:
        step = -(-max(pixels.shape[:2]) // side)
        png = encode_png(pixels[::step, ::step])
        if len(png) <= bytes_max:
            return png
    return None


# ---- encoded images ------------------------------------------------------------------------------


def _shrink(data: bytes, bytes_max: int) -> bytes | None:
    """Return an image as a small JPEG; None without Pillow, or if it cannot be decoded."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > DECODED_PIXELS_MAX:
                return None
            opened.draft("RGB", (SHRUNK_PIXELS, SHRUNK_PIXELS))
            small = opened.convert("RGB")
        small.thumbnail((SHRUNK_PIXELS, SHRUNK_PIXELS))
        written = io.BytesIO()
        small.save(written, "JPEG", quality=75)
    except Exception:  # noqa: BLE001  its decoders raise errors of many kinds for damaged images
        return None
    return written.getvalue() if written.tell() <= bytes_max else None


# ---- thumbnails ----------------------------------------------------------------------------------


class Thumbnails:
    """Makes the thumbnails of one page, within ``THUMBNAIL_BYTES_MAX``.

    Args:
        count: number of samples that will be shown.
    """

    def __init__(self, count: int) -> None:
        self._left_bytes = THUMBNAIL_BYTES_MAX
        self._left_count = count

    def card(self, value: Any, caption: str, title: str = "") -> Html:
        """Return a sample with a caption.

        Args:
            value: the sample: bytes, an array, text, or fields by name.
            caption: text below it.
            title: longer text, shown when the mouse rests on it.
        """
        share = self._left_bytes // max(1, self._left_count)
        self._left_count -= 1
        if isinstance(value, Mapping):
            fields = list(value.items())[:FIELDS_MAX]
            parts = [self._show(v, share // len(fields), readable(n)) for n, v in fields]
            body = element("div", *parts, style="display:flex;gap:2px")
        else:
            body = self._show(value, share, caption)
        return self._frame(body, caption, title)

    def message(self, text: str, caption: str, title: str = "") -> Html:
        """Return a caption with a text in place of the sample."""
        self._left_count -= 1
        return self._frame(_box(text), caption, title)

    def _frame(self, body: Html, caption: str, title: str) -> Html:
        below = element(
            "div",
            caption,
            title=title or caption,
            style=f"max-width:{SIDE_PIXELS}px;overflow:hidden;text-overflow:ellipsis;"
            "white-space:nowrap;font-size:.8em",
        )
        return element("div", body, below, style="margin:2px")

    def _show(self, value: Any, share_bytes: int, alt: str) -> Html:
        """Return a value as an image, or as a text that describes it."""
        found = self._image(value, share_bytes // 4 * 3 - 64)
        if found is None:
            return _box(describe(value))
        kind, data = found
        source = f"data:{kind};base64,{b64encode(data).decode()}"
        self._left_bytes -= len(source)
        small = "image-rendering:pixelated;" if isinstance(value, np.ndarray) else ""
        return image(source, alt, f"{_BOX}object-fit:contain;{small}")

    def _image(self, value: Any, bytes_max: int) -> tuple[str, bytes] | None:
        if isinstance(value, np.ndarray):
            pixels = pixels_of(value)
            png = None if pixels is None else _array_png(pixels, bytes_max)
            return None if png is None else ("image/png", png)
        if not isinstance(value, bytes | memoryview):
            return None
        kind = image_type(value)
        if kind is None:
            return None
        if len(value) <= bytes_max:
            return kind, bytes(value)
        small = _shrink(bytes(value), bytes_max)
        return None if small is None else ("image/jpeg", small)


def _box(text: str) -> Html:
    """Return a box of the size of a thumbnail with a text."""
    style = f"{_BOX}box-sizing:border-box;overflow:hidden;padding:4px;font-size:.75em;"
    return element(
        "div", text, style=f"{style}overflow-wrap:anywhere;background:rgba(128,128,128,.15)"
    )


def describe(value: Any) -> str:
    """Return a text in place of an image: the beginning of a text, or type and size."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, bytes | memoryview):
        kind = image_type(value)
        if kind is not None:
            return f"{kind}, {format_bytes(len(value))}: too large to show, or damaged"
        if not len(value):
            return "empty"
        return _beginning(bytes(value[:256])) or f"{format_bytes(len(value))} of data"
    return readable(value)


def _beginning(head: bytes) -> str:
    """Return the beginning of a text in UTF-8; empty if the bytes are no text."""
    try:
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return ""
    plain = text.translate({ord(c): " " for c in "\n\r\t"})
    return readable(plain) if plain.isprintable() else ""


def row_of(cards: list[Html]) -> Html:
    """Return cards next to each other."""
    return element("div", fragment(*cards), style="display:flex;flex-wrap:wrap;margin:.4em 0")
