"""The handlers of a mount with ``incoming``, which route each request to one of two sides.

One side, the sealed datasets, is answered as on a read-only mount (``operations``); but the kernel
no longer refuses changes itself, so the handlers do. The other side is the staging area. Neither
implements ``flush``: the kernel gets ENOSYS once and sends no more. A dataset whose own name is
``incoming`` is reached as ``incoming@VERSION``.

Threads: one, the FUSE loop (trio).
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from dlfs.mount.open_file_cache import OpenFileCache
from dlfs.mount.operations import MountOperations, answers
from dlfs.mount.options import MountOptions
from dlfs.mount.view import VolumeView
from dlfs.staging.incoming import NAME, IncomingTree
from dlfs.staging.inode_numbers import ROOT, is_incoming
from dlfs.volume import Volume

_answers = functools.partial(answers, in_staging=True)


def _routed(name: str, target: Callable[[IncomingTree], Any] = lambda tree: tree) -> Any:
    """Make a handler that routes a request by its first argument, an inode or a file handle."""
    sealed = getattr(MountOperations, name)

    @functools.wraps(sealed)
    async def handler(self: WritableOperations, number: int, *args: Any) -> Any:
        if is_incoming(number):
            return await getattr(target(self.incoming), name)(number, *args)
        return await sealed(self, number, *args)

    return _answers(handler)


class WritableOperations(MountOperations):
    """Answers requests on the sealed datasets of a volume and on its staging area.

    Args:
        volume: the volume; must outlive the mount.
        view: the sealed datasets that the mount shows.
        cache: reads samples of open files.
        options: options of the mount: owner and permissions of the sealed files.
        incoming: the tree of the staging area; must outlive the mount.
    """

    def __init__(
        self,
        volume: Volume,
        view: VolumeView,
        cache: OpenFileCache,
        options: MountOptions,
        incoming: IncomingTree,
    ) -> None:
        super().__init__(volume, view, cache, options)
        self.incoming = incoming
        incoming.on_gone = self._show

    def _show(self, name: bytes) -> None:
        """Make a dataset that was just sealed visible in the root."""
        self._view.expire()
        pyfuse3.invalidate_entry_async(ROOT, name, ignore_enoent=True)

    lookup = _routed("lookup")
    getattr = _routed("getattr")
    setattr = _routed("setattr")
    readlink = _routed("readlink")
    mknod = _routed("mknod")
    mkdir = _routed("mkdir")
    unlink = _routed("unlink")
    rmdir = _routed("rmdir")
    symlink = _routed("symlink")
    open = _routed("open")
    create = _routed("create")
    read = _routed("read", attrgetter("files"))
    write = _routed("write", attrgetter("files"))
    release = _routed("release", attrgetter("files"))
    fsync = _routed("fsync", attrgetter("files"))
    opendir = _routed("opendir")
    readdir = _routed("readdir")
    releasedir = _routed("releasedir")
    fsyncdir = _routed("fsyncdir")
    setxattr = _routed("setxattr")
    getxattr = _routed("getxattr")
    listxattr = _routed("listxattr")
    removexattr = _routed("removexattr")

    @_answers
    async def rename(
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Rename an entry below ``incoming``; sealed entries cannot be renamed."""
        if not (is_incoming(parent_old) and is_incoming(parent_new)):
            raise FUSEError(errno.EROFS)
        await self.incoming.rename(parent_old, name_old, parent_new, name_new, flags, ctx)

    @_answers
    async def link(
        self, inode: int, new_parent: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Add a name to a file below ``incoming``; a sealed file can only be copied there."""
        if not is_incoming(new_parent):
            raise FUSEError(errno.EROFS)
        if not is_incoming(inode):
            raise FUSEError(errno.EXDEV)
        return await self.incoming.link(inode, new_parent, new_name, ctx)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Pass on the inodes of the incoming tree that the kernel has forgotten."""
        await self.incoming.forget([pair for pair in inode_list if is_incoming(pair[0])])

    async def _root_child(self, name: bytes) -> EntryAttributes:
        if name != NAME:
            return await super()._root_child(name)
        return await self.incoming.root()

    async def _root_names(self) -> list[bytes]:
        return sorted({*await super()._root_names(), NAME})
