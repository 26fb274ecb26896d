"""LMDB environments, written by py-lmdb: keys that are paths and keys that are not, and damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.ingest.formats.lmdb import LmdbOptions, key_path
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import cut, flip_bit, write_at
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

VALUES = {f"d{i % 3}/{i:04d}.jpg".encode(): bytes([i % 251]) * (i * 31) for i in range(300)}


SMALL = {b"%04d" % i: b"x" * 500 for i in range(100)}
"""Several leaves under one branch."""


def patch(path: Path, offset: int, value: bytes) -> None:
    """Write over some bytes of an environment."""
    write_at(path / "data.mdb", offset, value)


def write(path: Path, values: dict[bytes, bytes], name: bytes | None = None, **flags: Any) -> Path:
    """An environment, as a folder or as the file ``x.lmdb``."""
    with lmdb.open(str(path), 32 << 20, path.suffix != ".lmdb", max_dbs=2) as environment:
        database = environment.open_db(name, **flags)
        with environment.begin(write=True, db=database) as transaction:
            for key, value in values.items():
                transaction.put(key, value)
    return path


@pytest.mark.parametrize("name", ["environment", "x.lmdb"])
def test_keys_are_paths(volume: Volume, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, VALUES)
    want = {key.decode(): value for key, value in VALUES.items()}
    source = open_source(path)
    assert source.sample_count == len(VALUES)
    assert source.sample_bytes == sum(map(len, VALUES.values()))
    assert {key: value for key, (value, _) in take(source).items()} == want
    assert import_all(volume, path) == want
    assert import_by_command(tmp_path, f"{path} V --format lmdb") == want


def test_a_named_database_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "e", {b"a": b"1"}, b"other")
    assert take(open_source(path, options={"database": "other"})) == {"a": (b"1", {})}
    with pytest.raises(UsageError, match="expected a database 'none such', got other"):
        open_source(path, options={"database": "none such"})


def test_named_databases_are_not_overlooked(volume: Volume, tmp_path: Path) -> None:
    path = tmp_path / "e"
    with lmdb.open(str(path), max_dbs=3) as environment:
        for name in (b"labels", b"images"):
            database = environment.open_db(name)
            with environment.begin(write=True) as transaction:
                transaction.put(b"a", name, db=database)
        message = "got only named databases: the option database names one of images, labels"
        with refused(volume, UsageError, message):
            import_all(volume, path)
        assert take(open_source(path, options={"database": "labels"})) == {"a": (b"labels", {})}
        with environment.begin(write=True) as transaction:
            transaction.put(b"m", b"1")
    source = open_source(path)
    assert take(source) == {"m": (b"1", {})}
    assert source.skipped == {"database that is not used: images, labels": 2}


def test_keys_are_selected(tmp_path: Path) -> None:
    path = write(tmp_path / "e", VALUES | {b"__len__": b"300"})
    source = open_source(path, options={"select": "d1/*"})
    assert source.sample_count == 100
    assert set(take(source)) == {key.decode() for key in VALUES if key.startswith(b"d1/")}
    assert source.skipped == {"key that select leaves out": 201}


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (b"a/b", b"a/b"),
        (b"100%", b"100%25"),
        (b"/a", b"%2Fa"),
        (b"a//b", b"a%2F%2Fb"),
        (b"a\0", b"a%00"),
        (b"..", b"%2E%2E"),
        (b"../a", b"..%2Fa"),
        (b"\xff\xfe", b"\xff\xfe"),
    ],
)
def test_keys_that_are_no_paths_are_escaped(key: bytes, path: bytes) -> None:
    assert key_path(key) == path


@given(st.sets(st.binary(min_size=1, max_size=4), max_size=50))
def test_no_two_keys_give_one_path(keys: set[bytes]) -> None:
    assert len({key_path(key) for key in keys}) == len(keys)


def test_odd_keys_arrive(volume: Volume, tmp_path: Path) -> None:
    values = {b"/a": b"1", b"..": b"2", b"%2Fa": b"3", b"\x01\0\0\0": b"4"}
    got = import_all(volume, write(tmp_path / "e", values))
    assert got == {"%2Fa": b"1", "%2E%2E": b"2", "%252Fa": b"3", "\x01%00%00%00": b"4"}


# ---- what is refused, and damage -----------------------------------------------------------------


def test_keys_that_cannot_be_paths_are_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path / "long", {b"k" * 300: b""})
    with refused(volume, LimitError, f"{path}: key 'kkk"):
        import_all(volume, path)
    path = write(tmp_path / "clash", {b"a": b"", b"a/b": b""})
    with refused(volume, ExistsError, "a"):
        import_all(volume, path)


def test_a_multimap_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "e", {b"a": b"1"}, b"many", dupsort=True)
    with pytest.raises(UsageError, match="expected one value for each key"):
        open_source(path, options={"database": "many"})


@pytest.mark.parametrize("size", [-4096, -1, 8192])
def test_a_cut_file_is_reported(volume: Volume, tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "e", VALUES)
    cut(path / "data.mdb", size)
    with refused(volume, TruncatedError, rf"{path}: .*expected \d+ .*bytes"):
        import_all(volume, path)


def test_a_file_without_its_first_pages_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path / "e", VALUES)
    whole = (path / "data.mdb").read_bytes()
    for size in (0, 100, 4096, 5000):
        (path / "data.mdb").write_bytes(whole[:size])
        with refused(volume, TruncatedError, f"import {path}: .*expected"):
            import_all(volume, path)


@pytest.mark.parametrize(
    ("offset", "value", "error", "message"),
    [
        (16, b"x", FormatError, "the meta page at byte 0: expected an LMDB environment"),
        (20, b"\2", VersionError, "the meta page at byte 0: expected version 1 of LMDB, got 2"),
        (40, b"\1", FormatError, "expected pages of 512..65536 bytes, got 4097"),
        (4096 + 16, b"x", FormatError, "the meta page at byte 4096: expected an LMDB"),
        (4096 + 94, b"\x63", FormatError, r"expected a depth of 0..32, got \d+"),
        (4096 + 120, b"\x63", FormatError, "key '0099': expected 99 keys, got more"),
        (4096 + 128, b"\xf0\xff", FormatError, r"expected a page of 2..\d+, got 65520"),
    ],
)
def test_a_damaged_meta_page_is_reported(
    volume: Volume, tmp_path: Path, offset: int, value: bytes, error: Any, message: str
) -> None:
    path = write(tmp_path / "e", SMALL)
    patch(path, offset, value)
    with refused(volume, error, f"{path}.*: {message}"):
        import_all(volume, path, format_name="lmdb")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"\xff", r"behind key '00\d\d': page \d+: expected its number and kind 2"),
        (10, b"\4", r"behind key '00\d\d': page \d+: expected its number and kind 2, got"),
        (12, b"\x0f", r"behind key '00\d\d': page \d+: expected nodes, got"),
        (16, b"\0\0", r"behind key '00\d\d': page \d+: expected a node in the page, got 0"),
        (16, b"\xff\xff", r"behind key .*: expected a node in the page, got 65535"),
    ],
)
def test_a_damaged_page_names_the_key_before_it(
    volume: Volume, tmp_path: Path, offset: int, value: bytes, message: str
) -> None:
    path = write(tmp_path / "e", SMALL)
    page = (path / "data.mdb").read_bytes().index(b"0050" + b"x" * 500) // 4096 * 4096
    patch(path, page + offset, value)
    with refused(volume, FormatError, f"{path}: {message}"):
        import_all(volume, path)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (-2, b"\xff\xff", r"page \d+: expected a key of 65535 bytes in the page"),
        (-6, b"\1", r"key '0050': expected 66036 bytes at"),
        (-4, b"\4", "key '0050': expected one value, got several"),
        (-4, b"\1", r"key '0050': expected a page of 2..\d+, got"),
        (0, b"00490", "key '0049': expected a key above '0049'"),
    ],
)
def test_a_damaged_node_is_reported(
    volume: Volume, tmp_path: Path, offset: int, value: bytes, message: str
) -> None:
    path = write(tmp_path / "e", SMALL)
    key = (path / "data.mdb").read_bytes().index(b"0050" + b"x" * 500)
    patch(path, key + offset, value)
    with refused(volume, FormatError, f"{path}: .*{message}"):
        import_all(volume, path)


def test_a_large_value_has_to_lie_in_the_file(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path / "e", {b"big": b"x" * 10_000})
    node = (path / "data.mdb").read_bytes().rindex(b"big") - 8
    patch(path, node + 2, b"\1")  # its size is 64 KiB more
    with refused(volume, FormatError, f"{path}: key 'big': expected 75536 bytes from page"):
        import_all(volume, path)


def test_no_flipped_bit_ends_otherwise_than_in_a_typed_error(tmp_path: Path) -> None:
    values = {b"%04d" % i: b"x" * (i % 7) for i in range(400)}
    path = write(tmp_path / "x.lmdb", values)
    whole = path.read_bytes()
    messages = []
    for offset in range(0, len(whole), 97):
        flip_bit(path, offset)
        try:
            take(open_source(path))
        except DlfsError as error:
            messages.append(str(error))
        path.write_bytes(whole)
    assert len(messages) > 10
    assert all(str(path) in message for message in messages)


def test_a_file_that_changes_is_reported(volume: Volume, tmp_path: Path) -> None:
    path = write(tmp_path / "e", VALUES)
    source = open_source(path)
    write(path, {b"more": b"1" * 100_000})
    with refused(volume, DeviceError, "the file changed during the import"):
        import_dataset(volume, source, "n")


def test_what_is_no_environment_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.lmdb").write_bytes(b"x" * 100_000)
    with pytest.raises(FormatError, match="expected an LMDB environment"):
        open_source(tmp_path / "x.lmdb")
    with pytest.raises(DeviceError, match="No such file"):
        LmdbOptions().open([str(tmp_path)])
    with pytest.raises(UsageError, match="expected one environment, got 2"):
        LmdbOptions().open([str(tmp_path), str(tmp_path)])


def page(number: int, flags: int, nodes: list[bytes]) -> bytes:
    """Return a page of 4096 bytes with some nodes."""
    ends = np.cumsum([len(node) for node in reversed(nodes)])[::-1] if nodes else []
    lower, upper = 16 + 2 * len(nodes), 4096 - sum(map(len, nodes))
    head = struct.pack("<QHHHH", number, 0, flags, lower, upper)
    head += b"".join(struct.pack("<H", 4096 - end) for end in ends)
    return head + bytes(upper - lower) + b"".join(nodes)


def test_pages_are_visited_once(tmp_path: Path) -> None:
    """A tree whose branches all have one child, 100 times: 100^levels leaves in a few pages."""
    levels = 5
    root, leaf = 2, 2 + levels
    pages = [
        page(root + level, 1, [struct.pack("<IHH", root + level + 1, 0, 0)] * 100)
        for level in range(levels)
    ]
    pages.append(page(leaf, 2, [struct.pack("<IHH", 1, 0, 1) + b"kv"]))
    tree = struct.pack("<IHHQQQQQ", 0, 0x08, levels + 1, 0, 0, 0, 100**levels, root)
    free = struct.pack("<IHHQQQQQ", 4096, 0, 0, 0, 0, 0, 0, (1 << 64) - 1)
    metas = [
        struct.pack("<QHHHH", number, 0, 8, 0, 0)
        + struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 20)
        + free
        + tree
        + struct.pack("<QQ", leaf, number)
        for number in range(2)
    ]
    path = tmp_path / "data.mdb"
    path.write_bytes(b"".join(meta.ljust(4096, b"\0") for meta in metas) + b"".join(pages))
    with pytest.raises(FormatError, match=rf"{path}: expected each of 8 pages once in the tree"):
        take(open_source(path))
