"""The handlers of the pyfuse3 server, which answer the kernel's requests as SEMANTICS.md says.

Samples and the volume's list of datasets are read by I/O; everything else is answered from memory.
The look-up of a file has the devices begin to read it, and does not wait for them.
An exception of a handler becomes an errno (``errnos``), and the mount goes on.

Threads: one, the FUSE loop (trio).

Source: pyfuse3 documentation, "Request handlers".
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext

from dlfs.errors import NotFoundError, StaleError
from dlfs.format.constants import COMPONENT_BYTES_MAX
from dlfs.format.names import INCOMING as INCOMING_TEXT
from dlfs.mount.errnos import report_failure
from dlfs.mount.inode_numbers import (
    DATASET_DEPTH,
    FILE_DEPTH,
    INCOMING,
    ROOT,
    pack,
    unpack,
)
from dlfs.mount.mount_view import ROOT_DIRECTORY, MountView, Shown
from dlfs.mount.open_file_cache import OpenFileCache, OpenSample
from dlfs.mount.options import MountOptions
from dlfs.mount.tree import Listing, TreeNode
from dlfs.mount.view import ROOT_SECONDS, LoadedDataset, ShownDataset

FOREVER_SECONDS = 1e9
"""Cache timeout of attributes and names that never change, in seconds."""

INCOMING_NAME = INCOMING_TEXT.encode()

BLOCK_BYTES = 4096
DISK_BLOCK_BYTES = 512  # the unit of st_blocks on every file system

XATTR_INDEX = b"user.dlfs.index"
XATTR_CRC32C = b"user.dlfs.crc32c"
XATTR_VERSION = b"user.dlfs.version"

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_NS = 10**9

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class _UpperHandle:
    """An open upper directory, with its names when the listing began."""

    directory: int
    """Number of the upper directory."""
    names: list[bytes]


@dataclass
class _DirectoryHandle:
    """An open directory of a dataset."""

    shown: ShownDataset
    listing: Listing


def answers(
    handler: Callable[_P, Coroutine[Any, Any, _T]],
) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Wrap a handler so that any exception becomes an errno for the kernel (``report_failure``)."""

    @functools.wraps(handler)
    async def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(report_failure(error)) from error

    return answer


class ReadOnlyOperations(pyfuse3.Operations):
    """Refuses every request that would change something.

    The kernel refuses them itself, since the mount is read-only; these handlers answer after root
    has remounted it for writing.
    """

    async def _refuse(self, *_args: object) -> NoReturn:
        raise FUSEError(errno.EROFS)

    _refusal: Any = _refuse  # accepts the arguments of each handler
    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _refusal
    create = write = setxattr = removexattr = _refusal


