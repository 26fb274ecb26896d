"""The answers to the kernel's requests: SEMANTICS.md, as pyfuse3 wants it.

Everything but the reading of samples and of the volume's list of datasets is answered from memory,
at once. What a handler raises becomes an errno by the table in ``errnos``; what is a fault of the
volume or of a device is logged, since the number alone tells nobody what happened.

Source: pyfuse3 documentation, "Request handlers".
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext

from dlfs.errors import DlfsError, NotFoundError, StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX
from dlfs.mount.errnos import QUIET, errno_of
from dlfs.mount.open_file_cache import HeldSamples, OpenSample
from dlfs.mount.permissions import Access
from dlfs.mount.tree import Listing, Node
from dlfs.mount.view import ROOT_SECONDS, OpenDataset, Slot, VolumeView
from dlfs.staging.inode_numbers import DATASET_DEPTH, FILE_DEPTH, ROOT, pack, unpack
from dlfs.volume import Volume

FOREVER_SECONDS = 1e9
"""For what never changes: the kernel may keep it as long as it has memory."""

BLOCK_BYTES = 4096
DISK_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system

XATTR_INDEX = b"user.dlfs.index"
XATTR_CRC32C = b"user.dlfs.crc32c"
XATTR_VERSION = b"user.dlfs.version"

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_NS = 10**9

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class _RootHandle:
    """The root being listed: the names when the listing began."""

    names: list[bytes]


@dataclass
class _DirectoryHandle:
    slot: Slot
    listing: Listing


def _answers(
    handler: Callable[_P, Coroutine[Any, Any, _T]],
) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Turn what a handler raises on purpose into an errno."""

    @functools.wraps(handler)
    async def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await handler(*args, **kwargs)
        except (DlfsError, OSError, MemoryError) as error:
            number = errno_of(error)
            if number not in QUIET:
                _log.error("%s: %s", errno.errorcode.get(number, number), error)
            raise FUSEError(number) from error

    return answer


class ReadOnlyOperations(pyfuse3.Operations):
    """Refuses whatever would change something.

    The kernel does so by itself, since the mount is read-only; these answer when somebody remounts
    it for writing.
    """

    async def _refuse(self, *_args: object) -> NoReturn:
        raise FUSEError(errno.EROFS)

    _refusal: Any = _refuse  # whatever the handler's own arguments
    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _refusal
    create = write = setxattr = removexattr = _refusal


