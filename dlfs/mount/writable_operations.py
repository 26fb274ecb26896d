"""The handlers of a mount with ``incoming``: each request goes to the side it is for.

Everything that is sealed is answered as on a mount without it, only that the kernel does not refuse
changes by itself any more, so the refusals are ours. Neither side knows ``flush``: answered once
with ENOSYS, the kernel never asks again. A dataset whose own name is ``incoming`` is
reached as ``incoming@VERSION``.
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
from dlfs.mount.open_file_cache import HeldSamples
from dlfs.mount.operations import MountOperations
from dlfs.mount.permissions import Access
from dlfs.mount.view import VolumeView
from dlfs.staging.incoming import NAME, IncomingTree
from dlfs.staging.inode_numbers import ROOT, is_incoming
from dlfs.staging.open_files import OpenFiles
from dlfs.volume import Volume

_LOUD = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS})
"""What tells of a fault of the spool, not of the program that asked."""

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


async def _answer(
    handler: Callable[_P, Coroutine[Any, Any, _T]], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Run a handler of the incoming tree, and turn what it raises on purpose into an errno."""
    try:
        return await handler(*args, **kwargs)
    except (DlfsError, OSError, MemoryError) as error:
        number = errno_of(error)
        if number in _LOUD:
            _log.error("incoming: %s: %s", errno.errorcode.get(number, number), error)
        raise FUSEError(number) from error


def _by_number(name: str, of: Callable[[IncomingTree], Any] = lambda tree: tree) -> Any:
    """A handler that is chosen by its first argument: an inode, or a file handle."""
    sealed = getattr(MountOperations, name)

    @functools.wraps(sealed)
    async def handler(self: WritableOperations, number: int, *args: Any) -> Any:
        if is_incoming(number):
            return await _answer(getattr(of(self.incoming), name), number, *args)
        return await sealed(self, number, *args)

    return handler


def _files(tree: IncomingTree) -> OpenFiles:
    return tree.files


class WritableOperations(MountOperations):
    """Answers requests on one volume and on what is being written for it.

    Args:
        volume: borrowed.
        view: what of it is shown.
        held: reads samples.
        access: whom the sealed files belong to.
        incoming: what is being written; borrowed.

    Threads: the FUSE loop.
    """

    def __init__(
        self,
        volume: Volume,
        view: VolumeView,
        held: HeldSamples,
        access: Access,
        incoming: IncomingTree,
    ) -> None:
        super().__init__(volume, view, held, access)
        self.incoming = incoming
        incoming.on_gone = self._show

    def _show(self, name: bytes) -> None:
        """Have the root show a dataset that was just sealed."""
        self._view.expire()
        pyfuse3.invalidate_entry_async(ROOT, name, ignore_enoent=True)

    lookup = _by_number("lookup")
    getattr = _by_number("getattr")
    setattr = _by_number("setattr")
    readlink = _by_number("readlink")
    mknod = _by_number("mknod")
    mkdir = _by_number("mkdir")
    unlink = _by_number("unlink")
    rmdir = _by_number("rmdir")
    symlink = _by_number("symlink")
    open = _by_number("open")
    create = _by_number("create")
    read = _by_number("read", _files)
    write = _by_number("write", _files)
    release = _by_number("release", _files)
    fsync = _by_number("fsync", _files)
    opendir = _by_number("opendir")
    readdir = _by_number("readdir")
    releasedir = _by_number("releasedir")
    fsyncdir = _by_number("fsyncdir")
    setxattr = _by_number("setxattr")
    getxattr = _by_number("getxattr")
    listxattr = _by_number("listxattr")
    removexattr = _by_number("removexattr")

    async def rename(
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        """Rename, below ``incoming``; whatever is sealed stays where it is."""
        if not (is_incoming(parent_old) and is_incoming(parent_new)):
            raise FUSEError(errno.EROFS)
        await _answer(self.incoming.rename, parent_old, name_old, parent_new, name_new, flags, ctx)

    async def link(
        self, inode: int, new_parent: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Give a file below ``incoming`` one more name; a sealed one can only be copied there."""
        if not is_incoming(new_parent):
            raise FUSEError(errno.EROFS)
        if not is_incoming(inode):
            raise FUSEError(errno.EXDEV)
        return await _answer(self.incoming.link, inode, new_parent, new_name, ctx)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Note what the kernel no longer knows of the incoming tree."""
        await self.incoming.forget([pair for pair in inode_list if is_incoming(pair[0])])

    async def _root_child(self, name: bytes) -> EntryAttributes:
        if name != NAME:
            return await super()._root_child(name)
        return await _answer(self.incoming.root)

    async def _root_names(self) -> list[bytes]:
        return sorted({*await super()._root_names(), NAME})
