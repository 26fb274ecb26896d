"""The handlers of the directory ``incoming``: requests become system calls on the staging area.

A system call that may wait long runs in a worker thread. To look up a name in an open directory, or
to close a file, takes less time than a thread would, so these run in the FUSE loop. The parts:

- ``inode_table``: inode numbers and names that the kernel knows
- ``directories``: open directories
- ``open_files``: open files
- ``moves``: files that are renamed, replaced or removed while other requests use them
- ``sealer``: makes datasets of finished directories

The server removes entries itself when it has sealed a dataset. The kernel may therefore cache names
and attributes for one second only. The kernel knows files by the numbers of ``inode_table``;
programs see the inode numbers that the files have in the staging area.

``incoming`` itself contains directories with names that new datasets may have, and nothing else.

Threads: one, the FUSE loop (trio).
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from dlfs.errors import StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.format.paths import display
from dlfs.staging import entries
from dlfs.staging.area import StagingArea
from dlfs.staging.directories import Directories
from dlfs.staging.entries import Change, Owner, identity_of, refusal
from dlfs.staging.inode_numbers import ROOT
from dlfs.staging.inode_table import Inode, InodeTable
from dlfs.staging.moves import Moves
from dlfs.staging.open_files import OpenFiles, is_writing
from dlfs.staging.protocol import (
    XATTR_DISCARD,
    XATTR_INCOMING,
    XATTR_SEAL,
    SealOptions,
)
from dlfs.staging.sealer import Sealer
from dlfs.staging.wire import Entry, Listing, Opened
from dlfs.volume import Volume

LIST_AHEAD = 64
"""Entries of a listing whose attributes are read in one worker thread call."""

_RENAME_NOREPLACE = 1

_log = logging.getLogger(__name__)
_What = TypeVar("_What")
"""The argument of a function that creates an entry: a mode, or the target of a link."""


@dataclass(eq=False)
class _OpenDirectory:
    """An open directory, with its names when the listing began."""

    inode: Inode
    names: list[bytes]


class IncomingTree:
    """Answers requests below ``incoming``.

    Args:
        volume: the volume into which datasets are sealed; must outlive the tree.
        area: the staging area, after ``recover``; must outlive the tree.

    Raises (every handler):
        OSError: the request is refused, or a system call on the staging area failed.
        StaleError: the file no longer exists.
    """

    def __init__(self, volume: Volume, area: StagingArea) -> None:
        self._area = area
        self._table = InodeTable(identity_of(os.fstat(area.datasets)))
        self._directories = Directories(area.datasets)
        self.sealer = Sealer(volume, area, self._on_taken_out)
        self.files = OpenFiles(self._table, self._directories)
        self._moves = Moves(self._table, self._directories, self.files)
        self.on_gone: Callable[[bytes], None] = lambda _name: None
        """Callback with the name of each dataset that was sealed or discarded, in the loop."""
        self._listings: dict[int, _OpenDirectory] = {}
        self._last_listing = 0

    def close(self) -> None:
        """Close every file and directory."""
        self.files.close()
        self._table.close()
        self._directories.close()

    def _changing_file(self, inode: Inode) -> AbstractContextManager[None]:
        """Return a context in which a file may be changed; without a name it is in no dataset.

        A file that has only names unknown to the kernel is refused with StaleError.
        """
        has_name = self._table.find(inode.identity) is inode
        return self.sealer.changing(inode) if has_name else nullcontext()

    def _on_taken_out(self, dataset: Inode, name: bytes) -> None:
        """Remove the names of a dataset that has left the staging area."""
        self._table.note_removal(self._table.root, name, dataset.identity, last=True)
        self._directories.close()
        self.on_gone(name)

    # ---- names and attributes --------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """Find an entry."""
        folder = self._table.get(parent)
        if name in (b".", b".."):  # NFS handles of forgotten inodes
            raise refusal(errno.ESTALE)
        if len(name) > COMPONENT_BYTES_MAX:
            raise refusal(errno.ENAMETOOLONG)
        async with self._directories.opened(folder) as directory:
            status = _stat(folder, directory, name)
        return self._found(folder, name, status)

    def forget(self, number: int, lookups: int) -> None:
        """Note that the kernel has forgotten that many look-ups of an inode."""
        self._table.forget(number, lookups)

    async def getattr(self, number: int) -> Entry:
        """Return the attributes of an entry."""
        return Entry(number, await self.status(self._table.get(number)))

    async def status(self, inode: Inode) -> os.stat_result:
        """Return the attributes of an inode in the staging area."""
        if inode.number == ROOT:
            return os.fstat(self._area.datasets)
        opened = self.files.any_of(inode)
        if opened is not None:
            return os.fstat(opened.descriptor)

        async def look(parent: Inode, name: bytes) -> os.stat_result:
            if parent.number == ROOT:
                async with self._directories.opened(inode) as directory:
                    return os.fstat(directory)
            async with self._directories.opened(parent) as directory:
                return await self._directories.run(
                    entries.stat_expected, directory, name, inode.identity
                )

        try:
            return await self._moves.call_on(inode, look, os.fstat)
        except (StaleError, OSError):
            if inode.links or inode.last_status is None:
                raise
            return inode.last_status

    async def setattr(
        self,
        number: int,
        wanted: Change,
        fh: int | None,
    ) -> Entry:
        """Change attributes."""
        inode = self._table.get(number)
        run = self._directories.run
        if inode.number == ROOT:
            changed = await run(entries.change_by_descriptor, self._area.datasets, wanted)
            return Entry(number, changed)
        file = self.files.get(fh)
        if file is not None and (file.writable or not inode.links):
            change_open = _change_file if file.writable else entries.change_by_descriptor
            return Entry(number, await run(change_open, file.descriptor, wanted))

        async def change(parent: Inode, name: bytes) -> os.stat_result:
            if parent.number == ROOT:
                async with self._directories.opened(inode) as directory:
                    return await run(entries.change_by_descriptor, directory, wanted)
            async with self._directories.opened(parent) as directory:
                return await run(entries.change, directory, name, inode.identity, wanted)

        def change_unlinked(unlinked: int) -> os.stat_result:
            return entries.change_by_descriptor(unlinked, wanted)

        # An open file is changed even if all its other names are unknown to the kernel. Its size is
        # not: the file may have such a name in a dataset that is being sealed.
        is_open = not inode.links and self.files.any_of(inode) is not None
        safe = is_open and wanted.size_bytes is None
        with nullcontext() if safe else self._changing_file(inode):
            return Entry(number, await self._moves.call_on(inode, change, change_unlinked))

    async def readlink(self, number: int) -> bytes:
        """Return the target of a symbolic link."""
        inode = self._table.get(number)

        async def read(parent: Inode, name: bytes) -> bytes:
            async with self._directories.opened(parent) as directory:
                return await self._directories.run(
                    entries.read_link, directory, name, inode.identity
                )

        return await self._moves.call_on(inode, read, entries.read_opened_link)

    def _found(self, parent: Inode, name: bytes, status: os.stat_result) -> Entry:
        inode = self._table.note_lookup(
            parent, name, identity_of(status), directory=stat.S_ISDIR(status.st_mode)
        )
        return Entry(inode.number, status)

    # ---- making and removing ---------------------------------------------------------------------

    async def mkdir(self, parent: int, name: bytes, mode: int, owner: Owner) -> Entry:
        """Make a directory; directly in ``incoming``, create a dataset."""
        folder = self._table.get(parent)
        if parent == ROOT:
            await self._directories.run(
                self._area.create, name, mode=mode & 0o7777, uid=owner.uid, gid=owner.gid
            )
            self.sealer.forget(name)
            return await self.lookup(parent, name)
        return await self._make(entries.make_directory, folder, name, mode, owner)

    async def mknod(self, parent: int, name: bytes, mode: int, owner: Owner) -> Entry:
        """Make a file, FIFO or socket."""
        return await self._make(
            entries.make_node, self._directory_in_dataset(parent), name, mode, owner
        )

    async def symlink(self, parent: int, name: bytes, target: bytes, owner: Owner) -> Entry:
        """Make a symbolic link."""
        return await self._make(
            entries.make_symlink, self._directory_in_dataset(parent), name, target, owner
        )

    async def _make(
        self,
        call: Callable[[int, bytes, _What, Owner], os.stat_result],
        folder: Inode,
        name: bytes,
        what: _What,
        owner: Owner,
    ) -> Entry:
        with self.sealer.changing(folder):
            _check_length(folder, name)
            async with self._directories.opened(folder) as directory:
                status = await self._directories.run(call, directory, name, what, owner)
            return self._found(folder, name, status)

    async def link(self, number: int, parent: int, name: bytes) -> Entry:
        """Add a name to a file."""
        inode, folder = self._table.get(number), self._directory_in_dataset(parent)
        if not inode.links:
            raise refusal(errno.ENOENT)
        async with self._moves.moving():
            with self.sealer.changing(inode, folder):
                # One dataset could be written while the other is sealed.
                if inode.dataset() is not folder.dataset():
                    raise refusal(errno.EXDEV)
                _check_length(folder, name)
                old_folder, old = inode.links[-1]
                async with (
                    self._directories.opened(old_folder) as source,
                    self._directories.opened(folder) as target,
                ):
                    status = await self._directories.run(
                        entries.hard_link, source, old, inode.identity, target, name
                    )
                return self._found(folder, name, status)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name."""
        folder = self._directory_in_dataset(parent)
        async with self._moves.moving():
            with self.sealer.changing(folder):
                async with self._directories.opened(folder) as directory:
                    gone = await self._directories.run(entries.unlink, directory, name)
                    with entries.closing(gone):
                        self._forget_name(folder, name, gone)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory; directly in ``incoming``, an empty dataset."""
        folder = self._table.get(parent)
        if parent == ROOT:
            gone = _stat(folder, self._area.datasets, name)
            with self._changing_datasets(gone):
                await self._directories.run(self._area.remove_empty, name)
            self.sealer.forget(name)
            self._forget_directory(folder, name, gone)
            return
        with self.sealer.changing(folder):
            async with self._directories.opened(folder) as directory:
                removed = await self._directories.run(entries.remove_directory, directory, name)
            with entries.closing(removed):
                self._forget_name(folder, name, removed)

    async def rename(
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
    ) -> None:
        """Rename an entry, or a dataset."""
        if flags & ~_RENAME_NOREPLACE:
            raise refusal(errno.EINVAL)
        replace = not flags & _RENAME_NOREPLACE
        if parent_old == parent_new == ROOT:
            await self._rename_dataset(name_old, name_new, replace=replace)
            return
        if ROOT in (parent_old, parent_new):  # a dataset has more than a directory
            raise refusal(errno.EXDEV)
        old, new = self._table.get(parent_old), self._table.get(parent_new)
        # The kernel runs one rename between directories at a time. So both stay in their datasets.
        across = old.dataset() is not new.dataset()
        async with self._moves.moving_alone() if across else self._moves.moving():
            with self.sealer.changing(old, new):
                _check_length(new, name_new)
                async with (
                    self._directories.opened(old) as source,
                    self._directories.opened(new) as target,
                ):
                    moved, replaced = await self._directories.run(
                        entries.rename,
                        source,
                        name_old,
                        target,
                        name_new,
                        replace=replace,
                        across=across,
                    )
                with entries.closing(replaced):
                    if replaced is not None:
                        if identity_of(os.fstat(replaced)) == identity_of(moved):
                            return  # two names of one file: rename does nothing
                        self._forget_name(new, name_new, replaced)
                    self._table.note_rename((old, name_old), (new, name_new), identity_of(moved))

    async def _rename_dataset(self, old: bytes, new: bytes, *, replace: bool) -> None:
        root = self._table.root
        replaced = _stat_all(root, self._area.datasets, [new]).get(new)
        if replaced is not None and not replace:
            raise refusal(errno.EEXIST)
        moved = _stat(root, self._area.datasets, old)
        async with self._moves.moving():
            with self._changing_datasets(*filter(None, [moved, replaced])):
                await self._directories.run(self._area.rename, old, new)
                if replaced is not None and old != new:
                    self._forget_directory(root, new, replaced)
                self._table.note_rename((root, old), (root, new), identity_of(moved))
        self.sealer.forget(old)
        self.sealer.forget(new)

    def _changing_datasets(self, *directories: os.stat_result) -> AbstractContextManager[None]:
        """Return a context in which whole datasets may be renamed or removed."""
        inodes = [self._table.find(identity_of(status)) for status in directories]
        return self.sealer.changing(*filter(None, inodes))

    def _forget_name(self, folder: Inode, name: bytes, removed: int) -> None:
        """Note that a name was removed.

        ``removed`` is an O_PATH descriptor of the file. Without it, another file could have got the
        same identity by now and be mistaken for it.
        """
        status = os.fstat(removed)
        if stat.S_ISDIR(status.st_mode):
            self._forget_directory(folder, name, status)
        else:
            last = not status.st_nlink
            inode = self._table.note_removal(folder, name, identity_of(status), last=last)
            if inode is not None:
                self._table.keep_open(inode, removed)
                if last:
                    inode.last_status = status

    def _forget_directory(self, folder: Inode, name: bytes, status: os.stat_result) -> None:
        inode = self._table.note_removal(folder, name, identity_of(status), last=True)
        if inode is not None:
            inode.last_status = status
            self._directories.close_one(inode)

    def _directory_in_dataset(self, parent: int) -> Inode:
        """Return a directory that may contain files; EPERM for ``incoming`` itself."""
        if parent == ROOT:
            raise refusal(errno.EPERM)
        return self._table.get(parent)

    # ---- files -----------------------------------------------------------------------------------

    async def open(self, number: int, flags: int, *, clears_ids: bool) -> Opened:
        """Open a file. With ``clears_ids``, see ``entries.open_file``."""
        inode = self._table.get(number)
        with ExitStack() as stack:
            if is_writing(flags) or flags & os.O_TRUNC:
                stack.enter_context(self._changing_file(inode))

            async def open_named(parent: Inode, name: bytes) -> int:
                async with self._directories.opened(parent) as directory:
                    return await self._directories.run(
                        entries.open_file,
                        directory,
                        name,
                        inode.identity,
                        flags,
                        clears_ids=clears_ids,
                    )

            def open_unlinked(unlinked: int) -> int:
                return entries.open_unlinked(unlinked, flags, clears_ids=clears_ids)

            descriptor = await self._moves.call_on(inode, open_named, open_unlinked)
            return self.files.add(inode, descriptor, flags)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, owner: Owner, *, clears_ids: bool
    ) -> tuple[Opened, Entry]:
        """Create a file and open it. With ``clears_ids``, see ``entries.open_file``."""
        folder = self._directory_in_dataset(parent)
        with self.sealer.changing(folder):
            _check_length(folder, name)
            async with self._directories.opened(folder) as directory:
                descriptor, status = await self._directories.run(
                    entries.create, directory, name, flags, mode, owner, clears_ids=clears_ids
                )
            entry = self._found(folder, name, status)
            return self.files.add(self._table.get(entry.node), descriptor, flags), entry

    # ---- directories -----------------------------------------------------------------------------

    async def opendir(self, number: int) -> int:
        """Open a directory to list it."""
        inode = self._table.get(number)
        self._last_listing += 1
        self._listings[self._last_listing] = _OpenDirectory(inode, [])
        inode.handles.add(self._last_listing)
        return self._last_listing

    async def readdir(self, fh: int, start: int, reply: Listing) -> None:
        """List a directory from a position on, with the names it had when the listing began."""
        listing = self._listings[fh]
        if not start:
            listing.names = await self._names(listing.inode)
        position = start
        async with self._directories.opened(listing.inode) as directory:
            while position < len(listing.names):
                names = listing.names[position : position + LIST_AHEAD]
                found = await self._directories.run(_stat_all, listing.inode, directory, names)
                for name in names:
                    position += 1
                    if name in found and not self._list(
                        listing.inode, name, found[name], position, reply
                    ):
                        return

    def _list(
        self, folder: Inode, name: bytes, status: os.stat_result, position: int, reply: Listing
    ) -> bool:
        """Append an entry to a reply. Return False if the reply is full."""
        entry = self._found(folder, name, status)
        appended = reply.append(name, entry, position)
        if not (appended and reply.plus):
            self._table.forget(entry.node, 1)
        return appended

    async def releasedir(self, fh: int) -> None:
        """Close a directory."""
        listing = self._listings.pop(fh)
        self._table.note_close(listing.inode, fh)

    async def fsyncdir(self, fh: int, _datasync: bool) -> None:
        """Make a directory's entries durable."""
        async with self._directories.opened(self._listings[fh].inode) as directory:
            await self._directories.run(entries.sync_directory, directory)

    async def _names(self, inode: Inode) -> list[bytes]:
        if inode.number == ROOT:
            return await self._directories.run(self._area.names)
        async with self._directories.opened(inode) as directory:
            return await self._directories.run(entries.list_names, directory)

    # ---- extended attributes ---------------------------------------------------------------------

    async def getxattr(self, number: int, name: bytes) -> bytes:
        """Return the state of a dataset's sealing, or its contents, as JSON."""
        inode = self._table.get(number)
        attribute = os.fsdecode(name)
        if attribute == XATTR_SEAL and (status := self._seal_status(inode)) is not None:
            return status
        if attribute == XATTR_INCOMING and self._is_dataset(inode):
            found = await self._directories.run(self._area.contents, inode.links[-1][1])
            return found.encode()
        raise refusal(errno.ENODATA)

    async def setxattr(self, number: int, name: bytes, value: bytes) -> None:
        """Seal or discard a dataset."""
        inode = self._table.get(number)
        attribute = os.fsdecode(name)
        if attribute not in (XATTR_SEAL, XATTR_DISCARD):
            raise refusal(errno.EOPNOTSUPP)
        if not self._is_dataset(inode):
            raise refusal(errno.EINVAL)
        inode.last_status = await self.status(inode)
        if attribute == XATTR_SEAL:
            options = SealOptions.decode(value)
            await self.sealer.request(inode, options, lambda: self._find_obstacle(inode))
        else:
            await self.sealer.discard(inode, lambda: self._find_obstacle(inode))

    def space(self) -> os.statvfs_result:
        """Return the space of the file system that the staging area lies on."""
        return os.statvfs(self._area.datasets)

    def _is_dataset(self, inode: Inode) -> bool:
        return bool(inode.links) and inode.links[-1][0].number == ROOT

    def _seal_status(self, inode: Inode) -> bytes | None:
        ended = self.sealer.ended(inode)
        if ended is None and self._is_dataset(inode):
            ended = self.sealer.status(inode)
        return None if ended is None else ended.encode()

    async def _find_obstacle(self, dataset: Inode) -> str | None:
        """Return why a dataset cannot be sealed or discarded yet, or None."""
        writer = await self.files.writer_in(dataset)
        return None if writer is None else f"{display(writer)!r} is open for writing"