class MountOperations(ReadOnlyOperations):
    """Answers requests on sealed datasets.

    Args:
        view: the datasets that the mount shows.
        cache: reads samples of open files.
        options: options of the mount: owner and permissions of the files.
    """

    supports_dot_lookup = True

    def __init__(self, view: MountView, cache: OpenFileCache, options: MountOptions) -> None:
        super().__init__()
        self._view = view
        self._cache = cache
        self._options = options
        self._started_ns = time.time_ns()
        self._files: dict[int, OpenSample] = {}
        self._directories: dict[int, _UpperHandle | _DirectoryHandle] = {}
        self._last_handle = 0

    # ---- names and attributes --------------------------------------------------------------------

    @answers
    async def lookup(self, parent: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        """Find an entry of a directory; the kernel also caches that an entry is missing."""
        if len(name) > COMPONENT_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        try:
            upper = self._upper_number(parent)
            if upper is not None:
                return await self._lookup_in_upper(upper, name)
            shown, node = self._locate(parent)
            loaded = shown.loaded or await self._view.load(shown)
            if name in (b".", b".."):
                return await self._lookup_dots(shown, loaded, node, name)
            if node.depth == FILE_DEPTH:
                raise FUSEError(errno.ENOTDIR)
            found = loaded.tree.child(node, name)
            entry = self._node(shown, loaded, found)
            if found.depth == FILE_DEPTH:
                self._cache.expect(
                    entry.st_ino, shown, loaded.dataset, found.sample_index, entry.st_size
                )
            return entry
        except NotFoundError:
            absent = EntryAttributes()
            absent.st_ino = 0
            cached = self._upper_number(parent) is None
            absent.entry_timeout = FOREVER_SECONDS if cached else ROOT_SECONDS
            return absent

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the server keeps no state of inodes."""

    @answers
    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        """Return the attributes of a file or directory."""
        if inode == INCOMING:
            return self._incoming()
        upper = self._upper_number(inode)
        if upper is not None:
            await self._view.refresh_soon(upper)
            return self._upper(upper)
        shown, node = self._locate(inode)
        if node.depth != FILE_DEPTH:
            return self._directory(shown, node)
        return self._node(shown, shown.loaded or await self._view.load(shown), node)

    def _locate(self, inode: int) -> tuple[ShownDataset, TreeNode]:
        """Return the dataset and the tree node of an inode number below an upper directory."""
        parts = unpack(inode)
        return self._view.dataset(parts.dataset), TreeNode(parts.depth, parts.sample_index)

    def _upper_number(self, inode: int) -> int | None:
        """Return the number of an upper directory; None if the inode is none."""
        if inode == ROOT:
            return ROOT_DIRECTORY
        parts = unpack(inode)
        is_upper = parts.depth == DATASET_DEPTH and self._view.is_volume(parts.dataset)
        return parts.dataset if is_upper else None

    async def _lookup_in_upper(self, upper: int, name: bytes) -> EntryAttributes:
        if name in (b".", b".."):
            return self._upper(upper if name == b"." else ROOT_DIRECTORY)
        if self._options.incoming is not None and name == INCOMING_NAME:
            return self._incoming()
        return self._upper_child(await self._view.child(name, upper))

    def _upper_child(self, found: Shown) -> EntryAttributes:
        """Return the attributes of an entry of an upper directory."""
        if isinstance(found, ShownDataset):
            return self._directory(found, TreeNode(DATASET_DEPTH, 0))
        return self._upper(found.number)

    def _incoming(self) -> EntryAttributes:
        """Return the attributes of the link ``incoming``, which do not change."""
        entry = self._unchanging(INCOMING, self._started_ns)
        entry.st_mode = stat.S_IFLNK | 0o777
        entry.st_size = len(os.fsencode(self._options.incoming or ""))
        return entry

    @answers
    async def readlink(self, inode: int, _ctx: RequestContext) -> bytes:
        """Return the target of the link ``incoming``."""
        link = self._options.incoming
        if inode != INCOMING or link is None:
            raise FUSEError(errno.EINVAL)
        return os.fsencode(link)

    async def _lookup_dots(
        self, shown: ShownDataset, loaded: LoadedDataset, node: TreeNode, name: bytes
    ) -> EntryAttributes:
        """Look up ``.`` or ``..``: the kernel resolves NFS handles of forgotten inodes by them."""
        if name == b".":
            return self._node(shown, loaded, node)
        if node.depth == DATASET_DEPTH:
            return self._upper(shown.volume.number)
        return self._directory(shown, loaded.tree.parent(node))

    def _node(self, shown: ShownDataset, loaded: LoadedDataset, node: TreeNode) -> EntryAttributes:
        if node.depth != FILE_DEPTH:
            return self._directory(shown, node)
        length = loaded.sample(node.sample_index).length_bytes
        return self._file(shown, node.sample_index, length)

    def _file(self, shown: ShownDataset, index: int, length_bytes: int) -> EntryAttributes:
        entry = self._entry(pack(shown.number, FILE_DEPTH, index), shown)
        entry.st_mode = stat.S_IFREG | self._options.file_mode
        entry.st_size = length_bytes
        entry.st_blocks = -(-length_bytes // DISK_BLOCK_BYTES)
        return entry

    def _directory(self, shown: ShownDataset, node: TreeNode) -> EntryAttributes:
        entry = self._entry(pack(shown.number, node.depth, node.sample_index), shown)
        entry.st_mode = stat.S_IFDIR | self._options.directory_mode
        if node.depth == DATASET_DEPTH:  # its name may stand for another version later
            entry.entry_timeout = ROOT_SECONDS
        return entry

    def _entry(self, inode: int, shown: ShownDataset) -> EntryAttributes:
        entry = self._unchanging(inode, shown.modified_ns)
        entry.generation = shown.generation
        return entry

    def _unchanging(self, inode: int, modified_ns: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.entry_timeout = entry.attr_timeout = FOREVER_SECONDS
        entry.st_uid = self._options.uid
        entry.st_gid = self._options.gid
        entry.st_blksize = BLOCK_BYTES
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = modified_ns
        return entry

    def _upper(self, number: int) -> EntryAttributes:
        modified_ns = self._view.modified_ns(number) or self._started_ns
        entry = EntryAttributes()
        entry.st_ino = ROOT if number == ROOT_DIRECTORY else pack(number, DATASET_DEPTH, 0)
        entry.generation = self._view.generation(number)
        entry.entry_timeout = entry.attr_timeout = ROOT_SECONDS
        entry.st_mode = stat.S_IFDIR | self._options.directory_mode
        entry.st_uid = self._options.uid
        entry.st_gid = self._options.gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = modified_ns
        return entry

    # ---- files -----------------------------------------------------------------------------------

    @answers
    async def open(self, inode: int, flags: int, _ctx: RequestContext) -> FileInfo:
        """Open a file for reading."""
        if flags & _WRITE_FLAGS:
            raise FUSEError(errno.EROFS)
        if self._upper_number(inode) is not None:
            raise FUSEError(errno.EISDIR)
        shown, node = self._locate(inode)
        if node.depth != FILE_DEPTH:
            raise FUSEError(errno.EISDIR)
        loaded = shown.loaded or await self._view.load(shown)
        length = loaded.sample(node.sample_index).length_bytes
        sample = self._cache.open(
            inode,
            shown,
            loaded.dataset,
            node.sample_index,
            length,
            chunk_bytes=loaded.chunk_bytes,
        )
        self._last_handle += 1
        self._files[self._last_handle] = sample
        return FileInfo(fh=self._last_handle, keep_cache=True)

    @answers
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Read from an open file; the sample was verified as a whole."""
        # pyfuse3 accepts any buffer, although its annotation says bytes.
        return await self._cache.read_range(self._files[fh], off, size)  # type: ignore[return-value]

    @answers
    async def release(self, fh: int) -> None:
        """Close a file."""
        self._cache.release(self._files.pop(fh))

    # ---- directories -----------------------------------------------------------------------------

    @answers
    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        """Open a directory to list it."""
        handle: _UpperHandle | _DirectoryHandle
        upper = self._upper_number(inode)
        if upper is not None:
            handle = _UpperHandle(upper, [])
        else:
            shown, node = self._locate(inode)
            if node.depth == FILE_DEPTH:
                raise FUSEError(errno.ENOTDIR)
            loaded = shown.loaded or await self._view.load(shown)
            handle = _DirectoryHandle(shown, loaded.tree.listing(node))
        self._last_handle += 1
        self._directories[self._last_handle] = handle
        return self._last_handle

    @answers
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """List a directory from a position on, until the kernel's buffer is full."""
        handle = self._directories[fh]
        if isinstance(handle, _UpperHandle):
            await self._list_upper(handle, start_id, token)
        else:
            self._list(handle, start_id, token)

    async def _list_upper(self, handle: _UpperHandle, position: int, token: ReaddirToken) -> None:
        await self._view.refresh(handle.directory)
        entries: dict[bytes, Shown | None] = dict(self._view.entries(handle.directory))
        if self._options.incoming is not None:
            entries[INCOMING_NAME] = None
        if not position:
            handle.names = sorted(entries)
        for number, name in enumerate(handle.names[position:], position + 1):
            if name not in entries:
                continue  # removed since the listing began
            found = entries[name]
            entry = self._incoming() if found is None else self._upper_child(found)
            if not pyfuse3.readdir_reply(token, name, entry, number):
                return

    def _list(self, handle: _DirectoryHandle, position: int, token: ReaddirToken) -> None:
        shown = self._view.dataset(handle.shown.number)
        loaded = shown.loaded
        if loaded is None:
            raise StaleError(f"list a directory of {shown.info.name!r}: the dataset was closed")
        while (child := handle.listing.child(position)) is not None:
            entry = self._node(shown, loaded, child.node)
            if not pyfuse3.readdir_reply(token, child.name, entry, child.next_index):
                return
            position = child.next_index

    @answers
    async def releasedir(self, fh: int) -> None:
        """Close a directory."""
        del self._directories[fh]

    # ---- the file system and its attributes ------------------------------------------------------

    @answers
    async def statfs(self, _ctx: RequestContext) -> pyfuse3.StatvfsData:
        """Return the space of the volumes and the number of samples shown."""
        await self._view.refresh_soon()
        space = self._view.space()
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = BLOCK_BYTES
        found.f_files = space.sample_count
        found.f_blocks = space.capacity_bytes // BLOCK_BYTES
        found.f_bfree = found.f_bavail = space.free_bytes // BLOCK_BYTES
        found.f_ffree = found.f_favail = 0
        found.f_namemax = COMPONENT_BYTES_MAX
        return found

    @answers
    async def getxattr(self, inode: int, name: bytes, _ctx: RequestContext) -> bytes:
        """Return an extended attribute."""
        value = (await self._xattrs(inode)).get(name)
        if value is None:
            raise FUSEError(errno.ENODATA)
        return value

    @answers
    async def listxattr(self, inode: int, _ctx: RequestContext) -> list[bytes]:
        """Return the names of all extended attributes."""
        return list(await self._xattrs(inode))

    async def _xattrs(self, inode: int) -> dict[bytes, bytes]:
        if inode == INCOMING or self._upper_number(inode) is not None:
            return {}
        shown, node = self._locate(inode)
        version = {XATTR_VERSION: b"%d" % shown.info.version}
        if node.depth == DATASET_DEPTH:
            return version
        if node.depth != FILE_DEPTH:
            return {}
        loaded = shown.loaded or await self._view.load(shown)
        crc = loaded.sample(node.sample_index).crc32c
        return {XATTR_INDEX: b"%d" % node.sample_index, XATTR_CRC32C: b"%08x" % crc} | version