class MountOperations(ReadOnlyOperations):
    """Answers requests on one volume.

    Args:
        volume: borrowed.
        view: what of it is shown.
        held: reads samples.
        access: whom the files belong to.

    Threads: the FUSE loop.
    """

    supports_dot_lookup = True

    def __init__(self, volume: Volume, view: VolumeView, held: HeldSamples, access: Access) -> None:
        super().__init__()
        self._volume = volume
        self._view = view
        self._held = held
        self._access = access
        self._started_ns = time.time_ns()
        self._files: dict[int, OpenSample] = {}
        self._directories: dict[int, _RootHandle | _DirectoryHandle] = {}
        self._last_handle = 0

    # ---- names and attributes --------------------------------------------------------------------

    @_answers
    async def lookup(self, parent: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        """Find an entry of a directory. The kernel remembers that there is none, too."""
        if len(name) > COMPONENT_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        try:
            if parent == ROOT:
                return await self._lookup_in_root(name)
            place = unpack(parent)
            slot = self._view.slot(place.slot)
            opened = slot.opened or await self._view.open(slot)
            node = Node(place.depth, place.sample_index)
            if name in (b".", b".."):
                return await self._lookup_dots(slot, opened, node, name)
            if place.depth == FILE_DEPTH:
                raise FUSEError(errno.ENOTDIR)
            return self._node(slot, opened, opened.tree.child(node, name))
        except NotFoundError:
            absent = EntryAttributes()
            absent.st_ino = 0
            absent.entry_timeout = ROOT_SECONDS if parent == ROOT else FOREVER_SECONDS
            return absent

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nothing to do: inode numbers are not remembered."""

    @_answers
    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        """Attributes of a file or directory."""
        if inode == ROOT:
            return await self._root()
        place = unpack(inode)
        slot = self._view.slot(place.slot)
        node = Node(place.depth, place.sample_index)
        if node.depth != FILE_DEPTH:
            return self._directory(slot, node)
        return self._node(slot, slot.opened or await self._view.open(slot), node)

    async def _lookup_in_root(self, name: bytes) -> EntryAttributes:
        return await (self._root() if name in (b".", b"..") else self._root_child(name))

    async def _root_child(self, name: bytes) -> EntryAttributes:
        """What the root shows under a name."""
        return self._directory(await self._view.child(name), Node(DATASET_DEPTH, 0))

    async def _root_names(self) -> list[bytes]:
        """What the root lists."""
        return await self._view.names()

    async def _lookup_dots(
        self, slot: Slot, opened: OpenDataset, node: Node, name: bytes
    ) -> EntryAttributes:
        """What file handles that outlive the kernel's memory of an inode (NFS) are resolved by."""
        if name == b".":
            return self._node(slot, opened, node)
        if node.depth == DATASET_DEPTH:
            return await self._root()
        return self._directory(slot, opened.tree.parent(node))

    def _node(self, slot: Slot, opened: OpenDataset, node: Node) -> EntryAttributes:
        if node.depth != FILE_DEPTH:
            return self._directory(slot, node)
        return self._file(slot, node.sample_index, opened.sample(node.sample_index).length_bytes)

    def _file(self, slot: Slot, index: int, length_bytes: int) -> EntryAttributes:
        entry = self._entry(pack(slot.number, FILE_DEPTH, index), slot)
        entry.st_mode = stat.S_IFREG | self._access.file_mode
        entry.st_size = length_bytes
        entry.st_blocks = -(-length_bytes // DISK_BLOCK_BYTES)
        return entry

    def _directory(self, slot: Slot, node: Node) -> EntryAttributes:
        entry = self._entry(pack(slot.number, node.depth, node.sample_index), slot)
        entry.st_mode = stat.S_IFDIR | self._access.directory_mode
        if node.depth == DATASET_DEPTH:  # the name may mean another version later
            entry.entry_timeout = ROOT_SECONDS
        return entry

    def _entry(self, inode: int, slot: Slot) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.generation = slot.generation
        entry.entry_timeout = entry.attr_timeout = FOREVER_SECONDS
        entry.st_uid = self._access.uid
        entry.st_gid = self._access.gid
        entry.st_blksize = BLOCK_BYTES
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = slot.modified_ns
        return entry

    async def _root(self) -> EntryAttributes:
        modified_ns = await self._view.modified_ns() or self._started_ns
        entry = EntryAttributes()
        entry.st_ino = ROOT
        entry.entry_timeout = entry.attr_timeout = ROOT_SECONDS
        entry.st_mode = stat.S_IFDIR | self._access.directory_mode
        entry.st_uid = self._access.uid
        entry.st_gid = self._access.gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = modified_ns
        return entry

    # ---- files -----------------------------------------------------------------------------------

    @_answers
    async def open(self, inode: int, flags: int, _ctx: RequestContext) -> FileInfo:
        """Open a file for reading."""
        if flags & _WRITE_FLAGS:
            raise FUSEError(errno.EROFS)
        place = unpack(inode)
        if inode == ROOT or place.depth != FILE_DEPTH:
            raise FUSEError(errno.EISDIR)
        slot = self._view.slot(place.slot)
        opened = slot.opened or await self._view.open(slot)
        length = opened.sample(place.sample_index).length_bytes
        sample = self._held.open(inode, slot, opened.dataset, place.sample_index, length)
        self._last_handle += 1
        self._files[self._last_handle] = sample
        return FileInfo(fh=self._last_handle, keep_cache=True)

    @_answers
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Bytes of an open file, of a sample that was verified as a whole."""
        # Any buffer will do, whatever the annotation says.
        return await self._held.read_range(self._files[fh], off, size)  # type: ignore[return-value]

    async def release(self, fh: int) -> None:
        """Close a file."""
        self._held.release(self._files.pop(fh))

    # ---- directories -----------------------------------------------------------------------------

    @_answers
    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        """Begin to list a directory."""
        handle: _RootHandle | _DirectoryHandle
        if inode == ROOT:
            handle = _RootHandle(await self._root_names())
        else:
            place = unpack(inode)
            slot = self._view.slot(place.slot)
            if place.depth == FILE_DEPTH:
                raise FUSEError(errno.ENOTDIR)
            opened = slot.opened or await self._view.open(slot)
            handle = _DirectoryHandle(
                slot, opened.tree.listing(Node(place.depth, place.sample_index))
            )
        self._last_handle += 1
        self._directories[self._last_handle] = handle
        return self._last_handle

    @_answers
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """List a directory from a position on, as far as the kernel's buffer goes."""
        handle = self._directories[fh]
        if isinstance(handle, _RootHandle):
            await self._list_root(handle, start_id, token)
        else:
            self._list(handle, start_id, token)

    async def _list_root(self, handle: _RootHandle, position: int, token: ReaddirToken) -> None:
        if not position:
            handle.names = await self._root_names()
        for number, name in enumerate(handle.names[position:], position + 1):
            try:
                entry = await self._root_child(name)
            except NotFoundError:
                continue  # removed since the listing began
            if not pyfuse3.readdir_reply(token, name, entry, number):
                return

    def _list(self, handle: _DirectoryHandle, position: int, token: ReaddirToken) -> None:
        slot = self._view.slot(handle.slot.number)
        opened = slot.opened
        if opened is None:
            raise StaleError(f"list a directory of {slot.info.name!r}: the dataset was closed")
        while (child := handle.listing.child(position)) is not None:
            entry = self._node(slot, opened, child.node)
            if not pyfuse3.readdir_reply(token, child.name, entry, child.next_index):
                return
            position = child.next_index

    async def releasedir(self, fh: int) -> None:
        """End a listing."""
        del self._directories[fh]

    # ---- the file system and its attributes ------------------------------------------------------

    @_answers
    async def statfs(self, _ctx: RequestContext) -> pyfuse3.StatvfsData:
        """Space of the volume, and the number of samples shown."""
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = BLOCK_BYTES
        found.f_files = await self._view.sample_total()
        found.f_blocks = self._volume.capacity_bytes // BLOCK_BYTES
        found.f_bfree = found.f_bavail = self._volume.free_bytes // BLOCK_BYTES
        found.f_ffree = found.f_favail = 0
        found.f_namemax = COMPONENT_BYTES_MAX
        return found

    @_answers
    async def getxattr(self, inode: int, name: bytes, _ctx: RequestContext) -> bytes:
        """One extended attribute."""
        value = (await self._xattrs(inode)).get(name)
        if value is None:
            raise FUSEError(errno.ENODATA)
        return value

    @_answers
    async def listxattr(self, inode: int, _ctx: RequestContext) -> list[bytes]:
        """The names of all extended attributes."""
        return list(await self._xattrs(inode))

    async def _xattrs(self, inode: int) -> dict[bytes, bytes]:
        if inode == ROOT:
            return {}
        place = unpack(inode)
        slot = self._view.slot(place.slot)
        version = {XATTR_VERSION: b"%d" % slot.info.version}
        if place.depth == DATASET_DEPTH:
            return version
        if place.depth != FILE_DEPTH:
            return {}
        opened = slot.opened or await self._view.open(slot)
        crc = opened.sample(place.sample_index).crc32c
        return {XATTR_INDEX: b"%d" % place.sample_index, XATTR_CRC32C: b"%08x" % crc} | version
