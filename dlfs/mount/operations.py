"""The handlers of the pyfuse3 server, which answer the kernel's requests as SEMANTICS.md says.

An inode number says which dataset and which file it belongs to (``inode_numbers``), so the server
remembers nothing of what the kernel uses: the handle of an open file or directory is its inode
number, and nothing is done when it is released or forgotten. Worker threads read samples and the
list of datasets; everything else is answered from memory. An exception of a handler becomes an
errno (``errnos``), and the mount goes on.

What lies above the datasets answers ``list_directories``. The kernel caches its entries for a
second, and those of datasets forever.

Threads: one, the FUSE loop (trio).

Source: pyfuse3 documentation, "Request handlers".
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext

from dlfs.format.constants import COMPONENT_BYTES_MAX
from dlfs.mount.errnos import report_failure
from dlfs.mount.inode_numbers import DATASET_DEPTH, FILE_DEPTH, pack, unpack
from dlfs.mount.list_directories import FOREVER_SECONDS, Attributes, ListDirectories
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import MountOptions
from dlfs.mount.sample_cache import SampleCache
from dlfs.mount.tree import DatasetTree, TreeNode
from dlfs.mount.view import ShownDataset

COPIES_SHARE = 4
"""Copies of samples take a quarter of ``cache_bytes``, in addition to the samples' memory."""

BLOCK_BYTES = 4096
DISK_BLOCK_BYTES = 512  # the unit of st_blocks on every file system

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


class MountOperations(pyfuse3.Operations):
    """Answers requests on sealed datasets.

    Args:
        view: the datasets that the mount shows.
        options: options of the mount: memory, owner and permissions of the files.

    Threads: the FUSE loop, in which it is also made.
    """

    supports_dot_lookup = True

    def __init__(self, view: MountView, options: MountOptions) -> None:
        super().__init__()
        self._view = view
        self._options = options
        self._samples = SampleCache(budget_bytes=options.cache_bytes // COPIES_SHARE)
        self._lists = ListDirectories(view, options)

    # ---- what an inode number stands for ---------------------------------------------------------

    def _locate(self, inode: int) -> tuple[ShownDataset, TreeNode]:
        """Return the dataset and the tree node of an inode number; StaleError after a removal."""
        dataset, *node = unpack(inode)
        return self._view.dataset(dataset), TreeNode(*node)

    async def _tree(self, shown: ShownDataset) -> DatasetTree:
        """Return the tree of a dataset, which is loaded if need be."""
        await self._view.load(shown)
        assert shown.directory is not None
        return DatasetTree(shown.directory)

    # ---- attributes ------------------------------------------------------------------------------

    def _entry(self, found: Attributes) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino, entry.st_mode, entry.generation = found.inode, found.mode, found.generation
        entry.st_size = found.size_bytes
        if stat.S_ISREG(found.mode):
            entry.st_blocks = -(-found.size_bytes // DISK_BLOCK_BYTES)
        entry.st_uid, entry.st_gid = self._options.uid, self._options.gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = found.modified_ns
        entry.entry_timeout, entry.attr_timeout = found.entry_seconds, found.attribute_seconds
        return entry

    def _node(
        self, shown: ShownDataset, node: TreeNode, tree: DatasetTree | None = None
    ) -> EntryAttributes:
        """Return the attributes of a directory of a dataset, or with its tree also of a file."""
        found = self._lists.dataset(shown)
        if node.depth != DATASET_DEPTH:
            inode = pack(shown.number, *node)
            found = found._replace(inode=inode, entry_seconds=FOREVER_SECONDS)
        if node.depth == FILE_DEPTH and tree is not None:
            length, _ = tree.sample(node.sample_index)
            found = found._replace(mode=stat.S_IFREG | self._options.file_mode, size_bytes=length)
        return self._entry(found)

    # ---- requests by name or inode number --------------------------------------------------------

    @answers
    async def lookup(self, parent: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        """Find an entry of a directory, or by ``.`` and ``..`` what an NFS handle names."""
        if len(name) > COMPONENT_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        if self._lists.answers_for(parent, name):
            return self._entry(await self._lists.lookup(parent, name))
        shown, node = self._locate(parent)
        tree = await self._tree(shown)
        return self._node(shown, tree.child(node, name), tree)

    @answers
    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        """Return the attributes of a file or directory."""
        if self._lists.answers_for(inode):
            return self._entry(await self._lists.getattr(inode))
        shown, node = self._locate(inode)
        return self._node(shown, node, None if node.depth else await self._tree(shown))

    @answers
    async def readlink(self, _inode: int, _ctx: RequestContext) -> bytes:
        """Return the target of the link ``incoming``."""
        return self._lists.readlink()

    # ---- files, directories, and the file system -------------------------------------------------

    @answers
    async def open(self, inode: int, flags: int, _ctx: RequestContext) -> FileInfo:
        """Open a file for reading."""
        if flags & _WRITE_FLAGS:
            raise FUSEError(errno.EROFS)
        return FileInfo(fh=inode, keep_cache=True)

    @answers
    async def read(self, fh: int, off: int, size: int) -> Any:  # pyfuse3 accepts any buffer
        """Read from an open file; what is returned was verified."""
        shown, node = self._locate(fh)
        dataset, tree = await self._view.load(shown), await self._tree(shown)
        index = node.sample_index
        length, _ = tree.sample(index)
        size = max(0, min(size, length - off))
        shown.pin()
        try:
            if length > tree.chunk_bytes:
                return await self._samples.read_range(dataset, index, off, size)
            sample = await self._samples.read(fh, dataset, index, length)
            return memoryview(sample)[off : off + size]
        finally:
            shown.unpin()

    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        """Open a directory to list it."""
        return inode

    @answers
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """List a directory from a position on, until the kernel's buffer is full."""
        if self._lists.answers_for(fh):
            for name, found, position in await self._lists.listing(fh, start_id):
                if not pyfuse3.readdir_reply(token, name, self._entry(found), position):
                    return
            return
        shown, node = self._locate(fh)
        tree = await self._tree(shown)
        for child in tree.children(node, start_id):
            entry = self._node(shown, child.node, tree)
            if not pyfuse3.readdir_reply(token, child.name, entry, child.next_index):
                return

    @answers
    async def statfs(self, _ctx: RequestContext) -> pyfuse3.StatvfsData:
        """Return the space of the volumes and the number of samples shown."""
        space = await self._lists.statfs()
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
        if self._lists.answers_for(inode):
            return {}
        shown, node = self._locate(inode)
        xattrs = {b"user.dlfs.version": b"%d" % shown.info.version}
        if node.depth == FILE_DEPTH:
            _, crc = (await self._tree(shown)).sample(node.sample_index)
            xattrs[b"user.dlfs.index"] = b"%d" % node.sample_index
            xattrs[b"user.dlfs.crc32c"] = b"%08x" % crc
        return xattrs if node.depth <= DATASET_DEPTH else {}

    async def _refuse(self, *_args: object) -> NoReturn:
        """Refuse a change: the kernel does so itself, unless root has remounted for writing."""
        raise FUSEError(errno.EROFS)

    _refusal: Any = _refuse  # accepts the arguments of each handler
    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _refusal
    create = write = setxattr = removexattr = _refusal
