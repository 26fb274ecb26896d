"""Requests and replies of the FUSE protocol, without a kernel."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.staging import wire
from dlfs.staging.entries import Change, Owner
from dlfs.staging.wire import Backing, Entry, Listing, Opened, Request

PASSTHROUGH = 1 << 37


def request(kind: int, body: bytes) -> Request:
    header = wire.HEADER_IN.pack(wire.HEADER_IN.size + len(body), kind, 7, 3, 11, 22, 33, 0, 0)
    return Request.decode(header + body)


def init_flags(body: bytes) -> int:
    low, high = struct.unpack_from("=I", body, 12)[0], struct.unpack_from("=I", body, 32)[0]
    return int(low | high << 32)


def test_requests() -> None:
    found = request(wire.RENAME2, wire.RENAME2_IN.pack(5, 1, 0) + b"old\0new\0")
    assert (found.kind, found.number, found.node, found.caller) == (45, 7, 3, Owner(11, 22))
    assert found.names(wire.RENAME2_IN.size) == [b"old", b"new", b""]


def test_changes() -> None:
    times = (-2, 9, 0, 5, 6, 0)  # seconds, then nanoseconds
    body = wire.SETATTR_IN.pack(
        1 << 4 | 1 << 6 | 1 << 3 | 1 << 11, 0, 8, 100, 0, *times, 0o600, 0, 1, 2, 0
    )
    wanted = Change(size_bytes=100, access_ns=-2 * 10**9 + 5, clears_ids=True)
    assert request(wire.SETATTR, body).change() == (wanted, 8)


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_init(offered: bool, wanted: bool) -> None:
    flags = (1 << 30) - 1 | 1 << 30 | (PASSTHROUGH if offered else 0)
    body = wire.INIT_IN.pack(7, 45, 1 << 17, flags & 0xFFFFFFFF, flags >> 32)
    reply, passed = wire.init(request(wire.INIT, body), pass_through=wanted)
    assert (len(reply), passed) == (64, offered and wanted)
    assert struct.unpack_from("=II", reply) == (7, 40)
    accepted = init_flags(reply)
    assert bool(accepted & PASSTHROUGH) == passed
    assert accepted & ~(flags | PASSTHROUGH) == 0


def test_kernels_that_are_too_old() -> None:
    reply, _ = wire.init(request(wire.INIT, struct.pack("=IIII", 7, 8, 0, 0)), pass_through=True)
    assert reply == b""
    reply, passed = wire.init(
        request(wire.INIT, struct.pack("=IIII", 7, 26, 0, 0xFFFFFFFF)), pass_through=True
    )
    assert (struct.unpack_from("=II", reply), passed) == ((7, 26), False)


@given(
    st.lists(st.binary(min_size=1, max_size=255), max_size=20), st.integers(0, 2000), st.booleans()
)
def test_listings_keep_to_the_size(names: list[bytes], bytes_max: int, plus: bool) -> None:
    listing = Listing(bytes_max, plus=plus)
    status = os.stat("/")
    count = sum(listing.append(name, Entry(5, status), 1) for name in names)
    reply = listing.encode()
    assert len(reply) <= bytes_max
    assert len(reply) % 8 == 0
    assert count <= len(names)


def test_replies_have_the_kernels_sizes() -> None:
    status = os.stat("/")
    assert len(wire.attributes(Entry(1, status))) == 104
    assert len(wire.entry(Entry(1, status))) == 128
    assert len(wire.space(os.statvfs("/"))) == 80
    assert wire.opened(Opened(3, 9)) == struct.pack("=QIi", 3, 1 << 7, 9)
    assert wire.opened(Opened(3)) == struct.pack("=QIi", 3, 0, 0)
    assert wire.entry_is_gone(1, b"x") == struct.pack("=IiQQII2s", 34, 3, 0, 1, 1, 0, b"x\0")
    assert wire.reply_header(7, 2, b"") == struct.pack("=IiQ", 16, -2, 7)


def test_files_that_cannot_be_passed_through(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert Backing().open(file.fileno()) == 0
        assert Backing(file.fileno()).open(file.fileno()) == 0  # no connection to the kernel
