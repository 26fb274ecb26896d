"""The directory ``incoming`` of a mount: what is written goes to the spool until it is sealed.

Every request becomes the same system call on the spool, in a thread if it could wait long: looking
one name up in a directory that is held, and closing a file, take less than a thread would. Numbers
and names are kept in ``nodes``, directories in ``directories``, open files in ``open_files``. What
the kernel knows may be a second old, for the server takes things away by itself when they are
sealed.

``incoming`` itself holds datasets, that is directories with names that datasets can have, and
nothing else.

Threads: the FUSE loop (trio).
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext

from dlfs.format.constants import COMPONENT_BYTES_MAX, PATH_BYTES_MAX
from dlfs.format.names import INCOMING as INCOMING_NAME
from dlfs.format.paths import display
from dlfs.staging import entries
from dlfs.staging.area import Spool
from dlfs.staging.directories import Directories
from dlfs.staging.entries import Change, Owner, identity_of
from dlfs.staging.inode_numbers import INCOMING
from dlfs.staging.inode_table import Node, NodeTable
from dlfs.staging.open_files import OpenFiles, is_writing
from dlfs.staging.protocol import (
    XATTR_DISCARD,
    XATTR_INCOMING,
    XATTR_SEAL,
    SealOptions,
)
from dlfs.staging.sealer import Sealer
from dlfs.volume import Volume

NAME = INCOMING_NAME.encode()

KNOWN_SECONDS = 1.0
"""How long the kernel may answer from what it knows of the incoming tree."""

LIST_AHEAD = 64
"""Entries of a listing that are looked at together."""

_RENAME_NOREPLACE = 1

_log = logging.getLogger(__name__)
_What = TypeVar("_What")
"""What a maker is told: a mode, or the text of a link."""


@dataclass(eq=False)
class _Listing:
    node: Node
    names: list[bytes]


class IncomingTree:
    """Answers requests below ``incoming``.

    Args:
        volume: that datasets are sealed into; borrowed.
        spool: borrowed; recovered already.

    Raises (every handler):
        FUSEError: what the mount answers.
        OSError: what the spool answered.
        StaleError: the file is gone.
    """

    def __init__(self, volume: Volume, spool: Spool) -> None:
        self._spool = spool
        self._table = NodeTable(identity_of(os.fstat(spool.datasets)))
        self._directories = Directories(spool.datasets)
        self.sealer = Sealer(volume, spool, self._let_go)
        self.files = OpenFiles(self._table, self._directories)
        self.on_gone: Callable[[bytes], None] = lambda _name: None
        """Told the name of a dataset that was sealed or discarded."""
        self._listings: dict[int, _Listing] = {}
        self._last_listing = INCOMING

    def close(self) -> None:
        """Close every file and directory."""
        self.files.close()
        self._directories.close()

    def _let_go(self, dataset: Node, name: bytes) -> None:
        """A dataset has left the spool: nothing may lead to it any more."""
        self._table.removed(self._table.root, name, dataset.identity, last=True)
        self._directories.close()
        pyfuse3.invalidate_entry_async(INCOMING, name, ignore_enoent=True)
        self.on_gone(name)

    # ---- names and attributes --------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        """Find an entry."""
        folder = self._table.get(parent)
        if name in (b".", b".."):  # file handles that outlive the kernel's memory (NFS)
            raise FUSEError(errno.ESTALE)
        if len(name) > COMPONENT_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        async with self._directories.hold(folder) as directory:
            status = _look(folder, directory, name)
        return self._found(folder, name, status)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Note what the kernel no longer knows."""
        for number, lookups in inode_list:
            self._table.forget(number, lookups)

    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        """Attributes of an entry."""
        return _entry(inode, await self.status(self._table.get(inode)))

    async def root(self) -> EntryAttributes:
        """Attributes of ``incoming`` itself."""
        return _entry(INCOMING, await self.status(self._table.root))

    async def status(self, node: Node) -> os.stat_result:
        """What the spool says of a node."""
        if node.number == INCOMING:
            return os.fstat(self._spool.datasets)
        if not node.places:
            if node.last is not None:
                return node.last
            return os.fstat(self.files.of_nameless(node).descriptor)
        parent, name = node.places[-1]
        if parent.number == INCOMING:
            async with self._directories.hold(node) as directory:
                return os.fstat(directory)
        async with self._directories.hold(parent) as directory:
            return await self._directories.run(entries.look_at, directory, name, node.identity)

    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        _ctx: RequestContext,
    ) -> EntryAttributes:
        """Change attributes."""
        node = self._table.get(inode)
        wanted = _change(attr, fields)
        run = self._directories.run
        if node.number == INCOMING:
            return _entry(inode, await run(entries.change_held, self._spool.datasets, wanted))
        file = self.files.get(fh)
        if file is None and not node.places:
            file = self.files.of_nameless(node)
        if file is not None and (file.writable or not node.places):
            return _entry(inode, await run(_change_file, file.descriptor, wanted))
        with self.sealer.changing(node):
            parent, name = node.places[-1]
            if parent.number == INCOMING:
                async with self._directories.hold(node) as directory:
                    return _entry(inode, await run(entries.change_held, directory, wanted))
            async with self._directories.hold(parent) as directory:
                status = await run(entries.change, directory, name, node.identity, wanted)
        return _entry(inode, status)

    async def readlink(self, inode: int, _ctx: RequestContext) -> bytes:
        """The text of a symbolic link."""
        node = self._table.get(inode)
        if not node.places:
            raise FUSEError(errno.ESTALE)
        parent, name = node.places[-1]
        async with self._directories.hold(parent) as directory:
            return await self._directories.run(entries.read_link, directory, name)

    def _found(self, parent: Node, name: bytes, status: os.stat_result) -> EntryAttributes:
        node = self._table.found(
            parent, name, identity_of(status), directory=stat.S_ISDIR(status.st_mode)
        )
        return _entry(node.number, status)

    # ---- making and removing ---------------------------------------------------------------------

    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a directory; directly in ``incoming``, begin a dataset."""
        folder = self._table.get(parent)
        if parent == INCOMING:
            await self._directories.run(
                self._spool.make, name, mode=mode & 0o7777, uid=ctx.uid, gid=ctx.gid
            )
            self.sealer.gone(name)
            return await self.lookup(parent, name, ctx)
        return await self._make(entries.make_directory, folder, name, mode, ctx)

    async def mknod(
        self, parent: int, name: bytes, mode: int, _rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a file, FIFO or socket."""
        return await self._make(entries.make_node, self._inside(parent), name, mode, ctx)

    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symbolic link."""
        return await self._make(entries.make_link, self._inside(parent), name, target, ctx)

    async def _make(
        self,
        call: Callable[[int, bytes, _What, Owner], os.stat_result],
        folder: Node,
        name: bytes,
        what: _What,
        ctx: RequestContext,
    ) -> EntryAttributes:
        with self.sealer.changing(folder):
            _check_length(folder, name)
            async with self._directories.hold(folder) as directory:
                status = await self._directories.run(
                    call, directory, name, what, Owner(ctx.uid, ctx.gid)
                )
            return self._found(folder, name, status)

    async def link(
        self, inode: int, parent: int, name: bytes, _ctx: RequestContext
    ) -> EntryAttributes:
        """Give a file one more name."""
        node, folder = self._table.get(inode), self._inside(parent)
        if not node.places:
            raise FUSEError(errno.ENOENT)
        with self.sealer.changing(node, folder):
            if node.dataset() is not folder.dataset():  # one could be written while one is sealed
                raise FUSEError(errno.EXDEV)
            _check_length(folder, name)
            old_folder, old = node.places[-1]
            async with (
                self._directories.hold(old_folder) as source,
                self._directories.hold(folder) as target,
            ):
                status = await self._directories.run(
                    entries.hard_link, source, old, node.identity, target, name
                )
            return self._found(folder, name, status)

    async def unlink(self, parent: int, name: bytes, _ctx: RequestContext) -> None:
        """Remove a name."""
        folder = self._inside(parent)
        with self.sealer.changing(folder):
            async with self._directories.hold(folder) as directory:
                gone = await self._directories.run(entries.unlink, directory, name)
            with entries.closing(gone):
                self._forget_name(folder, name, os.fstat(gone))

    async def rmdir(self, parent: int, name: bytes, _ctx: RequestContext) -> None:
        """Remove an empty directory; directly in ``incoming``, an empty dataset."""
        folder = self._table.get(parent)
        if parent == INCOMING:
            gone = _look(folder, self._spool.datasets, name)
            with self._changing_datasets(gone):
                await self._directories.run(self._spool.remove_empty, name)
            self.sealer.gone(name)
            self._forget_directory(folder, name, gone)
            return
        with self.sealer.changing(folder):
            async with self._directories.hold(folder) as directory:
                held = await self._directories.run(entries.remove_directory, directory, name)
            with entries.closing(held):
                self._forget_name(folder, name, os.fstat(held))

    async def rename(
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
        _ctx: RequestContext,
    ) -> None:
        """Rename an entry, or a dataset."""
        if flags & ~_RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        replace = not flags & _RENAME_NOREPLACE
        if parent_old == parent_new == INCOMING:
            await self._rename_dataset(name_old, name_new, replace=replace)
            return
        if INCOMING in (parent_old, parent_new):  # a dataset is more than its directory
            raise FUSEError(errno.EXDEV)
        old, new = self._table.get(parent_old), self._table.get(parent_new)
        with self.sealer.changing(old, new):
            _check_length(new, name_new)
            async with (
                self._directories.hold(old) as source,
                self._directories.hold(new) as target,
            ):
                moved, replaced = await self._directories.run(
                    entries.rename,
                    source,
                    name_old,
                    target,
                    name_new,
                    replace=replace,
                    across=old.dataset() is not new.dataset(),
                )
            with entries.closing(replaced):
                gone = None if replaced is None else os.fstat(replaced)
                if gone is not None and identity_of(gone) == identity_of(moved):
                    return  # two names of one file: nothing was done
                if gone is not None:
                    self._forget_name(new, name_new, gone)
                self._table.renamed((old, name_old), (new, name_new), identity_of(moved))

    async def _rename_dataset(self, old: bytes, new: bytes, *, replace: bool) -> None:
        root = self._table.root
        replaced: os.stat_result | None = None
        try:
            replaced = _look(root, self._spool.datasets, new)
        except FileNotFoundError:
            pass
        else:
            if not replace:
                raise FUSEError(errno.EEXIST)
        moved = _look(root, self._spool.datasets, old)
        with self._changing_datasets(*filter(None, [moved, replaced])):
            await self._directories.run(self._spool.rename, old, new)
        if replaced is not None and old != new:
            self._forget_directory(root, new, replaced)
        self._table.renamed((root, old), (root, new), identity_of(moved))
        self.sealer.gone(old)
        self.sealer.gone(new)

    def _changing_datasets(self, *directories: os.stat_result) -> AbstractContextManager[None]:
        """Rename or remove datasets as a whole."""
        nodes = [self._table.known(identity_of(status)) for status in directories]
        return self.sealer.changing(*filter(None, nodes))

    def _forget_name(self, folder: Node, name: bytes, status: os.stat_result) -> None:
        """Note that a name is gone; what it led to is as the status says, and still held.

        Else another file could have its identity already, and be taken for it.
        """
        if stat.S_ISDIR(status.st_mode):
            self._forget_directory(folder, name, status)
        else:
            self._table.removed(folder, name, identity_of(status), last=not status.st_nlink)

    def _forget_directory(self, folder: Node, name: bytes, status: os.stat_result) -> None:
        node = self._table.removed(folder, name, identity_of(status), last=True)
        if node is not None:
            node.last = status
            self._directories.drop(node)

    def _inside(self, parent: int) -> Node:
        """A directory in which there may be files, which is any but ``incoming`` itself."""
        if parent == INCOMING:
            raise FUSEError(errno.EPERM)
        return self._table.get(parent)

    # ---- files -----------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, _ctx: RequestContext) -> FileInfo:
        """Open a file."""
        node = self._table.get(inode)
        with ExitStack() as stack:
            if is_writing(flags) or flags & os.O_TRUNC:
                stack.enter_context(self.sealer.changing(node))
            if not node.places:
                raise FUSEError(errno.ESTALE)
            parent, name = node.places[-1]
            async with self._directories.hold(parent) as directory:
                descriptor = await self._directories.run(
                    entries.open_file, directory, name, node.identity, flags
                )
            return self.files.add(node, descriptor, flags)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Create a file and open it."""
        folder = self._inside(parent)
        with self.sealer.changing(folder):
            _check_length(folder, name)
            async with self._directories.hold(folder) as directory:
                descriptor, status = await self._directories.run(
                    entries.create, directory, name, flags, mode, Owner(ctx.uid, ctx.gid)
                )
            entry = self._found(folder, name, status)
            return self.files.add(self._table.get(entry.st_ino), descriptor, flags), entry

    # ---- directories -----------------------------------------------------------------------------

    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        """Begin to list a directory."""
        node = self._table.get(inode)
        self._last_listing += 1
        self._listings[self._last_listing] = _Listing(node, [])
        node.handles.add(self._last_listing)
        return self._last_listing

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """List a directory as it was when the listing began."""
        listing = self._listings[fh]
        if not start_id:
            listing.names = await self._names(listing.node)
        position = start_id
        async with self._directories.hold(listing.node) as directory:
            while position < len(listing.names):
                names = listing.names[position : position + LIST_AHEAD]
                found = dict(
                    await self._directories.run(_look_through, listing.node, directory, names)
                )
                for name in names:
                    position += 1
                    if name in found and not self._list(
                        listing.node, name, found[name], position, token
                    ):
                        return

    def _list(
        self, folder: Node, name: bytes, status: os.stat_result, position: int, token: ReaddirToken
    ) -> bool:
        """Give the kernel an entry, if it still fits."""
        entry = self._found(folder, name, status)
        if pyfuse3.readdir_reply(token, name, entry, position):
            return True
        self._table.forget(entry.st_ino, 1)
        return False

    async def releasedir(self, fh: int) -> None:
        """End a listing."""
        listing = self._listings.pop(fh)
        self._table.closed(listing.node, fh)

    async def fsyncdir(self, fh: int, _datasync: bool) -> None:
        """Make a directory's entries durable on the spool."""
        async with self._directories.hold(self._listings[fh].node) as directory:
            await self._directories.run(entries.sync_directory, directory)

    async def _names(self, node: Node) -> list[bytes]:
        if node.number == INCOMING:
            return await self._directories.run(self._spool.names)
        async with self._directories.hold(node) as directory:
            return await self._directories.run(entries.list_names, directory)

    # ---- extended attributes ---------------------------------------------------------------------

    async def getxattr(self, inode: int, name: bytes, _ctx: RequestContext) -> bytes:
        """How a dataset's sealing goes, or what it holds."""
        node = self._table.get(inode)
        asked = os.fsdecode(name)
        if asked == XATTR_SEAL and (status := self._seal_status(node)) is not None:
            return status
        if asked == XATTR_INCOMING and self._is_dataset(node):
            found = await self._directories.run(self._spool.contents, node.places[-1][1])
            return found.encode()
        raise FUSEError(errno.ENODATA)

    async def listxattr(self, _inode: int, _ctx: RequestContext) -> list[bytes]:
        """None: ours are for those who ask, not for those who copy."""
        return []

    async def setxattr(self, inode: int, name: bytes, value: bytes, _ctx: RequestContext) -> None:
        """Seal a dataset, or forget it."""
        node = self._table.get(inode)
        asked = os.fsdecode(name)
        if asked not in (XATTR_SEAL, XATTR_DISCARD):
            raise FUSEError(errno.EOPNOTSUPP)
        if not self._is_dataset(node):
            raise FUSEError(errno.EINVAL)
        node.last = await self.status(node)
        if asked == XATTR_SEAL:
            options = SealOptions.decode(value)
            await self.sealer.request(node, options, lambda: self._unready(node))
        else:
            await self.sealer.discard(node, lambda: self._unready(node))

    async def removexattr(self, _inode: int, _name: bytes, _ctx: RequestContext) -> None:
        """There are none."""
        raise FUSEError(errno.ENODATA)

    def _is_dataset(self, node: Node) -> bool:
        return bool(node.places) and node.places[-1][0].number == INCOMING

    def _seal_status(self, node: Node) -> bytes | None:
        ended = self.sealer.ended(node)
        if ended is None and self._is_dataset(node):
            ended = self.sealer.status(node)
        return None if ended is None else ended.encode()

    async def _unready(self, dataset: Node) -> str | None:
        """Why a dataset cannot be taken away yet."""
        writer = await self.files.writer_in(dataset)
        return None if writer is None else f"{display(writer.node.path)!r} is open for writing"


