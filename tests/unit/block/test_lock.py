"""The record of a lock's holder: round trips, and malformed bytes."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dlfs.block.lock import COUNTER_MAX, EXPIRY_MS_MAX, RECORD_BYTES, HolderRecord, LeaseMark


def test_names_this_process() -> None:
    record = HolderRecord.of_this_process("dlfs import")
    assert record.pid == os.getpid()
    assert HolderRecord.decode(record.encode()) == record
    assert f"dlfs import on host {record.host}, pid {os.getpid()} (" in str(record)
    assert record.since.endswith("+00:00")


def test_is_one_block_whatever_the_holder_says() -> None:
    record = HolderRecord.of_this_process('"\\\N{BULLET}\n\x1b[31m' * 1000)
    assert len(record.encode()) == RECORD_BYTES
    assert HolderRecord.decode(record.encode()) == record
    assert str(record).isprintable()


def test_a_lease_is_a_record_whose_mark_lies_in_the_first_sector() -> None:
    mark = LeaseMark("0123456789abcdef" * 2, 17, 42000)
    record = replace(HolderRecord.of_this_process("\x1b" * 300), lease=mark)
    content = record.encode()
    assert len(content) == RECORD_BYTES
    assert HolderRecord.decode(content) == record
    assert LeaseMark.decode(content[:512].ljust(RECORD_BYTES, b"?")) == mark
    assert content.startswith(
        b'DLFS-LOCK 1\n{"lease": "0123456789abcdef0123456789abcdef", "counter": 17, '
        b'"expiry_ms": 42000, "holder": "'
    )


def test_a_mark_is_bounded_and_strict() -> None:
    line = b'DLFS-LOCK 1\n{"lease": "' + b"a" * 32 + b'", "counter": %s, "expiry_ms": %s, '
    assert LeaseMark.decode(line % (b"9" * 19, b"9" * 6)) == LeaseMark(
        "a" * 32, COUNTER_MAX, EXPIRY_MS_MAX
    )
    for counter, expiry in ((b"9" * 20, b"1"), (b"-1", b"1"), (b"1", b""), (b"1", b"9" * 7)):
        assert LeaseMark.decode(line % (counter, expiry)) is None
    assert LeaseMark.decode(b"") is None


@given(st.binary(max_size=300))
def test_malformed_bytes_are_no_record_or_a_printable_one(content: bytes) -> None:
    for prefix in (b"", b"DLFS-LOCK 1\n", b'DLFS-LOCK 1\n{"pid": 1, "holder": '):
        record = HolderRecord.decode(prefix + content)
        assert record is None or str(record).isprintable()


def test_fields_of_odd_types_and_sizes_are_converted_or_dropped() -> None:
    fields = {"pid": 10**30, "holder": "\x1b" * 3000, "host": [1], "since": None}
    record = HolderRecord.decode(b"DLFS-LOCK 1\n" + json.dumps(fields).encode() + b"\n")
    assert record is None  # longer than the record can be
    fields["holder"] = "\x1b" * 300
    record = HolderRecord.decode(b"DLFS-LOCK 1\n" + json.dumps(fields).encode() + b"\n")
    assert record is not None
    assert record.holder == "?" * 256
    assert (record.host, record.command, record.since) == ("[1]", "?", "None")
    assert len(str(record)) < 1500


def test_deep_nesting_and_huge_numbers_are_no_record() -> None:
    for body in (b"[" * 4000, b'{"pid": ' + b"9" * 4080 + b"}", b'{"pid": "1"}', b"[]", b"1"):
        content = b"DLFS-LOCK 1\n" + body + b"\n"
        record = HolderRecord.decode(content)
        assert record is None or record.pid <= 1 << 32
