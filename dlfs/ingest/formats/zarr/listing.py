"""Lists a Zarr store, and checks its metadata before the package zarr sees it.

The package takes what it cannot read for absent, and an absent chunk for fill values. It also runs
any codec that a store names and a package registers; numcodecs' pickle is one. So all files are
listed and all metadata is read here: an entry must be a regular file, metadata must be JSON, and
its codecs must be among ``CODECS``, which cannot run what a store contains.
"""

from __future__ import annotations

import json
import os
import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlfs.base.units import MIB
from dlfs.ingest.isolation.confines import note_location

# fmt: off
CODECS = frozenset((
    "adler32", "astype", "base64", "bitround", "blosc", "bytes", "bz2", "categorize", "crc32",
    "crc32c", "delta", "fixedscaleoffset", "fletcher32", "gzip", "jenkins_lookup3", "json2", "lz4",
    "lzma", "msgpack2", "packbits", "pcodec", "quantize", "sharding_indexed", "shuffle",
    "transpose", "vlen-array", "vlen-bytes", "vlen-utf8", "zfpy", "zlib", "zstd",
))
# fmt: on
"""Codecs of zarr and numcodecs that only transform bytes; not pickle."""

V2_ARRAY, V2_CONSOLIDATED, V3 = ".zarray", ".zmetadata", "zarr.json"

_METADATA_BYTES_MAX = 256 * MIB
_COMPARED = ("shape", "chunks", "dtype", "data_type", "chunk_grid", "codecs", "compressor", "order")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a store.

    Attributes:
        keys: names of all files from the root of the store.
        arrays: metadata of each array, by the array's name.
        consolidated: metadata of each array, as consolidated metadata has it.
    """

    keys: frozenset[str]
    arrays: dict[str, Any] = field(default_factory=dict)
    consolidated: dict[str, Any] = field(default_factory=dict)

    def contradiction(self, name: str) -> str:
        """Return how consolidated metadata contradicts that of an array; empty if it does not."""
        own, copy = self.arrays[name], self.consolidated.get(name, self.arrays[name])
        for key in _COMPARED:
            if own.get(key) != copy.get(key):
                return (
                    f"expected the {key} of the consolidated metadata, {copy.get(key)}, got "
                    f"{own.get(key)} in the array's own; consolidate the metadata anew"
                )
        return ""


def list_store(path: str) -> Listing:
    """List a store and check its metadata.

    Args:
        path: path of a folder, or of a zip archive.

    Raises:
        ValueError: an entry is no regular file, or metadata is no JSON or names another codec.
        OSError: a file cannot be read.
    """
    if os.path.isdir(path):
        listing = Listing(frozenset(_walk(path)))
        for key in _metadata(listing.keys):
            with open(os.path.join(path, key), "rb") as file:
                _add(listing, key, file.read(_METADATA_BYTES_MAX))
        return listing
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        listing = Listing(frozenset(names))
        if len(listing.keys) != len(names):
            raise ValueError("expected each member of the archive once, got one twice")
        for key in _metadata(listing.keys):
            with archive.open(key) as member:
                _add(listing, key, member.read(_METADATA_BYTES_MAX))
    return listing


def _walk(folder: str) -> Iterator[str]:
    """Yield the names of all files below a folder; links are followed, but no folder twice."""
    pending, seen = [""], set()
    while pending:
        prefix = pending.pop()
        note_location(f"import {os.path.join(folder, prefix)}")
        status = os.stat(os.path.join(folder, prefix))
        if (status.st_dev, status.st_ino) in seen:
            raise ValueError(f"expected each folder once, got {prefix!r} again by a link")
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(os.path.join(folder, prefix)) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir():
                    pending.append(name + "/")
                elif entry.is_file():
                    yield name
                else:
                    raise ValueError(f"expected regular files, got {name!r}, which is none")


def _metadata(keys: frozenset[str]) -> list[str]:
    """Return the keys of the metadata that describes arrays."""
    kinds = (V3, V2_ARRAY, V2_CONSOLIDATED)
    return sorted(key for key in keys if posixpath.basename(key) in kinds)


def _add(listing: Listing, key: str, text: bytes) -> None:
    """Check metadata, and add the arrays that it describes."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{key}: expected a JSON object, got {type(document).__name__}")
    _check_codecs(document, key)
    group, kind = posixpath.split(key)
    node = document.get("node_type")
    if kind == V3 and (node not in ("array", "group") or document.get("zarr_format") != 3):
        raise ValueError(f"{key}: expected an array or a group of Zarr 3, got {node!r}")
    if kind == V2_ARRAY or node == "array":
        listing.arrays[group] = document
    elif kind == V2_CONSOLIDATED:
        for name, inner in _mapping(document.get("metadata")).items():
            if posixpath.basename(name) == V2_ARRAY and isinstance(inner, dict):
                listing.consolidated[posixpath.join(group, posixpath.dirname(name))] = inner
    else:
        inside = _mapping(_mapping(document.get("consolidated_metadata")).get("metadata"))
        for name, inner in inside.items():
            if isinstance(inner, dict) and inner.get("node_type") == "array":
                listing.consolidated[posixpath.join(group, name)] = inner


def _check_codecs(value: object, key: str) -> None:
    """Raise ValueError if metadata names a codec that is not allowed, at any depth."""
    if isinstance(value, list):
        for item in value:
            _check_codecs(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in ("codecs", "index_codecs", "filters", "compressor", "compressors"):
                for codec in item if isinstance(item, list) else [item]:
                    _check_codec(codec, key)
            if name not in ("attributes", ".zattrs"):
                _check_codecs(item, key)


def _check_codec(codec: object, key: str) -> None:
    if codec is None:
        return
    found = codec.get("name", codec.get("id")) if isinstance(codec, dict) else codec
    name = str(found).removeprefix("numcodecs.")
    if name not in CODECS:
        raise ValueError(
            f"{key}: expected a codec that only transforms bytes, got {found!r}; it might run code"
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
