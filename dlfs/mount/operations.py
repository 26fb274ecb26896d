"""The handlers of the pyfuse3 server, which answer the kernel's requests as SEMANTICS.md says.

An inode number says which dataset and which file it belongs to (``inode_numbers``), so the server
remembers nothing of what the kernel uses: the handle of an open file or directory is its inode
number, and nothing is done when it is released or forgotten. Worker threads read samples and the
list of datasets; everything else is answered from memory. An exception of a handler becomes an
errno (``errnos``), and the mount goes on.

The **list directories** are those above the datasets: the root, and in a nested mount those of the
volumes. Their entries may change, so the kernel caches them for a second, and those of datasets
forever.

Threads: one, the FUSE loop (trio).

Source: pyfuse3 documentation, "Request handlers".
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext

from dlfs.format.constants import COMPONENT_BYTES_MAX
from dlfs.format.names import INCOMING as INCOMING_TEXT
from dlfs.mount.errnos import report_failure
from dlfs.mount.inode_numbers import DATASET_DEPTH, FILE_DEPTH, INCOMING, ROOT, pack, unpack
from dlfs.mount.mount_view import ROOT_DIRECTORY, MountView, Shown
from dlfs.mount.options import MountOptions
from dlfs.mount.sample_cache import SampleCache
from dlfs.mount.tree import TOP, DatasetTree, TreeNode
from dlfs.mount.view import ROOT_SECONDS, ShownDataset

FOREVER_SECONDS = 1e9
"""Cache timeout of attributes and names that never change, in seconds."""

COPIES_SHARE = 4
"""Copies of samples take a quarter of ``cache_bytes``, in addition to the samples' memory."""

