"""An LMDB environment as a source: every key a sample's path, its value the sample.

A key that is a valid path is the path. So that no two keys give one path, ``%`` is written ``%25``;
in a key that is no valid path otherwise, the slash is written ``%2F`` and NUL ``%00``, and the keys
``.`` and ``..`` are ``%2E`` and ``%2E%2E``. Keys that hold other things, such as a count of all
keys, can be left out by ``select``.

Pages are read here (see ``lmdb_pages``), not by liblmdb, which believes what it maps. LMDB has no
checksums: damage to a value is not noticed, damage to the tree is. The values are read in the order
of the keys, without a lock: nobody may write meanwhile, and if the file has changed at the end,
that is an error.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from dlfs.errors import DeviceError, UsageError
from dlfs.format.paths import path_problem
from dlfs.ingest.formats.lmdb.pages import PageFile, Tree
from dlfs.ingest.records import Record, ShardSource, gather
from dlfs.ingest.source import (
    SampleBlock,
    check_path,
    show,
    single_path,
)


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """What can be said of an environment."""

    select: Annotated[str, "pattern of the keys to take"] = "*"
    database: Annotated[str | None, "named database in the environment; none: its main one"] = None

    def open(self, paths: Sequence[str]) -> LmdbSource:
        """Open one environment; see ``LmdbSource``."""
        return LmdbSource(single_path(paths, "environment"), self)


class LmdbSource(ShardSource):
    """The keys and values of an environment.

    Args:
        path: of the folder with ``data.mdb``, or of the file.
        options: see the class.

    Raises:
        UsageError: there is no such database in it, or it holds several values for a key.
        FormatError: it is no environment, or damaged.
        TruncatedError: the file ends too early.
        DeviceError: it cannot be read.
    """

    def __init__(self, path: str, options: LmdbOptions) -> None:
        super().__init__([path], noun="an environment")
        self._select = options.select
        self._where = f"import {path}"
        self._left_out = 0
        file = Path(path) / "data.mdb" if Path(path).is_dir() else Path(path)
        self._pages = PageFile(str(file), self._where)
        self._state = self._pages.state()
        try:
            self._tree = self._find_tree(options.database)
        except BaseException:
            self.close()
            raise

    @property
    def sample_count(self) -> int | None:
        """Keys; None when only some are taken."""
        return self._tree.entries if self._select == "*" else None

    @property
    def skipped(self) -> Mapping[str, int]:
        """Keys that ``select`` leaves out."""
        return {"key that select leaves out": self._left_out} if self._left_out else {}

    def close(self) -> None:
        """Close the file."""
        self._pages.close()

    def read_shard(self, _number: int) -> Iterator[SampleBlock]:
        """Read the database; see ``ShardSource``."""
        yield from gather(self._records(), where=self._where)
        if self._pages.state() != self._state:
            raise DeviceError(f"{self._where}: the file changed during the import", errno.ESTALE)

    def _records(self) -> Iterator[Record]:
        for key, value in self._pages.items(self._tree):
            if not fnmatchcase(show(key), self._select):
                self._left_out += 1
                continue
            path = key_path(key)
            check_path(path, f"{self._where}: key {show(key)!r}")
            yield Record(path, value)

    def _find_tree(self, database: str | None) -> Tree:
        tree = self._pages.main if database is None else self._pages.find_tree(database.encode())
        if tree is None:
            raise UsageError(f"{self._where}: expected a database {database!r}, got none")
        if tree.has_duplicates:
            raise UsageError(f"{self._where}: expected one value for each key, got a multimap")
        return tree


def key_path(key: bytes) -> bytes:
    """The path that a key gives; see the module. Different keys give different paths."""
    text = key.replace(b"%", b"%25")
    if path_problem(text) is None:
        return text
    text = text.replace(b"\0", b"%00").replace(b"/", b"%2F")
    return text.replace(b".", b"%2E") if text in (b".", b"..") else text
