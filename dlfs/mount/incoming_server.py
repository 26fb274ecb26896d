"""The server of ``incoming``: a file system of its own, mounted over a directory of the sealed one.

It answers the kernel's requests (``dlfs.staging.wire``) from the staging area
(``dlfs.staging.incoming``). Where the kernel permits it, reads and writes of open files do not come
here: the kernel passes them through to the files of the staging area. That needs Linux 6.9 and
CAP_SYS_ADMIN.

The sealed file system shows ``incoming`` as an empty directory, over which this one is mounted; so
an unmount of the whole tree (``umount --lazy``) takes both. For a user other than root, fusermount3
may not enter that file system. Then ``incoming`` is a symbolic link to the mount point, which is a
directory of the staging area.

Threads: the trio loop answers; system calls on the staging area run in worker threads, and so does
all that waits for the sealed file system, which the same process may serve.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Awaitable, Callable

import trio

from dlfs.format.names import INCOMING
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.errnos import report_failure
from dlfs.mount.options import FILE_SYSTEM_NAME, MountOptions
from dlfs.staging import wire
from dlfs.staging.entries import refusal
from dlfs.staging.incoming import IncomingTree, open_incoming
from dlfs.staging.inode_numbers import ROOT
from dlfs.staging.wire import Listing, Request
from dlfs.volume import Volume

_UNANSWERED = (wire.FORGET, wire.BATCH_FORGET)
_UNMOUNTED = (errno.ENODEV, errno.ECONNABORTED)
_NOTHING = (errno.EAGAIN, errno.EINTR, errno.ENOENT)
"""Errnos of a read that finds no request, or one that was interrupted."""

_log = logging.getLogger(__name__)


def link_target(options: MountOptions) -> str | None:
    """Return what ``incoming`` is a symbolic link to; None if it is a directory to mount over."""
    if options.incoming is None or os.geteuid() == 0:
        return None
    return os.path.join(options.incoming, "mount")


async def serve_incoming(
    volume: Volume,
    path: str,
    options: MountOptions,
    on_ready: Callable[[], None],
    on_gone: Callable[[], None],
) -> None:
    """Mount the staging area, and answer until it is unmounted or the call is cancelled.

    Args:
        volume: the volume into which datasets are sealed; must outlive the call.
        path: mount point of the sealed datasets, which must answer.
        options: options of the mount.
        on_ready: called when the mount answers.
        on_gone: called when a dataset was sealed or discarded.

    Raises:
        LockedError: another server uses the staging area.
        UsageError: it belongs to another volume or user.
        DeviceError: it cannot be read, or the system refused the mount.
    """
    assert options.incoming is not None
    link = link_target(options)
    point = os.path.join(path, INCOMING) if link is None else link
    await trio.to_thread.run_sync(_detach_dead, point)
    with contextlib.ExitStack() as stack:
        opening = open_incoming(volume, options.incoming)
        tree = await trio.to_thread.run_sync(stack.enter_context, opening)
        if link is not None:
            os.makedirs(link, exist_ok=True)
            stack.callback(detach_link, options)
        mount = functools.partial(mountpoints.mount_file_system, point, _kernel_options(options))
        kernel = await trio.to_thread.run_sync(mount)
        stack.callback(os.close, kernel)
        server = IncomingServer(tree, kernel, point, on_gone, pass_through=options.pass_through)
        await server.serve(on_ready)


def detach_link(options: MountOptions) -> None:
    """Detach the mount that ``incoming`` is a link to, if there is one."""
    link = link_target(options)
    if link is not None and mountpoints.record_of(link) is not None:
        mountpoints.detach(link)


def _detach_dead(point: str) -> None:
    """Detach the mount that a dead server has left there."""
    record = mountpoints.record_of(point)
    if record is not None and record.file_system_type == mountpoints.INCOMING_TYPE:
        mountpoints.detach(point)


def _kernel_options(options: MountOptions) -> list[str]:
    words = ["default_permissions", f"fsname={FILE_SYSTEM_NAME}"]
    words.append("subtype=" + mountpoints.INCOMING_TYPE.removeprefix("fuse."))
    return words + (["allow_other"] if options.allow_other else [])


def _write_and_close(descriptor: int, message: bytes) -> None:
    try:
        with contextlib.suppress(OSError):  # the kernel does not know the name
            os.write(descriptor, message)
    finally:
        os.close(descriptor)


class IncomingServer:
    """Answers the requests of one mount of the staging area.

    Args:
        tree: the staging area; must outlive the server.
        kernel: descriptor of /dev/fuse; stays the caller's.
        path: the mount point.
        on_gone: called when a dataset was sealed or discarded.
        pass_through: have the kernel pass reads and writes through, if it can.
    """

    def __init__(
        self,
        tree: IncomingTree,
        kernel: int,
        path: str,
        on_gone: Callable[[], None],
        *,
        pass_through: bool,
    ) -> None:
        self._tree = tree
        self._kernel = kernel
        self._path = path
        self._on_gone = on_gone
        self._pass_through = pass_through
        self._buffer = bytearray(wire.REQUEST_BYTES_MAX)
        self._nursery: trio.Nursery | None = None
        self._ended = False
        tree.on_gone = self._note_gone
        self._handlers: dict[int, Callable[[Request], Awaitable[bytes]]] = {
            wire.INIT: self._init,
            wire.DESTROY: self._destroy,
            wire.FORGET: self._forget,
            wire.BATCH_FORGET: self._forget_batch,
            wire.STATFS: self._statfs,
            wire.LOOKUP: self._lookup,
            wire.GETATTR: self._getattr,
            wire.SETATTR: self._setattr,
            wire.READLINK: self._readlink,
            wire.SYMLINK: self._symlink,
            wire.MKNOD: self._mknod,
            wire.MKDIR: self._mkdir,
            wire.UNLINK: self._unlink,
            wire.RMDIR: self._rmdir,
            wire.RENAME: self._rename,
            wire.RENAME2: self._rename2,
            wire.LINK: self._link,
            wire.OPEN: self._open,
            wire.CREATE: self._create,
            wire.READ: self._read,
            wire.WRITE: self._write,
            wire.RELEASE: self._release,
            wire.FSYNC: self._fsync,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.READDIRPLUS: self._readdir,
            wire.RELEASEDIR: self._releasedir,
            wire.FSYNCDIR: self._fsyncdir,
            wire.GETXATTR: self._getxattr,
            wire.LISTXATTR: self._listxattr,
            wire.SETXATTR: self._setxattr,
            wire.REMOVEXATTR: self._removexattr,
        }

    # ---- the loop --------------------------------------------------------------------------------

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Answer until the mount is gone, and seal datasets meanwhile."""
        os.set_blocking(self._kernel, False)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._tree.sealer.run)
            nursery.start_soon(self._report_ready, on_ready)
            while not self._ended:
                await trio.lowlevel.wait_readable(self._kernel)
                request = self._receive()
                if request is not None:
                    nursery.start_soon(self._answer, request)
            nursery.cancel_scope.cancel()

    async def _report_ready(self, on_ready: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(os.stat, self._path, abandon_on_cancel=True)
        on_ready()

    def _receive(self) -> Request | None:
        """Read a request, if there is one, or note that the file system was unmounted."""
        try:
            count = os.readv(self._kernel, [self._buffer])
        except OSError as error:
            self._ended = error.errno in _UNMOUNTED
            if not self._ended and error.errno not in _NOTHING:
                raise
            return None
        return Request.decode(bytes(memoryview(self._buffer)[:count]))

    async def _answer(self, request: Request) -> None:
        code, body = 0, b""
        handler = self._handlers.get(request.kind)
        try:
            if handler is None:
                code = errno.ENOSYS  # the kernel sends no more of that kind
            else:
                body = await handler(request)
        except Exception as error:  # noqa: BLE001
            code = report_failure(error, in_staging=True)
        if request.kind not in _UNANSWERED:
            # It fails if the program or the mount is gone.
            with contextlib.suppress(OSError):
                os.writev(self._kernel, [wire.reply_header(request.number, code, body), body])

    def _note_gone(self, name: bytes) -> None:
        """Have the kernel forget a dataset that has left the staging area."""
        self._on_gone()
        if self._nursery is not None:
            self._nursery.start_soon(self._notify, wire.entry_is_gone(ROOT, name))

    async def _notify(self, message: bytes) -> None:
        """Notify the kernel, which may wait for a program that waits for an answer."""
        kernel = os.dup(self._kernel)  # which this server may close meanwhile
        notify = functools.partial(_write_and_close, kernel, message)
        await trio.to_thread.run_sync(notify, abandon_on_cancel=True)

    # ---- the file system -------------------------------------------------------------------------

    async def _init(self, request: Request) -> bytes:
        body, passed = wire.init(request, pass_through=self._pass_through)
        if not body:
            raise refusal(errno.EPROTO)
        if passed:
            self._tree.files.backing = wire.Backing(self._kernel)
        return body

    async def _destroy(self, _request: Request) -> bytes:
        return b""

    async def _forget(self, request: Request) -> bytes:
        self._tree.forget(request.node, *wire.NODE_IN.unpack_from(request.body))
        return b""

    async def _forget_batch(self, request: Request) -> bytes:
        count, _ = wire.PAIR_IN.unpack_from(request.body)
        for index in range(count):
            start = wire.PAIR_IN.size + index * wire.FORGET_IN.size
            self._tree.forget(*wire.FORGET_IN.unpack_from(request.body, start))
        return b""

    async def _statfs(self, _request: Request) -> bytes:
        return wire.space(self._tree.space())

    # ---- names and attributes --------------------------------------------------------------------

    async def _lookup(self, request: Request) -> bytes:
        return wire.entry(await self._tree.lookup(request.node, request.names()[0]))

    async def _getattr(self, request: Request) -> bytes:
        return wire.attributes(await self._tree.getattr(request.node))

    async def _setattr(self, request: Request) -> bytes:
        return wire.attributes(await self._tree.setattr(request.node, *request.change()))

    async def _readlink(self, request: Request) -> bytes:
        return await self._tree.readlink(request.node)

    async def _symlink(self, request: Request) -> bytes:
        name, target, _ = request.names()
        made = await self._tree.symlink(request.node, name, target, request.caller)
        return wire.entry(made)

    async def _mknod(self, request: Request) -> bytes:
        mode, _, _, _ = wire.MKNOD_IN.unpack_from(request.body)
        name = request.names(wire.MKNOD_IN.size)[0]
        return wire.entry(await self._tree.mknod(request.node, name, mode, request.caller))

    async def _mkdir(self, request: Request) -> bytes:
        mode, _ = wire.PAIR_IN.unpack_from(request.body)
        name = request.names(wire.PAIR_IN.size)[0]
        return wire.entry(await self._tree.mkdir(request.node, name, mode, request.caller))

    async def _unlink(self, request: Request) -> bytes:
        await self._tree.unlink(request.node, request.names()[0])
        return b""

    async def _rmdir(self, request: Request) -> bytes:
        await self._tree.rmdir(request.node, request.names()[0])
        return b""

    async def _rename(self, request: Request) -> bytes:
        (parent,) = wire.NODE_IN.unpack_from(request.body)
        old, new, _ = request.names(wire.NODE_IN.size)
        await self._tree.rename(request.node, old, parent, new, 0)
        return b""

    async def _rename2(self, request: Request) -> bytes:
        parent, flags, _ = wire.RENAME2_IN.unpack_from(request.body)
        old, new, _ = request.names(wire.RENAME2_IN.size)
        await self._tree.rename(request.node, old, parent, new, flags)
        return b""

    async def _link(self, request: Request) -> bytes:
        (node,) = wire.NODE_IN.unpack_from(request.body)
        name = request.names(wire.NODE_IN.size)[0]
        return wire.entry(await self._tree.link(node, request.node, name))

    # ---- files -----------------------------------------------------------------------------------

    async def _open(self, request: Request) -> bytes:
        flags, more = wire.PAIR_IN.unpack_from(request.body)
        clears = bool(more & wire.OPEN_CLEARS_IDS)
        return wire.opened(await self._tree.open(request.node, flags, clears_ids=clears))

    async def _create(self, request: Request) -> bytes:
        flags, mode, _, more = wire.CREATE_IN.unpack_from(request.body)
        name = request.names(wire.CREATE_IN.size)[0]
        clears = bool(more & wire.OPEN_CLEARS_IDS)
        made, found = await self._tree.create(
            request.node, name, mode, flags, request.caller, clears_ids=clears
        )
        return wire.entry(found) + wire.opened(made)

    async def _read(self, request: Request) -> bytes:
        handle, offset, size, *_ = wire.TRANSFER_IN.unpack_from(request.body)
        return await self._tree.files.read(handle, offset, size)

    async def _write(self, request: Request) -> bytes:
        handle, offset, size, flags, *_ = wire.TRANSFER_IN.unpack_from(request.body)
        data = memoryview(request.body)[wire.TRANSFER_IN.size :][:size]
        clears = bool(flags & wire.WRITE_CLEARS_IDS)
        return wire.size(await self._tree.files.write(handle, offset, data, clears_ids=clears))

    async def _release(self, request: Request) -> bytes:
        await self._tree.files.release(wire.HANDLE_IN.unpack_from(request.body)[0])
        return b""

    async def _fsync(self, request: Request) -> bytes:
        handle, flags = wire.HANDLE_IN.unpack_from(request.body)
        await self._tree.files.fsync(handle, bool(flags & 1))
        return b""

    # ---- directories -----------------------------------------------------------------------------

    async def _opendir(self, request: Request) -> bytes:
        return wire.opened(wire.Opened(await self._tree.opendir(request.node)))

    async def _readdir(self, request: Request) -> bytes:
        handle, position, size, *_ = wire.TRANSFER_IN.unpack_from(request.body)
        listing = Listing(size, plus=request.kind == wire.READDIRPLUS)
        await self._tree.readdir(handle, position, listing)
        return listing.encode()

    async def _releasedir(self, request: Request) -> bytes:
        await self._tree.releasedir(wire.HANDLE_IN.unpack_from(request.body)[0])
        return b""

    async def _fsyncdir(self, request: Request) -> bytes:
        await self._tree.fsyncdir(wire.HANDLE_IN.unpack_from(request.body)[0], False)
        return b""

    # ---- extended attributes ---------------------------------------------------------------------

    async def _getxattr(self, request: Request) -> bytes:
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        name = request.names(wire.PAIR_IN.size)[0]
        value = await self._tree.getxattr(request.node, name)
        if not size:
            return wire.size(len(value))
        if size < len(value):
            raise refusal(errno.ERANGE)
        return value

    async def _listxattr(self, request: Request) -> bytes:
        """Return no names: a program that copies attributes must not copy these."""
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        return b"" if size else wire.size(0)

    async def _setxattr(self, request: Request) -> bytes:
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        name, _, value = request.body[wire.PAIR_IN.size :].partition(b"\0")
        await self._tree.setxattr(request.node, name, value[:size])
        return b""

    async def _removexattr(self, _request: Request) -> bytes:
        raise refusal(errno.ENODATA)
