"""A minimal pyfuse3 file system, with all files in memory: the limit of pyfuse3 on trio.

    python -m bench.contenders.bare_pyfuse3 MOUNTPOINT FOLDER LISTING

It serves the files of FOLDER that LISTING names, each ended by NUL, until SIGTERM. Its handlers
return values that were prepared before. As in DLFS's mount, the kernel caches attributes, entries
and pages without expiry.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
import trio

FOREVER_SECONDS = 1 << 30


class MemoryFiles(pyfuse3.Operations):
    """A tree of files in memory. An inode number is a position in the lists."""

    def __init__(self, folder: bytes, paths: Sequence[bytes]) -> None:
        super().__init__()
        self._data: list[bytes] = [b"", b""]
        self._children: dict[tuple[int, bytes], int] = {}
        self._attributes: list[pyfuse3.EntryAttributes] = [self._entry(0, -1), self._entry(1, -1)]
        for path in paths:
            parent = pyfuse3.ROOT_INODE
            *above, name = path.split(b"/")
            for component in above:
                parent = self._child(parent, component, None)
            with open(folder + b"/" + path, "rb") as file:
                self._child(parent, name, file.read())

    def _child(self, parent: int, name: bytes, data: bytes | None) -> int:
        number = self._children.get((parent, name))
        if number is None:
            number = self._children[parent, name] = len(self._data)
            self._data.append(data or b"")
            self._attributes.append(self._entry(number, -1 if data is None else len(data)))
        return number

    def _entry(self, number: int, size: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = number
        entry.entry_timeout = entry.attr_timeout = FOREVER_SECONDS
        entry.st_mode = stat.S_IFDIR | 0o555 if size < 0 else stat.S_IFREG | 0o444
        entry.st_size = max(0, size)
        return entry

    async def lookup(
        self, parent: int, name: bytes, _ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._attributes[self._children.get((parent, name), 0)]

    async def getattr(self, inode: int, _ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes[inode]

    async def open(self, inode: int, _flags: int, _ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        data = self._data[fh]
        return data if not off and size >= len(data) else data[off : off + size]

    async def release(self, _fh: int) -> None:
        """Do nothing."""

    async def forget(self, _inode_list: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""


async def _serve() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_on_signal)
        print("ready", flush=True)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _end_on_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            pyfuse3.terminate()
            return


def main() -> None:
    """Serve until SIGTERM."""
    point, folder, listing = sys.argv[1:]
    paths = Path(listing).read_bytes().split(b"\0")[:-1]
    options = {"default_permissions", "ro", "fsname=bench"}
    pyfuse3.init(MemoryFiles(os.fsencode(folder), paths), point, options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
