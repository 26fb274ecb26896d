"""LMDB: a key for each index, one read transaction for all reads, as py-lmdb documents it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.peers.packages import needed
from bench.peers.peer import Buffer, Peer, Reader, touch

KEY_BYTES = 8
COMMIT_BYTES = 256 << 20
"""Bytes written in one transaction: dirty pages stay in memory until it ends."""


def _key(index: int) -> bytes:
    return index.to_bytes(KEY_BYTES, "big")


class LmdbReader(Reader):
    """Reads in one transaction.

    Args:
        folder: folder of the database.
        views: return views of the map, after touching their pages; else copies.
        readahead: leave the kernel's read-ahead on.
    """

    def __init__(self, folder: Path, *, views: bool, readahead: bool) -> None:
        self._environment = needed("lmdb").open(
            str(folder / "data.lmdb"),
            subdir=False,
            readonly=True,
            lock=False,
            readahead=readahead,
            max_readers=1,
        )
        self._transaction = self._environment.begin(buffers=views)
        self._views = views

    def read(self, indices: Any) -> list[Buffer]:
        if self._views:
            get = self._transaction.get
            return [touch(get(_key(index))) for index in indices]
        with self._transaction.cursor() as cursor:
            pairs = cursor.getmulti([_key(index) for index in indices])
        return [data for _, data in pairs]

    def close(self) -> None:
        self._transaction.abort()
        self._environment.close()


class Lmdb(Peer):
    """LMDB in one of its ways, over one database."""

    packages = ("lmdb",)
    data_of = "lmdb"

    def __init__(self, way: str, about: str) -> None:
        self.name = f"lmdb-{way}" if way else "lmdb"
        self.about = f"{about} (lmdb.readthedocs.io)"
        self._views, self._readahead = way == "views", way == "readahead"

    def prepare(self, source: Source, folder: Path) -> None:
        size = 2 * source.total_bytes() + len(source) * 8192 + (64 << 20)
        lmdb = needed("lmdb")
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
        return LmdbReader(folder, views=self._views, readahead=self._readahead)


PEERS = (
    Lmdb("", "one read transaction, cursor.getmulti of a batch's keys, readahead=False"),
    Lmdb("views", "buffers=True: views, every page looked at; readahead=False"),
    Lmdb("readahead", "as lmdb, with the kernel's read-ahead left on, py-lmdb's default"),
)
