"""The requests for what lies above the datasets, which both servers answer from here.

The **list directories** are the root, and in a nested mount those of the volumes: they list
datasets or volumes. Their entries may change, so the kernel caches them for a second. Also the
symbolic link ``incoming``, and the space of the volumes.

The pyfuse3 server passes attributes on to pyfuse3. The native server sends them as the kernel's
protocol has them (``kernel_replies``).

Threads: one, the FUSE loop (trio).
"""

from __future__ import annotations

import os
import stat
import time
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from dlfs.errors import LimitError, StaleError
from dlfs.format.names import INCOMING as INCOMING_TEXT
from dlfs.mount.inode_numbers import DATASET_DEPTH, DATASET_MAX, INCOMING, ROOT, pack, unpack
from dlfs.mount.mount_view import ROOT_DIRECTORY, MountView, Shown, Space
from dlfs.mount.options import MountOptions
from dlfs.mount.view import ROOT_SECONDS, ShownDataset, VolumeView

FOREVER_SECONDS = 1e9
"""Cache timeout of attributes and names that never change, in seconds."""

INCOMING_NAME = INCOMING_TEXT.encode()
_INCOMING_POSITION = DATASET_MAX + 1


class Attributes(NamedTuple):
    """What the kernel gets to know of a file or directory.

    Attributes:
        inode: inode number.
        mode: type and permission bits.
        modified_ns: all its times, in nanoseconds since 1970.
        generation: distinguishes it from a file of the same number in another mount.
        size_bytes: its size.
        entry_seconds: time for which the kernel may cache its name, in seconds.
        attribute_seconds: time for which the kernel may cache its attributes, in seconds.
    """

    inode: int
    mode: int
    modified_ns: int
    generation: int = 0
    size_bytes: int = 0
    entry_seconds: float = FOREVER_SECONDS
    attribute_seconds: float = FOREVER_SECONDS


class _Listing(NamedTuple):
    """What a list directory lists.

    Attributes:
        entries: names, in order, and what they stand for; None is ``incoming``.
        modified_ns: time of the directory, in nanoseconds since 1970.
    """

    entries: list[tuple[bytes, Shown | None]]
    modified_ns: int


