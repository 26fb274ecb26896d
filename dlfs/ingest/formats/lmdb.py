"""Imports an LMDB environment: every key is a sample's path, its value the sample.

A key that is a valid path is the path. Other keys are escaped, so that no two keys give one path:
``%`` becomes ``%25`` in any key. In a key that is no valid path, the slash becomes ``%2F`` and NUL
``%00``; the keys ``.`` and ``..`` become ``%2E`` and ``%2E%2E``. ``select`` leaves out keys with
other content, such as a count of all keys.

LMDB has no checksums: damage to the tree is found, damage to a value is not. The pages of keys are
read first, without a lock, and tell where in the file each value is. Values are then read in the
order of packing, by several threads, so that ``shuffled`` is a true shuffle of all of them. So no
program may write meanwhile; if the file has changed at the end, the import fails.

Memory: 24 bytes and its path for each key, and the blocks.

``PageFile`` reads the B+tree page by page with ``pread``, and checks every number in it. Each page
must have its own number and kind, every offset must lie in its page and every page in the file,
keys must rise, and their count must be the tree's.

liblmdb does not check these: it maps the file, and reads beyond a damaged page or dies of SIGBUS in
a truncated file. We compared this reader with py-lmdb in a separate process, on a file of 150 keys.
Of 120 bits flipped in the tree, this reader missed 4 that changed samples, py-lmdb 22; of 20
truncations, none and 1. A sample of 4 KiB took 14 to 17 us here, and 29 to 33 us through that
process. This reader also saves users a package.

Layout, all little-endian: pages 0 and 1 are metas; the one of the later transaction is valid. A
page begins with its number (8 bytes), 2 unused bytes, its flags (2), and the ends of its lower and
upper parts (2 and 2). Offsets of nodes follow, 2 bytes each. A node has 8 bytes, the key and, in a
leaf, the value, or the number of the page where a large value begins. In a branch the 8 bytes have
the number of the child's page.

Source: liblmdb 0.9, mdb.c (MDB_meta, MDB_db, MDB_page, MDB_node), on 64-bit machines.
Limits: little-endian files of 64-bit machines, version 1.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import numpy as np

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.base.wording import quote
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    TruncatedError,
    UsageError,
    VersionError,
)
from dlfs.format.paths import path_problem
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.bad_records import BadRecords, RecordError
from dlfs.ingest.records import ShardSource
from dlfs.ingest.source import (
    Bytes,
    Int64Array,
    SampleBlock,
    Uint64Array,
    check_path,
    choose_samples,
    device_errors,
    file_state,
    left_out_names,
    show,
    single_path,
)

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_META_END = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_META_BYTES = _PAGE.size + _META.size + 2 * _TREE.size + _META_END.size

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_KINDS = _BRANCH | _LEAF | _OVERFLOW | _META_PAGE
_BIG, _TREE_IN_NODE, _DUPLICATES = 1, 2, 4
_DUPSORT, _UNORDERED = 0x04, 0x02 | 0x08
"""Flags of a tree: several values for a key; keys in reversed order, or numbers."""
_NO_PAGE = (1 << 64) - 1
_DEPTH_MAX = 32
_PAGE_BYTES = range(512, 65536 + 1)


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """Options of an LMDB environment."""

    select: Annotated[str, "pattern of the keys to import"] = "*"
    database: Annotated[str | None, "named database in the environment; none: the main one"] = None

    def open(self, paths: Sequence[str]) -> LmdbSource:
        """Open one environment; see ``LmdbSource``."""
        return LmdbSource(single_path(paths, "environment"), self)


class LmdbSource(ShardSource):
    """The keys and values of an environment.

    Args:
        path: path of the folder with ``data.mdb``, or of the file.
        options: options of the format.

    Raises:
        UsageError: the database does not exist, or has several values for a key.
        FormatError: the file is no environment, or is damaged.
        TruncatedError: the file ends too early.
        DeviceError: the file cannot be read.
    """

    def __init__(self, path: str, options: LmdbOptions) -> None:
        super().__init__([path], noun="an environment")
        self._select = options.select
        self._where = f"import {path}"
        self.skipped: Counter[str] = Counter()
        file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
        self._pages = PageFile(str(file), self._where, self.bad)
        with closed_on_error(self):
            self._tree = self._find_tree(options.database)
            if options.database is None:
                self._check_named()
            self.index = self._find_values(str(file))
        self.sample_count = len(self.index.sizes)
        self.sample_bytes = int(self.index.sizes.sum()) - _PAGE.size * int(self._are_large.sum())
        self.gives_shuffled = True

    def close(self) -> None:
        """Close the file."""
        self._pages.close()

    def _find_values(self, file: str) -> RangeReader:
        """Find the place of each value in the file, with the head of its page if it is large."""
        index = RangeReader([file])
        index.states.append(file_state(self._pages.file.value))
        self._names, ends = bytearray(), array("Q")
        places, sizes = array("Q"), array("Q")
        named: list[str] = []
        for key, is_tree, place in self._pages.items(self._tree, self.bad):
            if is_tree:
                named.append(show(key))
                continue
            if not fnmatchcase(show(key), self._select):
                self.skipped["key that select leaves out"] += 1
                continue
            path = key_path(key)
            try:
                check_path(path, f"{self._where}: key {show(key)!r}")
                position, size = place()
            except (*RecordError, DeviceError) as error:
                self.bad.note(self.shards[0], f"key {quote(key)}", error)
                continue
            places.append(position)
            sizes.append(size)
            self._names += path
            ends.append(len(self._names))
        self.skipped.update(left_out_names("database", named))
        self._ends = np.array(ends, np.int64)
        self._places = np.array(places, np.int64)
        index.sizes = np.array(sizes, np.uint64)
        begins_page = self._places % self._pages.page_bytes == 0  # as an empty value at an end
        self._are_large = begins_page & (index.sizes > 0)
        return index

    def read_indexed(self, indices: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        """Read values by index, and return them as a block; see ``ShardSource``."""
        assert self.index is not None
        sizes, places = self.index.sizes[indices].astype(np.int64), self._places[indices]
        chosen = indices.astype(np.int64)
        ends = self._ends[chosen]
        starts = np.where(chosen > 0, self._ends[chosen - 1], 0)
        paths = [
            bytes(self._names[start:end])
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        ranges = np.stack([0 * places, places, sizes, offsets])
        are_read = self.read_places(ranges, offsets, buffer, lambda i: show(paths[i]))
        large = self._are_large[indices]
        for i in np.flatnonzero(large & are_read).tolist():
            number = int(places[i]) // self._pages.page_bytes
            head = buffer[offsets[i] : offsets[i] + _PAGE.size].tobytes()
            try:
                self._pages.check(head, number, _OVERFLOW, f"{self._where}: {show(paths[i])}")
            except FormatError as error:
                self.bad.note(self.shards[0], show(paths[i]), error)
                are_read[i] = False
        heads = _PAGE.size * large.astype(np.int64)
        return choose_samples(SampleBlock(paths, buffer, offsets + heads, sizes - heads), are_read)

    def _check_named(self) -> None:
        """Raise UsageError if the main database has nothing but the names of others."""
        names = self._pages.only_named()
        if names:
            raise UsageError(
                f"{self._where}: expected keys and values in the main database, got only named "
                f"databases: the option database names one of {', '.join(map(show, names))}"
            )

    def _find_tree(self, database: str | None) -> Tree:
        tree = self._pages.main if database is None else self._pages.find_tree(database.encode())
        if tree is None:
            names = ", ".join(map(show, self._pages.only_named())) or "none"
            raise UsageError(f"{self._where}: expected a database {database!r}, got {names}")
        if tree.flags & _DUPSORT:
            raise UsageError(f"{self._where}: expected one value for each key, got a multimap")
        return tree


def key_path(key: bytes) -> bytes:
    """Return the path that a key gives (see the module); different keys give different paths."""
    text = key.replace(b"%", b"%25")
    if path_problem(text) is None:
        return text
    text = text.replace(b"\0", b"%00").replace(b"/", b"%2F")
    return text.replace(b".", b"%2E") if text in (b".", b"..") else text


# ---- pages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tree:
    """One database: its number of keys, and its root page."""

    flags: int
    """``_DUPSORT`` if a key may have several values; see there for others."""
    depth: int
    entries: int
    root: int


class PageFile:
    """The pages of an environment's file.

    Args:
        path: path of the file.
        where: name of the file, for errors.
        bad: bad records of the import; if they are allowed, the file may end before its last page.

    Attributes:
        page_bytes: size of a page.

    Raises:
        FormatError: the file is no LMDB file, or its metas are damaged.
        TruncatedError: the file ends before its last page.
        DeviceError: the file cannot be read.

    Threads: one at a time.
    """

    def __init__(self, path: str, where: str, bad: BadRecords) -> None:
        self._where = where
        self._path = where.removeprefix("import ")
        self._bad = bad
        self.file = Descriptor()
        with device_errors(where):
            self.file.fill(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        with closed_on_error(self):
            self.main = self._read_metas()

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self.file.close()

    def find_tree(self, name: bytes) -> Tree | None:
        """Return a named database, or None if it does not exist."""
        for key, is_tree, place in self.items(self.main, self._bad.unreported()):
            if key == name and is_tree:
                where = f"{self._where}: database {quote(name)}"
                return self._tree(self._read(*place(), where), where)
        return None

    def only_named(self) -> list[bytes]:
        """Return the names of the databases if the main one has nothing else, else nothing."""
        names: list[bytes] = []
        for key, is_tree, _ in self.items(self.main, self._bad.unreported()):
            if not is_tree:
                return []
            names.append(key)
        return names

    def items(
        self, tree: Tree, bad: BadRecords
    ) -> Iterator[tuple[bytes, bool, Callable[[], tuple[int, int]]]]:
        """Yield every key of a database, in order: True if it names another one, and its value.

        A function returns the place of the value in the file: its position, and its size in bytes.
        A value that has pages of its own begins at the head of the first. The function raises what
        this raises.

        Args:
            tree: the database.
            bad: bad records, to which pages that cannot be read are added.

        Raises:
            FormatError: a page, a node or the number of keys is wrong; the message names the last
                good key.
            DeviceError: the file cannot be read.
        """
        count, last = 0, b""
        lost: list[DlfsError] = []
        for number in self._leaves(tree, bad, lost):
            where = f"{self._where}: behind key {quote(last)}" if count else self._where
            with self._leave_out(f"page {number}", bad, lost):
                page = self._page(number, _LEAF, where)
                for position, flags, key in _page_nodes(page, f"{where}: page {number}"):
                    if count and key <= last and not tree.flags & _UNORDERED:
                        raise FormatError(f"{self._at(key)}: expected a key above {quote(last)}")
                    count += 1
                    last = key
                    if count > tree.entries:
                        raise FormatError(
                            f"{self._at(key)}: expected {tree.entries} keys, got more"
                        )
                    is_tree = bool(flags & _TREE_IN_NODE)
                    yield key, is_tree, partial(self._place, number, page, position, flags, key)
        if count != tree.entries and not lost:
            raise FormatError(f"{self._where}: expected {tree.entries} keys, got {count}")
        if count + len(lost) < tree.entries:  # each of these pages counts as one record so far
            number = tree.entries - count - len(lost)
            bad.note(self._path, "further keys of these pages", lost[-1], number)

    @contextmanager
    def _leave_out(self, page: str, bad: BadRecords, lost: list[DlfsError]) -> Iterator[None]:
        """Note a page, and add its error to some others, if it cannot be read."""
        try:
            yield
        except (*RecordError, DeviceError) as error:
            bad.note(self._path, page, error)
            lost.append(error)

    def _leaves(self, tree: Tree, bad: BadRecords, lost: list[DlfsError]) -> Iterator[int]:
        """Yield the numbers of the leaf pages, in the order of their keys; see ``_leave_out``."""
        pending = [(tree.root, 1)] if tree.root != _NO_PAGE else []
        visits = 0
        while pending:
            number, level = pending.pop()
            visits += 1
            if visits > self._page_count:
                raise FormatError(
                    f"{self._where}: expected each of {self._page_count} pages once in the tree, "
                    f"got page {number} again"
                )
            if level == tree.depth:
                yield number
                continue
            children = []
            with self._leave_out(f"pages below {number}", bad, lost):
                page = self._page(number, _BRANCH, self._where)
                for position, flags, _ in _page_nodes(page, f"{self._where}: page {number}"):
                    low, high, _, _ = _NODE.unpack_from(page, position)
                    children.append((low | high << 16 | flags << 32, level + 1))
            pending += reversed(children)

    def _at(self, key: bytes) -> str:
        """Return the location of an error."""
        return f"{self._where}: key {quote(key)}"

    def _place(
        self, number: int, page: bytes, position: int, flags: int, key: bytes
    ) -> tuple[int, int]:
        """Return the place of the value of a node in a leaf page; see ``items``."""
        low, high, _, _ = _NODE.unpack_from(page, position)
        size = low | high << 16
        start = position + _NODE.size + len(key)
        stored = _NUMBER.size if flags & _BIG else size
        if start + stored > len(page):
            raise FormatError(f"{self._at(key)}: expected {stored} bytes at {start} of its page")
        if flags & _DUPLICATES:
            raise FormatError(f"{self._at(key)}: expected one value, got several")
        if not flags & _BIG:
            return number * self.page_bytes + start, size
        where = self._at(key)
        (first,) = _NUMBER.unpack_from(page, start)
        self._check_number(first, where)
        if _PAGE.size + size > (self._page_count - first) * self.page_bytes:
            raise FormatError(f"{where}: expected {size} bytes from page {first} on")
        end = first * self.page_bytes + _PAGE.size + size
        if end > self._size_bytes:
            raise TruncatedError(f"{where}: expected {end} bytes, got {self._size_bytes}")
        return first * self.page_bytes, _PAGE.size + size

    def _page(self, number: int, kind: int, where: str) -> bytes:
        """Read a page, and check that it has this number and kind."""
        self._check_number(number, where)
        page = self._read(number * self.page_bytes, self.page_bytes, where)
        self.check(page, number, kind, where)
        _, _, _, lower, upper = _PAGE.unpack_from(page)
        if not (_PAGE.size < lower <= upper <= len(page) and lower % 2 == 0):
            raise FormatError(f"{where}: page {number}: expected nodes, got {lower} and {upper}")
        return page

    def _check_number(self, number: int, where: str) -> None:
        if not 1 < number < self._page_count:
            raise FormatError(
                f"{where}: expected a page of 2..{self._page_count - 1}, got {number}"
            )

    def check(self, head: bytes, number: int, kind: int, where: str) -> None:
        """Check that a page has this number and kind.

        Args:
            head: the first bytes of the page.
            number: number of the page.
            kind: its kind, such as ``_OVERFLOW``.
            where: name of the file and the key, for errors.

        Raises:
            FormatError: it has not.
        """
        named, _, flags, _, _ = _PAGE.unpack_from(head)
        if named != number or flags & _KINDS != kind:
            raise FormatError(
                f"{where}: page {number}: expected its number and kind {kind}, got {named} and "
                f"{flags & _KINDS}"
            )

    def _read(self, offset: int, size: int, where: str) -> bytes:
        parts = []
        try:
            while size and (part := os.pread(self.file.value, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError as error:
            raise DeviceError(
                f"{where}: read {size} bytes at {offset}: {error.strerror}",
                error.errno or errno.EIO,
            ) from error
        if size:
            raise TruncatedError(f"{where}: expected {size} more bytes at {offset}, got the end")
        return b"".join(parts)

    # ---- metas -----------------------------------------------------------------------------------

    def _read_metas(self) -> Tree:
        """Choose the later meta page; return the main database."""
        first = self._meta(0)
        _, size, _, _ = first
        if size not in _PAGE_BYTES or size & (size - 1):
            raise FormatError(f"{self._where}: expected pages of 512..65536 bytes, got {size}")
        self.page_bytes = size
        _, _, last_page, main = max(first, self._meta(size), key=itemgetter(0))
        self._page_count = last_page + 1
        expected, got = self._page_count * size, os.fstat(self.file.value).st_size
        self._size_bytes = got
        if expected > got and not self._bad.are_allowed:
            raise TruncatedError(
                f"{self._where}: expected {expected} bytes in {self._page_count} pages, got {got}"
            )
        return self._tree(main, self._where)

    def _meta(self, offset: int) -> tuple[int, int, int, bytes]:
        """Return the transaction of a meta page, the size of pages, the last one, and the tree."""
        where = f"{self._where}: the meta page at byte {offset}"
        page = self._read(offset, _META_BYTES, where)
        magic, version, _, _ = _META.unpack_from(page, _PAGE.size)
        if magic != _MAGIC:
            raise FormatError(f"{where}: expected an LMDB environment, got {magic:#010x}")
        if version != _VERSION:
            raise VersionError(f"{where}: expected version {_VERSION} of LMDB, got {version}")
        free = _PAGE.size + _META.size
        main = free + _TREE.size
        (page_bytes, *_) = _TREE.unpack_from(page, free)
        last_page, transaction = _META_END.unpack_from(page, main + _TREE.size)
        return transaction, page_bytes, last_page, page[main : main + _TREE.size]

    def _tree(self, record: bytes, where: str) -> Tree:
        if len(record) != _TREE.size:
            raise FormatError(f"{where}: expected a tree of {_TREE.size} bytes, got {len(record)}")
        _, flags, depth, _, _, _, entries, root = _TREE.unpack(record)
        if depth > _DEPTH_MAX or (depth == 0) != (root == _NO_PAGE):
            raise FormatError(f"{where}: expected a depth of 0..{_DEPTH_MAX}, got {depth}")
        return Tree(flags, depth, entries, root)


def _page_nodes(page: bytes, where: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield the nodes of a page: offset, flags and key of each."""
    _, _, _, lower, _ = _PAGE.unpack_from(page)
    for at in range(_PAGE.size, lower, 2):
        (position,) = struct.unpack_from("<H", page, at)
        if not lower <= position <= len(page) - _NODE.size:
            raise FormatError(f"{where}: expected a node in the page, got {position}")
        _, _, flags, key_size = _NODE.unpack_from(page, position)
        start = position + _NODE.size
        if start + key_size > len(page):
            raise FormatError(f"{where}: expected a key of {key_size} bytes in the page")
        yield position, flags, page[start : start + key_size]
