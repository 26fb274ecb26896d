"""Hostile location records, in Python and for the C interface: what they name is not followed.

The harness in C (native/fuzz) makes checksums right, as the test in Python does.
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from dlfs._native.checksums import crc32c
from dlfs.block import FileUri, MemoryUri, NvmeTcpUri, SpdkUri, open_device, parse_uri
from dlfs.format.locations import LocationRecord
from dlfs.store.places import RefusedError, follow
from tests.fuzz.test_fuzz_nvme_pdu import built, survives

INPUT_BYTES_MAX = 2048
ROUNDS = int(os.environ.get("DLFS_FUZZ_RUNS", "50000")) // 25

GIVEN = (
    "/given/member0",
    "nvme-tcp://10.0.0.1/nqn.2024-01.org.example:a?nsid=1&dhchap_key=own",
    "spdk:trtype=TCP traddr=10.0.0.2 subnqn=nqn.2024-01.org.example:a nsid=1",
)
NAMED = (
    "/given/member1",
    "/given/../etc/shadow",
    "file:/given/%2e%2e/etc/shadow",
    "/etc/shadow",
    "mem:64MiB",
    "nvme-tcp://10.0.0.1:4421/nqn.2024-01.org.example:b?nsid=2&dhchap_key=other&tls_psk=other",
    "nvme-tcp://10.0.0.9/nqn.2024-01.org.example:b?nsid=2&path=10.0.0.1",
    "nvme-tcp://10.0.0.9/nqn.2024-01.org.example:b?nsid=2&dhchap_key=own",
    "nvme-tcp+discover://10.0.0.1",
    "spdk:trtype=TCP traddr=10.0.0.2 subnqn=nqn.2024-01.org.example:b nsid=2 cores=0",
    "spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=1",
    "unix:/run/dlfs.sock",
    "",
)


def record() -> bytes:
    """Return a record of plausible and of odd places."""
    return LocationRecord(UUID(int=7), 9, {uuid4(): uri for uri in NAMED}).encode()


def check_followed(uri: str) -> None:
    """Check that a URI is of a given place, with the given options."""
    found = parse_uri(uri)
    if isinstance(found, FileUri):
        assert os.path.dirname(found.path) == "/given"
        assert os.path.basename(found.path) not in ("", ".", "..")
    elif isinstance(found, NvmeTcpUri):
        assert {host for host, _ in found.paths} == {"10.0.0.1"}
        assert (found.options.dhchap_key, found.options.tls_psk) == ("own", None)
    else:
        assert isinstance(found, SpdkUri)
        assert dict(found.transport_id)["traddr"] == "10.0.0.2"
        assert found.options == ()
        assert not isinstance(found, MemoryUri)


def try_record(content: bytes) -> tuple[int, int]:
    """Decode a record and follow its URIs; return how many were followed, and refused."""
    found = LocationRecord.decode(content)
    followed = refused = 0
    for uri in {} if found is None else found.uris.values():
        try:
            check_followed(follow(uri, GIVEN, open_device)[0])
            followed += 1
        except RefusedError:
            refused += 1
    return followed, refused


def test_the_seed_is_followed_in_part() -> None:
    assert try_record(record()) == (4, len(NAMED) - 4)


def test_any_record_leads_to_given_places_only() -> None:
    seed = int(os.environ.get("DLFS_FUZZ_SEED", "0")) or random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    source = record()
    total = [0, 0]
    for _ in range(ROUNDS):
        content = bytearray(source)
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(len(content))
            content[at] = chance.choice((0, 255, chance.randrange(256), content[at] ^ 1))
        if chance.random() < 0.8:  # else the length is among what was changed
            struct.pack_into("<I", content, 12, len(content))
            struct.pack_into("<I", content, len(content) - 4, crc32c(content[:-4]))
        found = try_record(bytes(content))
        total = [one + more for one, more in zip(total, found, strict=True)]
    assert min(total) > 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_c_interface_survives_hostile_records(tmp_path: Path) -> None:
    fuzzer = built("fuzz_locations", tmp_path)
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    (seeds / "record").write_bytes(b"\1" + record())
    for number, uri in enumerate(NAMED):
        one = LocationRecord(UUID(int=7), 9, {uuid4(): uri}).encode()
        (seeds / f"{number}").write_bytes(b"\1" + one)
    survives(fuzzer, seeds, INPUT_BYTES_MAX)