class ListDirectories:
    """The list directories of a mount.

    Args:
        view: the volumes and datasets that the mount shows.
        options: options of the mount.
        resumed: the kernel may have cached listings of an earlier server.

    Threads: the FUSE loop.
    """

    def __init__(self, view: MountView, options: MountOptions, *, resumed: bool = False) -> None:
        self._view = view
        self._options = options
        self._resumed = resumed
        self._started_ns = time.time_ns()
        self._listings: dict[int, _Listing] = {}
        self._listed = {_INCOMING_POSITION: INCOMING_NAME}  # names in the last listing, by position

    # ---- requests --------------------------------------------------------------------------------

    def answers_for(self, inode: int, name: bytes = b"") -> bool:
        """Return True for the inode number of a list directory or of ``incoming``.

        Also for that of a dataset's top directory, if ``..`` is looked up in it.
        """
        number, depth, _ = unpack(inode)
        is_top = depth == DATASET_DEPTH and (name == b".." or self._view.is_volume(number))
        return is_top or inode in (ROOT, INCOMING)

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        """Find a name in a list directory, or ``..`` in the top directory of a dataset.

        Raises:
            NotFoundError: there is no such entry.
            DlfsError: as ``MountView.child``.
        """
        number = unpack(parent).dataset
        if name == b"..":
            is_dataset = number and not self._view.is_volume(number)
            above = self._view.dataset(number).volume.number if is_dataset else ROOT_DIRECTORY
            return self._directory(above)
        number = self._number(parent)
        if name == b".":
            return self._directory(number)
        if self._options.incoming is not None and name == INCOMING_NAME:
            return self._attributes(None)
        return self._attributes(await self._view.child(name, number))

    async def getattr(self, inode: int) -> Attributes:
        """Return the attributes of a list directory, or of ``incoming``."""
        if inode == INCOMING:
            return self._attributes(None)
        number = self._number(inode)
        await self._view.refresh_soon(number)
        return self._directory(number)

    def readlink(self) -> bytes:
        """Return the target of the link ``incoming``."""
        return os.fsencode(self._options.incoming or "")

    async def listing(self, inode: int, position: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """List a list directory in the order of names.

        Args:
            inode: its inode number.
            position: 0, or the position of the last entry that the kernel has: its number, which it
                keeps as long as the mount exists.

        Returns:
            Names, attributes and positions.
        """
        number = self._number(inode)
        if position == 0 or number not in self._listings:
            await self._view.refresh(number)
            self._update(number)
        entries = self._listings[number].entries
        shown = self._view.shown(position)  # listed by another server, if its name is not known
        name = self._listed.get(position, b"" if shown is None else shown.name)
        return self._entries(entries[bisect_right(entries, name, key=lambda entry: entry[0]) :])

    async def statfs(self, inode: int = ROOT) -> Space:
        """Return the space of the volume of a file or directory; of all for the root."""
        number = unpack(inode).dataset
        await self._view.refresh_soon(number)
        return self._view.space(number)

    def dataset(self, dataset: ShownDataset) -> Attributes:
        """Return the attributes of a dataset's top directory."""
        return Attributes(
            pack(dataset.number, DATASET_DEPTH, 0),
            stat.S_IFDIR | self._options.directory_mode,
            dataset.modified_ns,
            dataset.generation,
            entry_seconds=ROOT_SECONDS,  # the name may stand for another version later
        )

    # ---- inside ----------------------------------------------------------------------------------

    def _number(self, inode: int) -> int:
        """Return the number of a list directory; StaleError if the inode is none."""
        number = ROOT_DIRECTORY if inode == ROOT else unpack(inode).dataset
        if inode != ROOT and not self._view.is_volume(number):
            raise StaleError(f"use inode {inode}: this mount has no such directory")
        return number

    def _entries(
        self, entries: list[tuple[bytes, Shown | None]]
    ) -> Iterator[tuple[bytes, Attributes, int]]:
        for name, shown in entries:
            if shown is not None and shown.removed:
                continue
            found = self._attributes(shown)
            if isinstance(shown, VolumeView):  # what is known of it may be old: a look-up reads it
                found = found._replace(entry_seconds=0, attribute_seconds=0)
            position = _INCOMING_POSITION if shown is None else shown.number
            self._listed[position] = name
            yield name, found, position

    def _attributes(self, shown: Shown | None) -> Attributes:
        """Return the attributes of an entry; None is ``incoming``."""
        if shown is None:
            mode, size = stat.S_IFLNK | 0o777, len(self.readlink())
            return Attributes(INCOMING, mode, self._started_ns, size_bytes=size)
        if isinstance(shown, ShownDataset):
            return self.dataset(shown)
        return self._directory(shown.number)

    def _directory(self, number: int) -> Attributes:
        """Return the attributes of a list directory."""
        with suppress(LimitError):  # the next listing of the directory reports it
            self._update(number)
        listing = self._listings.get(number)
        return Attributes(
            ROOT if number == ROOT_DIRECTORY else pack(number, DATASET_DEPTH, 0),
            stat.S_IFDIR | self._options.directory_mode,
            listing.modified_ns if listing else self._own_time(number),
            self._view.generation(number),
            entry_seconds=ROOT_SECONDS,
            attribute_seconds=ROOT_SECONDS,
        )

    def _own_time(self, number: int) -> int:
        return self._view.modified_ns(number) or self._started_ns

    def _update(self, number: int) -> None:
        """Note the present entries of a list directory, and its time.

        The kernel drops its cached listing when the time changes, so the time rises whenever the
        entries have changed. The listing of a server before this one may be in the cache, too.
        """
        entries: list[tuple[bytes, Shown | None]] = list(self._view.entries(number))
        if self._options.incoming is not None:
            entries = [entry for entry in entries if entry[0] != INCOMING_NAME]
            insort(entries, (INCOMING_NAME, None), key=lambda entry: entry[0])
        before, now_ns = self._listings.get(number), self._own_time(number)
        if before is None:
            now_ns = max(now_ns, self._started_ns) if self._resumed else now_ns
        elif now_ns <= before.modified_ns:
            now_ns = before.modified_ns if entries == before.entries else time.time_ns()
        self._listings[number] = _Listing(entries, now_ns)
