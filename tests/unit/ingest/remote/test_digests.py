"""Checksums as stores write them."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlfs._native.checksums import crc32c
from dlfs.ingest.remote.digests import compute, etag_digests, find_digests

DATA = b"some bytes" * 1000
MD5, SHA256 = hashlib.md5(DATA).digest(), hashlib.sha256(DATA).digest()
CRC32C = crc32c(DATA).to_bytes(4, "big")


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"md5Hash": text(MD5), "crc32c": text(CRC32C)}, {"md5": MD5, "crc32c": CRC32C}),
        ({"content_settings": {"content_md5": bytearray(MD5)}}, {"md5": MD5}),
        ({"Digest": f"MD5={text(MD5)}, SHA-256={text(SHA256)}"}, {"md5": MD5, "sha256": SHA256}),
        ({"lfs": {"sha256": SHA256.hex()}}, {"sha256": SHA256}),
        ({"lfs": SimpleNamespace(sha256=SHA256.hex())}, {"sha256": SHA256}),
        ({"ChecksumSHA256": text(SHA256)}, {"sha256": SHA256}),
        ({"ChecksumSHA256": text(SHA256) + "-3"}, {}),  # of an upload in parts
        ({"Content-MD5": "nonsense", "md5Hash": None, "lfs": None, "crc32c": 5}, {}),
        ({"Digest": "unixsum=30637"}, {}),
    ],
)
def test_digests_of_stores_are_read(info: dict[str, Any], expected: dict[str, bytes]) -> None:
    assert find_digests(info) == {name: data.hex() for name, data in expected.items()}


@pytest.mark.parametrize(
    ("response", "is_md5"),
    [
        ({}, True),
        ({"ServerSideEncryption": "AES256"}, True),
        ({"ServerSideEncryption": "aws:kms"}, False),
        ({"SSECustomerAlgorithm": "AES256"}, False),
        ({"ETag": f'"{MD5.hex()}-3"'}, False),
        ({"ETag": None}, False),
    ],
)
def test_an_etag_is_an_md5_only_of_a_plain_upload(response: dict[str, Any], is_md5: bool) -> None:
    found = etag_digests({"ETag": f'"{MD5.hex()}"', **response})
    assert found == ({"md5": MD5.hex()} if is_md5 else {})


def test_digests_of_a_file_are_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA + b"more")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        found = compute(file, 0, len(DATA), ["md5", "sha256", "crc32", "crc32c"])
    finally:
        os.close(file)
    assert found == {
        "md5": MD5.hex(),
        "sha256": SHA256.hex(),
        "crc32": f"{zlib.crc32(DATA):08x}",
        "crc32c": CRC32C.hex(),
    }
