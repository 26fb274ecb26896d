"""Recognises URLs among the sources of an import."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import unquote, urlsplit

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HTTP = ("http", "https")


def is_url(text: str) -> bool:
    """Return True if a source is read through fsspec, such as ``s3://bucket/train``."""
    return _URL.match(text) is not None


def is_http(text: str) -> bool:
    """Return True if a URL is read over HTTP, where ``?`` begins a query."""
    match = _URL.match(text)
    return match is not None and match[1].lower() in _HTTP


def plain_path(text: str) -> str:
    """Return a path without the parts that only HTTP has: host, query and percent escapes."""
    return unquote(urlsplit(text).path) if is_http(text) else text


def base_name(url: str) -> str:
    """Return the last component of a URL's path; ``data`` if it has none."""
    text = plain_path(url).rstrip("/")
    return posixpath.basename(text) or "data"