@contextmanager
def open_incoming(volume: Volume, folder: str | os.PathLike[str]) -> Iterator[IncomingTree]:
    """Open a spool for a mount of a volume, and settle what a crash left undecided in it.

    Raises:
        DlfsError: as ``Spool``, and as ``Volume.refresh``.
        OSError: the spool cannot be read or written.
    """
    _allow_descriptors()
    with Spool(folder, volume.uuid) as spool:
        volume.refresh()  # the server that had the spool until now may have sealed something
        for name in spool.recover({info.uuid for info in volume.datasets()}):
            _log.warning("incoming: %r had been sealed when the server died", display(name))
        incoming = IncomingTree(volume, spool)
        try:
            yield incoming
        finally:
            incoming.close()


def _allow_descriptors() -> None:
    """Every open file below ``incoming`` takes one of ours."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _look(folder: Node, directory: int, name: bytes) -> os.stat_result:
    """Attributes of an entry; of a dataset, those of its directory of files."""
    if folder.number != INCOMING:
        return entries.look(directory, name)
    wrapper = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        return entries.look(wrapper, b"files")
    finally:
        os.close(wrapper)


def _look_through(
    folder: Node, directory: int, names: list[bytes]
) -> list[tuple[bytes, os.stat_result]]:
    if folder.number != INCOMING:
        return entries.look_through(directory, names)
    found = []
    for name in names:
        try:
            found.append((name, _look(folder, directory, name)))
        except FileNotFoundError:
            continue
    return found


def _change_file(descriptor: int, wanted: Change) -> os.stat_result:
    entries.change_opened(descriptor, os.fstat(descriptor), wanted)
    return os.fstat(descriptor)


def _change(attr: EntryAttributes, fields: pyfuse3.SetattrFields) -> Change:
    return Change(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size_bytes=attr.st_size if fields.update_size else None,
        access_ns=attr.st_atime_ns if fields.update_atime else None,
        modify_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )


def _check_length(folder: Node, name: bytes) -> None:
    """Refuse a path that no sample can have."""
    if len(name) > COMPONENT_BYTES_MAX:
        raise FUSEError(errno.ENAMETOOLONG)
    below_dataset = folder.path.partition(b"/")[2]
    if len(below_dataset) + 1 + len(name) > PATH_BYTES_MAX:
        raise FUSEError(errno.ENAMETOOLONG)


def _entry(number: int, status: os.stat_result) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = number
    entry.generation = 0
    entry.entry_timeout = entry.attr_timeout = KNOWN_SECONDS
    entry.st_mode = status.st_mode
    entry.st_nlink = status.st_nlink
    entry.st_uid = status.st_uid
    entry.st_gid = status.st_gid
    entry.st_rdev = 0
    entry.st_size = status.st_size
    entry.st_blksize = status.st_blksize
    entry.st_blocks = status.st_blocks
    entry.st_atime_ns = status.st_atime_ns
    entry.st_mtime_ns = status.st_mtime_ns
    entry.st_ctime_ns = status.st_ctime_ns
    return entry
