"""Imports an LMDB environment: every key is a sample's path, its value the sample.

A key that is a valid path is the path. Other keys are escaped, so that no two keys give one path:
``%`` becomes ``%25`` in any key. In a key that is no valid path, the slash becomes ``%2F`` and NUL
``%00``; the keys ``.`` and ``..`` become ``%2E`` and ``%2E%2E``. ``select`` leaves out keys with
other content, such as a count of all keys.

``pages`` reads the file. LMDB has no checksums: damage to the tree is found, damage to a value is
not. Values are read in the order of the keys, without a lock. So no program may write meanwhile; if
the file has changed at the end, the import fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from dlfs.errors import UsageError
from dlfs.format.paths import path_problem
from dlfs.ingest.formats.lmdb.pages import PageFile, Tree
from dlfs.ingest.records import Record, ShardSource, gather
from dlfs.ingest.source import (
    SampleBlock,
    check_path,
    check_unchanged,
    file_state,
    left_out_names,
    show,
    single_path,
)


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
        self._pages = PageFile(str(file), self._where)
        self._state = file_state(self._pages.descriptor)
        try:
            self._tree = self._find_tree(options.database)
            if options.database is None:
                self._check_named()
        except BaseException:
            self.close()
            raise
        if self._select == "*":
            self.sample_count = self._tree.entries

    def close(self) -> None:
        """Close the file."""
        self._pages.close()

    def read_shard(self, _number: int) -> Iterator[SampleBlock]:
        """Read the database; see ``ShardSource``."""
        yield from gather(self._records(), where=self._where)
        check_unchanged(self._where, self._pages.descriptor, self._state)

    def _records(self) -> Iterator[Record]:
        named: list[str] = []
        for key, value in self._pages.items(self._tree):
            if value is None:
                named.append(show(key))
                continue
            if not fnmatchcase(show(key), self._select):
                self.skipped["key that select leaves out"] += 1
                continue
            path = key_path(key)
            check_path(path, f"{self._where}: key {show(key)!r}")
            yield Record(path, value)
        self.skipped.update(left_out_names("database", named))

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
        if tree.has_duplicates:
            raise UsageError(f"{self._where}: expected one value for each key, got a multimap")
        return tree


def key_path(key: bytes) -> bytes:
    """Return the path that a key gives (see the module); different keys give different paths."""
    text = key.replace(b"%", b"%25")
    if path_problem(text) is None:
        return text
    text = text.replace(b"\0", b"%00").replace(b"/", b"%2F")
    return text.replace(b".", b"%2E") if text in (b".", b"..") else text
