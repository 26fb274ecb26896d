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
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from dlfs.errors import DlfsError
from dlfs.mount.errnos import errno_of
from dlfs.mount.open_file_cache import OpenFileCache
from dlfs.mount.operations import MountOperations
from dlfs.mount.permissions import Ownership
from dlfs.mount.view import VolumeView
from dlfs.staging.incoming import NAME, IncomingTree
from dlfs.staging.inode_numbers import ROOT, is_incoming
from dlfs.staging.open_files import OpenFiles
from dlfs.volume import Volume

_LOGGED = frozenset(
    {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS}
)
"""Errnos that show a fault of the staging area rather than of the program; the server logs them."""

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


async def _answer(
    handler: Callable[_P, Coroutine[Any, Any, _T]], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Run a handler of the incoming tree; the errors that it may raise become an errno."""
    try:
        return await handler(*args, **kwargs)
    except (DlfsError, OSError, MemoryError) as error:
        number = errno_of(error)
        if number in _LOGGED:
            _log.error("incoming: %s: %s", errno.errorcode.get(number, number), error)
        raise FUSEError(number) from error


def _routed(name: str, target: Callable[[IncomingTree], Any] = lambda tree: tree) -> Any:
    """Make a handler that routes a request by its first argument, an inode or a file handle."""
    sealed = getattr(MountOperations, name)

    @functools.wraps(sealed)
    async def handler(self: WritableOperations, number: int, *args: Any) -> Any:
        if is_incoming(number):
            return await _answer(getattr(target(self.incoming), name), number, *args)
        return await sealed(self, number, *args)

    return handler


def _files(tree: IncomingTree) -> OpenFiles:
    return tree.files


class WritableOperations(MountOperations):
    """Answers requests on the sealed datasets of a volume and on its staging area.

    Args:
        volume: the volume; must outlive the mount.
        view: the sealed datasets that the mount shows.
        cache: reads samples of open files.
        ownership: owner and permissions of the sealed files.
        incoming: the tree of the staging area; must outlive the mount.
    """

    def __init__(
        self,
        volume: Volume,
        view: VolumeView,
        cache: OpenFileCache,
        ownership: Ownership,
        incoming: IncomingTree,
    ) -> None:
        super().__init__(volume, view, cache, ownership)
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
    read = _routed("read", _files)
    write = _routed("write", _files)
    release = _routed("release", _files)
    fsync = _routed("fsync", _files)
    opendir = _routed("opendir")
    readdir = _routed("readdir")
    releasedir = _routed("releasedir")
    fsyncdir = _routed("fsyncdir")
    setxattr = _routed("setxattr")
    getxattr = _routed("getxattr")
    listxattr = _routed("listxattr")
    removexattr = _routed("removexattr")

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
        await _answer(self.incoming.rename, parent_old, name_old, parent_new, name_new, flags, ctx)

    async def link(
        self, inode: int, new_parent: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Add a name to a file below ``incoming``; a sealed file can only be copied there."""
        if not is_incoming(new_parent):
            raise FUSEError(errno.EROFS)
        if not is_incoming(inode):
            raise FUSEError(errno.EXDEV)
        return await _answer(self.incoming.link, inode, new_parent, new_name, ctx)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Pass on the inodes of the incoming tree that the kernel has forgotten."""
        await self.incoming.forget([pair for pair in inode_list if is_incoming(pair[0])])

    async def _root_child(self, name: bytes) -> EntryAttributes:
        if name != NAME:
            return await super()._root_child(name)
        return await _answer(self.incoming.root)

    async def _root_names(self) -> list[bytes]:
        return sorted({*await super()._root_names(), NAME})
