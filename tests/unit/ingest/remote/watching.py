"""Measures what a spool takes on the disk while objects are imported through it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dlfs
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.remote.fetching import Fetcher
from dlfs.ingest.remote.spool import Spool


class Watch:
    """Measures the copies in a spool directory, and keeps the most bytes that they took.

    Args:
        spool: the spool directory.
        note: called with each new most.
    """

    def __init__(self, spool: Path, note: Callable[[int], None] = lambda _: None) -> None:
        self.most_bytes = 0
        self._spool = spool
        self._note = note
        self._lock = threading.Lock()

    def look(self) -> None:
        """Measure the copies, while none is deleted: a file counts once at most."""
        with self._lock:
            used = sum(
                _disk_bytes(entry.path)
                for kind in ("files", "parts", "blocks")
                for place in self._spool.glob(f"*/{kind}")
                for entry in _all_files(str(place))
            )
            if used > self.most_bytes:
                self.most_bytes = used
                self._note(used)

    def install(self, patch: Callable[[Any, str, Any], None], every: int = 1) -> None:
        """Measure when an object is complete, every so many objects.

        Args:
            patch: function such as ``setattr``.
            every: number of these objects.
        """
        finish, delete, count = Fetcher._finish, Spool.delete_committed, 0

        async def finishing(self_: Fetcher, opened: Any) -> None:
            nonlocal count
            await finish(self_, opened)
            count += 1
            if count % every == 0:
                self.look()

        def deleting(self_: Spool) -> None:
            with self._lock:
                delete(self_)

        patch(Fetcher, "_finish", finishing)
        patch(Spool, "delete_committed", deleting)


def _all_files(place: str) -> list[os.DirEntry[str]]:
    found, pending = [], [place]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    found.append(entry)
    return found


def _disk_bytes(path: str) -> int:
    try:
        return 512 * os.stat(path).st_blocks
    except FileNotFoundError:  # it got its name meanwhile, under which it counts
        return 0


def run_watched(
    environment: dict[str, str],
    url: str,
    volume: str,
    spool: str,
    limit: int,
    every: int,
    most: str,
) -> None:
    """Import objects through a spool in a process of its own.

    Args:
        every: number of complete objects after which the spool is measured.
        most: file to which each new most of its bytes is added.
    """
    os.environ.update(environment)

    def note(most_bytes: int) -> None:
        with Path(most).open("a") as file:
            file.write(f"{most_bytes}\n")

    Watch(Path(spool), note).install(setattr, every)
    with (
        dlfs.open(volume) as opened,
        closing(
            open_source(url, spool=spool, spool_bytes=limit, format_name="imagefolder")
        ) as source,
    ):
        import_dataset(opened, source, "x")