@contextmanager
def open_incoming(volume: Volume, folder: str | os.PathLike[str]) -> Iterator[IncomingTree]:
    """Open a staging area for a mount of a volume, and recover it after a crash.

    Raises:
        DlfsError: as ``StagingArea``, and as ``Volume.refresh``.
        OSError: the staging area cannot be read or written.
    """
    _raise_descriptor_limit()
    with StagingArea(folder, volume.uuid) as area:
        volume.refresh()  # the previous server may have sealed a dataset just before it ended
        for name in area.recover({info.uuid for info in volume.datasets()}):
            _log.warning("incoming: %r had been sealed when the server died", display(name))
        incoming = IncomingTree(volume, area)
        try:
            yield incoming
        finally:
            incoming.close()


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors: each open file below ``incoming`` needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _stat(folder: Inode, directory: int, name: bytes) -> os.stat_result:
    """Return the attributes of an entry; for a dataset, those of its directory ``files``."""
    if folder.number != ROOT:
        return entries.stat_entry(directory, name)
    with entries.opened(directory, name) as wrapper:
        return entries.stat_entry(wrapper, b"files")


def _stat_all(folder: Inode, directory: int, names: list[bytes]) -> dict[bytes, os.stat_result]:
    """Return the attributes of several entries by name, without entries that no longer exist."""
    found = {}
    for name in names:
        with suppress(FileNotFoundError):
            found[name] = _stat(folder, directory, name)
    return found


def _change_file(descriptor: int, wanted: Change) -> os.stat_result:
    entries.change_opened(descriptor, os.fstat(descriptor), wanted)
    return os.fstat(descriptor)


def _check_length(folder: Inode, name: bytes) -> None:
    """Refuse a path that is too long for a sample."""
    if len(name) > COMPONENT_BYTES_MAX:
        raise refusal(errno.ENAMETOOLONG)
    below_dataset = folder.path.partition(b"/")[2]
    if len(below_dataset) + 1 + len(name) > PATH_BYTES_MAX:
        raise refusal(errno.ENAMETOOLONG)
