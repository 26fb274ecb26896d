"""LMDB: a key for each index, one read transaction for all reads, as py-lmdb documents it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import Unavailable
from bench.peers.peer import Buffer, Reader, Source, touch

KEY_BYTES = 8
COMMIT_BYTES = 256 << 20
"""Written in one transaction: dirty pages stay in memory until it ends."""


def _package() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise Unavailable("lmdb is not installed: make bench installs it") from error
    return lmdb


def _key(index: int) -> bytes:
    return index.to_bytes(KEY_BYTES, "big")


class LmdbReader:
    """Reads in one transaction.

    Args:
        folder: with the database.
        views: hand out views of the map whose pages were looked at; else copies.
        readahead: leave the kernel's read-ahead on.
    """

    def __init__(self, folder: Path, *, views: bool, readahead: bool) -> None:
        self._environment = _package().open(
            str(folder / "data.lmdb"),
            subdir=False,
            readonly=True,
            lock=False,
            readahead=readahead,
            max_readers=1,
        )
        self._transaction = self._environment.begin(buffers=views)
        self._views = views

    def read(self, indices: Sequence[int]) -> list[Buffer]:
        """By ``getmulti`` of a cursor, which takes all keys at once; views by ``get``."""
        if self._views:
            get = self._transaction.get
            return [touch(get(_key(index))) for index in indices]
        with self._transaction.cursor() as cursor:
            pairs = cursor.getmulti([_key(index) for index in indices])
        return [data for _, data in pairs]

    def close(self) -> None:
        """End the transaction."""
        self._transaction.abort()
        self._environment.close()


class Lmdb:
    """LMDB in one of its ways."""

    packages = ("lmdb",)
    random = True

    def __init__(self, way: str, about: str) -> None:
        self.name = f"lmdb-{way}" if way else "lmdb"
        self.about = f"{about} (lmdb.readthedocs.io)"
        self._views, self._readahead = way == "views", way == "readahead"

    def prepare(self, source: Source, folder: Path) -> None:
        """Keys in rising order, appended."""
        size = 2 * int(source.lengths.sum()) + len(source) * 8192 + (64 << 20)
        lmdb = _package()
        with lmdb.open(str(folder / "data.lmdb"), subdir=False, map_size=size) as environment:
            pending = COMMIT_BYTES
            transaction = environment.begin(write=True)
            for index, _, data in source:
                transaction.put(_key(index), data, append=True)
                pending -= len(data)
                if pending < 0:
                    transaction.commit()
                    transaction, pending = environment.begin(write=True), COMMIT_BYTES
            transaction.commit()

    def open(self, folder: Path) -> Reader:
        """Open read-only, without locks."""
        return LmdbReader(folder, views=self._views, readahead=self._readahead)


class OtherLmdb(Lmdb):
    """Another way over the same database."""

    data_of = "lmdb"


PEERS = (
    Lmdb("", "one read transaction, cursor.getmulti of a batch's keys, readahead=False"),
    OtherLmdb("views", "buffers=True: views, every page looked at; readahead=False"),
    OtherLmdb("readahead", "as lmdb, with the kernel's read-ahead left on, py-lmdb's default"),
)
