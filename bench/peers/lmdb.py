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


class Lmdb(Peer):
    """LMDB in one of its ways, over one database; reads in one transaction.

    The way ``views`` returns views of the map, after touching their pages; the others copies.
    ``readahead`` leaves the kernel's read-ahead on.
    """

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
            for first, last in source.ranges(COMMIT_BYTES):
                with environment.begin(write=True) as transaction:
                    for index in range(first, last):
                        transaction.put(_key(index), source.data(index), append=True)

    def open(self, folder: Path) -> Reader:
        environment = needed("lmdb").open(
            str(folder / "data.lmdb"),
            subdir=False,
            readonly=True,
            lock=False,
            readahead=self._readahead,
            max_readers=1,
        )
        transaction = environment.begin(buffers=self._views)

        def views(indices: Any) -> list[Buffer]:
            get = transaction.get
            return [touch(get(_key(index))) for index in indices]

        def copies(indices: Any) -> list[Buffer]:
            with transaction.cursor() as cursor:
                pairs = cursor.getmulti([_key(index) for index in indices])
            return [data for _, data in pairs]

        def release() -> None:
            transaction.abort()
            environment.close()

        return Reader(views if self._views else copies, release=release)


PEERS = (
    Lmdb("", "one read transaction, cursor.getmulti of a batch's keys, readahead=False"),
    Lmdb("views", "buffers=True: views, every page looked at; readahead=False"),
    Lmdb("readahead", "as lmdb, with the kernel's read-ahead left on, py-lmdb's default"),
)