INCOMING_NAME = INCOMING_TEXT.encode()

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
        self._started_ns = time.time_ns()
        self._positions: dict[bytes, int] = {}  # of names that were listed, from 1 on

    # ---- what an inode number stands for ---------------------------------------------------------

    def _list_number(self, inode: int) -> int | None:
        """Return the number of a list directory; None if the inode is none."""
        if inode == ROOT:
            return ROOT_DIRECTORY
        dataset, depth, _ = unpack(inode)
        return dataset if depth == DATASET_DEPTH and self._view.is_volume(dataset) else None

    def _locate(self, inode: int) -> tuple[ShownDataset, TreeNode]:
        """Return the dataset and the tree node of an inode number; StaleError after a removal."""
        dataset, *node = unpack(inode)
        return self._view.dataset(dataset), TreeNode(*node)

    async def _tree(self, shown: ShownDataset) -> DatasetTree:
        """Return the tree of a dataset, which is loaded if need be."""
        return DatasetTree((await self._view.load(shown)).directory)

    # ---- attributes ------------------------------------------------------------------------------

    def _unchanging(self, inode: int, mode: int, modified_ns: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = mode
        entry.entry_timeout = entry.attr_timeout = FOREVER_SECONDS
        entry.st_uid, entry.st_gid = self._options.uid, self._options.gid
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = modified_ns
        return entry

    def _incoming(self) -> EntryAttributes:
        """Return the attributes of the symbolic link ``incoming``."""
        entry = self._unchanging(INCOMING, stat.S_IFLNK | 0o777, self._started_ns)
        entry.st_size = len(os.fsencode(self._options.incoming or ""))
        return entry

    def _list_directory(self, number: int) -> EntryAttributes:
        """Return the attributes of a list directory."""
        inode = ROOT if number == ROOT_DIRECTORY else pack(number, DATASET_DEPTH, 0)
        mode = stat.S_IFDIR | self._options.directory_mode
        entry = self._unchanging(inode, mode, self._view.modified_ns(number) or self._started_ns)
        entry.generation = self._view.generation(number)
        entry.entry_timeout = entry.attr_timeout = ROOT_SECONDS
        return entry

    def _listed(self, found: Shown) -> EntryAttributes:
        """Return the attributes of the directory of a dataset or volume."""
        if isinstance(found, ShownDataset):
            return self._node(found, TOP)
        return self._list_directory(found.number)

    def _node(
        self, shown: ShownDataset, node: TreeNode, tree: DatasetTree | None = None
    ) -> EntryAttributes:
        """Return the attributes of a directory of a dataset, or with its tree also of a file."""
        mode = stat.S_IFDIR | self._options.directory_mode
        if node.depth == FILE_DEPTH:
            mode = stat.S_IFREG | self._options.file_mode
        entry = self._unchanging(pack(shown.number, *node), mode, shown.modified_ns)
        entry.generation = shown.generation
        if node.depth == DATASET_DEPTH:  # its name may stand for another version later
            entry.entry_timeout = ROOT_SECONDS
        if node.depth == FILE_DEPTH and tree is not None:
            entry.st_size, _ = tree.sample(node.sample_index)
            entry.st_blocks = -(-entry.st_size // DISK_BLOCK_BYTES)
        return entry

    # ---- requests by name or inode number --------------------------------------------------------

    @answers
    async def lookup(self, parent: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        """Find an entry of a directory, or by ``.`` and ``..`` what an NFS handle names."""
        if len(name) > COMPONENT_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        directory = self._list_number(parent)
        if directory is None:
            shown, node = self._locate(parent)
            if name == b".." and node == TOP:
                return self._list_directory(shown.volume.number)
            tree = await self._tree(shown)
            return self._node(shown, tree.child(node, name), tree)
        if name in (b".", b".."):
            return self._list_directory(directory if name == b"." else ROOT_DIRECTORY)
        if self._options.incoming is not None and name == INCOMING_NAME:
            return self._incoming()
        return self._listed(await self._view.child(name, directory))

    @answers
    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        """Return the attributes of a file or directory."""
        if inode == INCOMING:
            return self._incoming()
        directory = self._list_number(inode)
        if directory is not None:
            await self._view.refresh_soon(directory)
            return self._list_directory(directory)
        shown, node = self._locate(inode)
        return self._node(shown, node, None if node.depth else await self._tree(shown))

    @answers
    async def readlink(self, _inode: int, _ctx: RequestContext) -> bytes:
        """Return the target of the link ``incoming``."""
        return os.fsencode(self._options.incoming or "")

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
        loaded = await self._view.load(shown)
        index = node.sample_index
        length, _ = DatasetTree(loaded.directory).sample(index)
        size = max(0, min(size, length - off))
        shown.pin()
        try:
            if length > loaded.directory.chunk_bytes:
                return await self._samples.read_range(loaded.dataset, index, off, size)
            sample = await self._samples.read(fh, loaded.dataset, index, length)
            return memoryview(sample)[off : off + size]
        finally:
            shown.unpin()

    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        """Open a directory to list it."""
        return inode

    @answers
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """List a directory from a position on, until the kernel's buffer is full."""
        directory = self._list_number(fh)
        if directory is not None:
            await self._list_datasets(directory, start_id, token)
            return
        shown, node = self._locate(fh)
        tree = await self._tree(shown)
        for child in tree.children(node, start_id):
            entry = self._node(shown, child.node, tree)
            if not pyfuse3.readdir_reply(token, child.name, entry, child.next_index):
                return

    async def _list_datasets(self, directory: int, position: int, token: ReaddirToken) -> None:
        """List a list directory in the order of names, each of which keeps its position forever."""
        await self._view.refresh(directory)
        entries = {name: self._listed(found) for name, found in self._view.entries(directory)}
        if self._options.incoming is not None:
            entries[INCOMING_NAME] = self._incoming()
        last = list(self._positions)[position - 1] if position else b""
        for name in sorted(each for each in entries if each > last):
            number = self._positions.setdefault(name, len(self._positions) + 1)
            if not pyfuse3.readdir_reply(token, name, entries[name], number):
                return

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
        if inode == INCOMING or self._list_number(inode) is not None:
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
