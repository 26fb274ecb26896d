"""Replies to the kernel for what lies above the datasets: as its header has the structures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlfs.mount import kernel_replies as replies
from dlfs.mount.list_directories import Attributes
from dlfs.mount.mount_view import Space
from dlfs.mount.options import MountOptions
from tests.unit._native.test_abi import run_c

OPTIONS = MountOptions(uid=5, gid=6)
FOUND = Attributes(
    inode=1 << 60,
    mode=0o040555,
    modified_ns=7_000_000_008,
    generation=9,
    size_bytes=10,
    entry_seconds=1.25,
    attribute_seconds=1e9,
)


def fields_of(reply: bytes, structure: str, names: str, tmp_path: Path) -> list[int]:
    """Return fields of a reply, read by a program in C."""
    if not Path("/usr/include/linux/fuse.h").exists():
        pytest.skip("no headers of the kernel (package linux-libc-dev)")
    data = ",".join(map(str, reply))
    body = [f"static const unsigned char data[] = {{{data}}};", f"struct {structure} found;"]
    body.append("memcpy(&found, data, sizeof found);")
    body.append('printf("%zu %zu\\n", sizeof data, sizeof found);')
    body += [f'printf("%llu\\n", (unsigned long long)found.{name});' for name in names.split()]
    printed = run_c("\n".join(body), tmp_path, "linux/fuse.h", "string.h")
    given, expected = printed[0].split()
    assert given == expected
    return [int(line) for line in printed[1:] if line]


def test_attributes(tmp_path: Path) -> None:
    names = "attr_valid attr_valid_nsec attr.ino attr.size attr.mtime attr.mtimensec attr.mode"
    reply = replies.of_attributes(FOUND, OPTIONS)
    found = fields_of(reply, "fuse_attr_out", f"{names} attr.nlink attr.uid attr.gid", tmp_path)
    assert found == [1_000_000_000, 0, 1 << 60, 10, 7, 8, 0o040555, 1, 5, 6]


def test_an_entry(tmp_path: Path) -> None:
    names = "nodeid generation entry_valid entry_valid_nsec attr_valid attr.atimensec attr.blksize"
    found = fields_of(replies.of_entry(FOUND, OPTIONS), "fuse_entry_out", names, tmp_path)
    assert found == [1 << 60, 9, 1, 250_000_000, 1_000_000_000, 8, 4096]
    found = fields_of(replies.of_no_entry(), "fuse_entry_out", "nodeid entry_valid", tmp_path)
    assert found == [0, 1]


def test_space(tmp_path: Path) -> None:
    reply = replies.of_space(Space(40960, 8192, 3))
    names = "st.blocks st.bfree st.bavail st.files st.ffree st.bsize st.namelen st.frsize"
    found = fields_of(reply, "fuse_statfs_out", names, tmp_path)
    assert found == [10, 2, 2, 3, 0, 4096, 255, 4096]


@pytest.mark.parametrize("plus", [False, True])
def test_a_listing_takes_what_fits(plus: bool) -> None:
    entries = [(b"a" * length, FOUND, length) for length in (1, 8, 9, 255)]
    head = 24 + 128 * plus
    sizes = [head + 8, head + 8, head + 16, head + 256]
    for count in range(5):
        for spare in (0, 7):
            size = sum(sizes[:count]) + spare
            reply = replies.of_listing(entries, OPTIONS, size=size, plus=plus)
            assert len(reply) == sum(sizes[:count])
            assert [len(name) for name in re.findall(rb"a+", reply)] == [1, 8, 9, 255][:count]
