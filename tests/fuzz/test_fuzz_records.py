"""Lock, lease and joining records of any bytes: a record, or none.

What must not be: an exception, a record that says more than its bytes, text that is not printable.
Only Python reads these records; libdlfs does not.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
from dataclasses import fields
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from dlfs._native.checksums import crc32c
from dlfs.block.lock import COUNTER_MAX, EXPIRY_MS_MAX, RECORD_BYTES, HolderRecord, LeaseMark
from dlfs.format.constants import JOINING_BYTES, MEMBERS_MAX
from dlfs.format.joining import JoiningRecord

ROUNDS = int(os.environ.get("DLFS_FUZZ_RUNS", "50000")) // 25
TEXT_MAX = 256

MAGIC = b"DLFS-LOCK 1\n"
LOCK = HolderRecord("import photos", "node-7", 4711, "dlfs", "2026-01-02T03:04:05+00:00")
LEASE = HolderRecord("repair", "node-8", 1, "python", "?", LeaseMark("0f" * 16, 12, 30_000))
JOINING = JoiningRecord(UUID(int=3), UUID(int=4), 5)
CRC_OFFSET = 508

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
NAMES = ("holder", "host", "pid", "command", "since", "lease", "counter", "expiry_ms")


def try_lock(content: bytes) -> bool:
    """Decode a lock record and its lease; return True if it is one."""
    mark = LeaseMark.decode(content)
    if mark is not None:
        assert re.fullmatch("[0-9a-f]{32}", mark.nonce)
        assert 0 <= mark.counter <= COUNTER_MAX
        assert 0 <= mark.expiry_ms <= EXPIRY_MS_MAX
    found = HolderRecord.decode(content)
    if found is None:
        return False
    assert found.lease == mark
    assert 0 <= found.pid <= 1 << 32
    for name in ("holder", "host", "command", "since"):
        text = getattr(found, name)
        assert len(text) <= TEXT_MAX
        assert text.isascii()
        assert text.isprintable() or not text
    again = HolderRecord.decode(found.encode())
    assert len(found.encode()) == RECORD_BYTES
    assert again == found
    return True


def try_joining(content: bytes) -> bool:
    """Decode a joining record; return True if it is one."""
    found = JoiningRecord.decode(content)
    if found is None:
        return False
    assert 0 <= found.member_number < MEMBERS_MAX
    assert JoiningRecord.decode(found.encode()) == found
    return True


def changed(source: bytes, chance: random.Random) -> bytearray:
    """Return the bytes with some of them replaced, removed or repeated."""
    content = bytearray(source)
    for _ in range(chance.choice((1, 2, 8))):
        at = chance.randrange(len(content))
        kind = chance.randrange(4)
        if kind == 0:
            content[at] = chance.choice((0, 255, chance.randrange(256), content[at] ^ 1))
        elif kind == 1:
            content[at] = chance.choice(b'0123456789-.eE"{}[],: \\\n')
        elif kind == 2:
            del content[at : at + chance.randrange(1, 9)]
        else:
            content[at:at] = content[at : at + chance.randrange(1, 9)]
    return content


def chance_of_this_run() -> random.Random:
    seed = int(os.environ.get("DLFS_FUZZ_SEED", "0")) or random.randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def test_the_seeds_are_valid() -> None:
    assert try_lock(LOCK.encode())
    assert LeaseMark.decode(LEASE.encode()) == LEASE.lease
    assert try_lock(LEASE.encode())
    assert try_joining(JOINING.encode())


def test_changed_locks_and_leases() -> None:
    chance = chance_of_this_run()
    found = 0
    for _ in range(ROUNDS):
        source = chance.choice((LOCK, LEASE)).encode()
        length = source.index(b"}\n") + 2
        content = bytes(changed(source[:length], chance))
        found += try_lock(content.ljust(RECORD_BYTES, b"\0")[: chance.choice((512, RECORD_BYTES))])
    assert 0 < found < ROUNDS


def test_changed_joining_records() -> None:
    chance = chance_of_this_run()
    found = 0
    for _ in range(ROUNDS):
        content = bytearray(JOINING.encode())
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(64)
            content[at] = chance.choice((0, 255, chance.randrange(256), content[at] ^ 1))
        if chance.random() < 0.8:
            struct.pack_into("<I", content, CRC_OFFSET, crc32c(bytes(content[:CRC_OFFSET])))
        found += try_joining(bytes(content[: chance.choice((JOINING_BYTES, len(content) - 1))]))
    assert 0 < found < ROUNDS


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_any_bytes(content: bytes) -> None:
    assert not try_joining(content)
    try_lock(content)
    try_lock(MAGIC + content)
    try_lock(MAGIC + content + b"\n")


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_value_of_a_lock(value: dict[str, object]) -> None:
    try_lock(MAGIC + json.dumps({"pid": 1, **value}).encode() + b"\n")
    assert {field.name for field in fields(HolderRecord)} - {"lease"} <= set(NAMES)


def test_values_inside_values() -> None:
    """As deep as the record is long: neither decoding nor printing them goes on without end."""
    for depth in range(1, RECORD_BYTES // 2 - 32):
        nested = b"[" * depth + b"]" * depth
        try_lock(MAGIC + b'{"pid": 1, "holder": ' + nested + b"}\n")
