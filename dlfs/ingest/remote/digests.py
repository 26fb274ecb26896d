"""Checksums of objects: reads what a store says about an object, and computes the same of a file.

A digest is a pair of an algorithm and lowercase hexadecimal digits. Stores write them in their own
ways: S3 as ETag (the MD5 of an object that was uploaded in one part) or ``ChecksumSHA256``, HTTP as
``Content-MD5`` or ``Digest`` (RFC 3230), Google as ``md5Hash`` and ``crc32c``, Azure as
``content_md5``, Hugging Face as ``lfs.sha256``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlfs._native.checksums import crc32c
from dlfs.base.units import MIB

Digests = dict[str, str]
"""Hexadecimal digits by algorithm: ``md5``, ``sha1``, ``sha256``, ``sha512``, ``crc32``..."""

_BLOCK_BYTES = MIB
_DIGIT_BYTES = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64, "crc32": 4, "crc32c": 4}
_MD5 = re.compile("[0-9a-f]{32}")
_FIELDS = {
    "md5Hash": "md5",
    "content_md5": "md5",
    "Content-MD5": "md5",
    "crc32c": "crc32c",
    "ChecksumSHA256": "sha256",
    "ChecksumSHA1": "sha1",
    "ChecksumCRC32": "crc32",
    "ChecksumCRC32C": "crc32c",
}


def find_digests(info: Mapping[str, Any]) -> Digests:
    """Return the digests in what a store says about an object, without S3's ETag."""
    found: Digests = {}
    for field, algorithm in _FIELDS.items():
        if (value := info.get(field)) is not None:
            _add(found, algorithm, value)
    settings = info.get("content_settings")
    if isinstance(settings, Mapping):
        _add(found, "md5", settings.get("content_md5"))
    for part in str(info.get("Digest") or "").split(","):
        name, has_value, text = part.strip().partition("=")
        if has_value:
            _add(found, name.lower().replace("-", ""), text)
    large = info.get("lfs")
    sha256 = large.get("sha256") if isinstance(large, Mapping) else getattr(large, "sha256", None)
    if isinstance(sha256, str):
        found["sha256"] = sha256.lower()
    return found


def etag_digests(response: Mapping[str, Any]) -> Digests:
    """Return the MD5 that the ETag of an S3 response is, if it is one.

    It is none for an object uploaded in parts (``...-3``) or encrypted with a customer's key.

    Source: Amazon S3 API Reference, "Object", ETag.
    """
    encrypted = str(response.get("ServerSideEncryption") or "AES256") != "AES256"
    if encrypted or response.get("SSECustomerAlgorithm"):
        return {}
    etag = str(response.get("ETag") or "").strip('"').lower()
    return {"md5": etag} if _MD5.fullmatch(etag) else {}


def compute(file: int, first: int, last: int, algorithms: Iterable[str]) -> Digests:
    """Compute digests of a range of a file, or of what there is of it.

    Args:
        file: descriptor of the file.
        first: offset of the first byte.
        last: offset behind the last byte.
        algorithms: names from ``Digests``.
    """
    functions: dict[str, Callable[[bytes, int], int]] = {"crc32": zlib.crc32, "crc32c": crc32c}
    names = set(algorithms)
    crcs = dict.fromkeys(names & functions.keys(), 0)
    hashers = {name: hashlib.new(name, usedforsecurity=False) for name in names - crcs.keys()}
    while first < last and (block := os.pread(file, min(_BLOCK_BYTES, last - first), first)):
        first += len(block)
        for name, crc in crcs.items():
            crcs[name] = functions[name](block, crc)
        for hasher in hashers.values():
            hasher.update(block)
    found = {name: hasher.hexdigest() for name, hasher in hashers.items()}
    return found | {name: f"{crc:08x}" for name, crc in crcs.items()}


def file_crc(file: int, first: int, last: int) -> int:
    """Return the CRC32C of the bytes ``first`` to ``last`` (excluded) of a file."""
    return int(compute(file, first, last, ["crc32c"])["crc32c"], 16)


def _add(found: Digests, algorithm: str, value: Any) -> None:
    """Add a digest in base64 or bytes; anything else, such as a checksum of parts, is ignored."""
    if algorithm not in _DIGIT_BYTES or not value:
        return
    try:
        data = (
            bytes(value) if not isinstance(value, str) else base64.b64decode(value, validate=True)
        )
    except (binascii.Error, ValueError, TypeError):
        return
    if len(data) == _DIGIT_BYTES[algorithm]:
        found[algorithm] = data.hex()
