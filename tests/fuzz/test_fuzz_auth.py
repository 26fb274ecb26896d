"""Hostile messages of authentication and hostile key files: libFuzzer from valid ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dlfs.fabric.keys import KeyKind, generate_key
from tests.fuzz.test_fuzz_nvme_pdu import built, survives

INPUT_BYTES_MAX = 2400
TRANSACTION = 0x1234
CHALLENGE, SUCCESS, KEY, JSON = range(4)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def seeds() -> list[bytes]:
    """Return valid inputs; their first byte chooses the parser."""
    header = (1, 1, 0, TRANSACTION)
    plain = struct.pack("<BBHHBBBBHI", *header, 32, 0, 1, 0, 0, 7) + bytes(32)
    group = struct.pack("<BBHHBBBBHI", *header, 64, 0, 3, 1, 256, 7) + bytes(64 + 256)
    # For a secure channel, whose offers exclude the hash and the missing group of the others.
    channel = struct.pack("<BBHHBBBBHI", *header, 32, 0, 1, 1, 256, 7) + bytes(32 + 256)
    failure = struct.pack("<BBHHBB", 0, 0xF1, 0, TRANSACTION, 1, 1)
    success = struct.pack("<BBHHBBB7x", 1, 3, 0, TRANSACTION, 64, 0, 1) + bytes(64)
    config = (
        b'[{"hostnqn":"h","dhchap_key":"k","subsystems":[{"nqn":"s","ports":[{"tls_key":"t"}]}]}]'
    )
    return [
        *(bytes([CHALLENGE]) + message for message in (plain, group, failure)),
        bytes([CHALLENGE + 4]) + channel,
        *(bytes([SUCCESS]) + message for message in (success, failure)),
        *(bytes([KEY]) + generate_key(hash_id=number).encode() for number in (1, 2, 3)),
        bytes([KEY + 8]) + generate_key(KeyKind.TLS).encode(),
        bytes([JSON]) + config,
        bytes([JSON + 8]) + config,
    ]


def test_the_parsers_survive_hostile_input(tmp_path: Path) -> None:
    fuzzer = built("fuzz_auth", tmp_path)
    folder = tmp_path / "seeds"
    folder.mkdir()
    for number, seed in enumerate(seeds()):
        (folder / str(number)).write_bytes(seed)
    survives(fuzzer, folder, INPUT_BYTES_MAX)
