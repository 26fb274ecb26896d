"""The native server of a mount: libdlfs_fuse answers the kernel, this module answers its upcalls.

A sealed dataset never changes, so the C library answers everything below it from its directory and
reader. By upcalls it requests here what it does not know: requests of the kernel for what lies
above the datasets, which ``ListDirectories`` answers as for the pyfuse3 server, and why a sample
cannot be read. About one upcall a second is usual, in a mount of several volumes one for each that
is used; there is none per file.

A dataset that was removed is withdrawn from the library, and closed when no request uses it. When
the samples of a dataset were moved, the library gets another reader of them, and reads again what
the one before could not read.

Requests come over io_uring if the kernel offers it, and through /dev/fuse otherwise.

Threads: those of libdlfs_fuse answer the kernel. One worker thread runs its loop and one waits for
upcalls, which trio tasks answer. The end waits for requests under way, so a device that hangs
delays it up to the reader's timeout; the mount itself is gone by then.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from dlfs._native import fuse as native
from dlfs._native.batch import failure_of
from dlfs._native.reader import NativeReader
from dlfs.dataset.dataset import Dataset
from dlfs.errors import ClosedError, DlfsError, NativeError, NotFoundError
from dlfs.mount import kernel_replies as replies
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.descriptors import INIT_BYTES_MAX, is_connected
from dlfs.mount.errnos import report_failure
from dlfs.mount.list_directories import ListDirectories
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import DEVICE_TRANSPORT, URING_TRANSPORT, MountOptions, OnReady
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.view import ShownDataset
from dlfs.reader import MovedError, SampleReader

THREADS_MAX = 32
"""Most threads that answer the kernel, and so most reads that wait for devices at a time."""

NESTED_THREADS_MAX = 128
"""The same where a mount has several volumes: those that wait for the devices of one volume leave
threads for the others."""

CACHE_SECONDS = 10.0
"""Time after its last use at which a sample leaves the open-file cache, in seconds."""

READ_AHEAD_KIB = 1024
"""Read-ahead of the kernel on the mount, in KiB; also its largest read request."""

DEVICES = Path("/sys/class/bdi")
"""Folder with the kernel's settings for the device of each file system."""

_NO_URING = {
    errno.EOPNOTSUPP: "the kernel does not offer io_uring (Linux 6.14 with fuse.enable_uring does)",
    errno.ECANCELED: "io_uring is switched off",
    errno.EPERM: "io_uring is not permitted",
}
"""Why requests come through /dev/fuse, by the errno of ``NativeFuse.uring_queues``."""

_BEGIN_SECONDS = 0.002
_UPKEEP_SECONDS = 1.0
_UPCALL_SECONDS = 60.0
_STOP_SECONDS = 1.0  # for requests under way; then the mount is detached without them
_STOP_RETRY_SECONDS = 0.1

_log = logging.getLogger(__name__)


class NativeMount:
    """A mount that the native server answers.

    Args:
        view: what the mount shows.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount. Busy polling is off on a single processor, where it would
            delay the client.
        inherited: the mount, if a keeper makes it.

    Threads: the trio loop.
    """

    _fuse: native.NativeFuse
    _device: str | None

    def __init__(
        self,
        view: MountView,
        path: str,
        options: MountOptions,
        inherited: InheritedMount | None = None,
    ) -> None:
        self._view = view
        self._path = path
        self._options = options
        self._inherited = inherited
        self._kernel = -1  # descriptor of /dev/fuse, if no keeper has it
        self._answered = inherited is not None and inherited.resumed  # by this server or one before
        self._lists = ListDirectories(view, options, resumed=self._answered)
        self._ended = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._readers: dict[int, SampleReader] = {}  # that the library uses, by dataset number
        self._handlers: dict[int, Callable[[native.Upcall], Awaitable[bytes]]] = {
            replies.LOOKUP: self._look_up,
            replies.GETATTR: self._getattr,
            replies.READLINK: self._readlink,
            replies.READDIR: self._readdir,
            replies.READDIRPLUS: self._readdir,
            replies.STATFS: self._statfs,
            native.UPCALL_OPEN_DATASET: self._open_dataset,
            native.UPCALL_REPORT_FAILURE: self._report_failure,
        }

    async def serve(self, on_ready: OnReady) -> None:
        """Answer until the mount is unmounted; unmount it when cancelled.

        Args:
            on_ready: called with the path and the transport when the mount answers.

        Raises:
            NativeError: libdlfs_fuse is not available.
            DeviceError: the system refused the mount; the loop failed.
        """
        try:
            await self._prepare()
            await self._mount()
            await self._answer_kernel(on_ready)
        finally:
            self._view.close()

    async def _prepare(self) -> None:
        """Restore the datasets that earlier servers have shown.

        Datasets that the server to be replaced has loaded are loaded here, while it answers.
        """
        if self._inherited is None or not self._inherited.resumed:
            return
        loaded = self._inherited.numbers.loaded() if self._inherited.replaces else set()
        async with trio.open_nursery() as nursery:
            for shown in await self._view.restore():
                if isinstance(shown, ShownDataset) and shown.number in loaded:
                    nursery.start_soon(self._preload, shown)

    async def _preload(self, dataset: ShownDataset) -> None:
        try:
            await self._view.load(dataset)
        except DlfsError as error:  # the first request for it tries again
            _log.warning("load dataset %r: %s", dataset.info.name, error)

    async def _mount(self) -> None:
        """Mount the file system, or take over the one that the keeper has mounted."""
        inherited = self._inherited
        native.fuse_library()  # before anything is mounted
        connect = self._connect if inherited is None else inherited.connect
        connection = await trio.to_thread.run_sync(connect, abandon_on_cancel=inherited is not None)
        try:
            self._create(connection)
        except BaseException:
            if inherited is None:
                mountpoints.detach(self._path)
                os.close(self._kernel)
            raise

    def _create(self, connection: native.KernelConnection) -> None:
        inherited, options = self._inherited, self._options
        self._fuse = native.NativeFuse(
            connection,
            uid=options.uid,
            gid=options.gid,
            file_mode=options.file_mode,
            threads_max=NESTED_THREADS_MAX if self._view.nested else THREADS_MAX,
            busy_poll_us=options.busy_poll_us if len(os.sched_getaffinity(0)) > 1 else 0,
            uring=options.uring and inherited is None,
        )
        self._record = inherited.record if inherited is not None else None
        if self._record is None and (inherited is None or inherited.is_visible):
            self._record = mountpoints.record_of(self._path)
        self._device = None if self._record is None else self._record.device

    def _is_here(self) -> bool:
        """Return True if the mount is at its path. False where another process mounted it."""
        return self._device is not None and mountpoints.device_of(self._path) == self._device

    def _connect(self) -> native.KernelConnection:
        """Mount the file system."""
        self._kernel = mountpoints.mount_file_system(self._path, self._options.for_kernel())
        init = os.read(self._kernel, INIT_BYTES_MAX)
        return native.KernelConnection(self._kernel, init, keeper=False, resumed=False)

    async def _answer_kernel(self, on_ready: OnReady) -> None:
        """Answer until the mount is unmounted; unmount it when cancelled."""
        failed = False
        try:
            self._view.server = self
            for number, shown in enumerate(await self._view.restore(), 1):
                if shown is None or shown.removed:
                    self._fuse.withdraw_dataset(number)
                elif isinstance(shown, ShownDataset):
                    self.add(shown)
                    if shown.loaded is not None:
                        self._attach(shown, shown.loaded)
            async with trio.open_nursery() as nursery:
                self._nursery = self._view.nursery = nursery
                for task in (
                    self._fetch_upcalls,
                    self._keep_up,
                    self._view.keep_current,
                    self._stop_when_cancelled,
                ):
                    nursery.start_soon(task)
                nursery.start_soon(self._report_ready, on_ready)
                try:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(self._fuse.run)
                finally:
                    self._view.nursery = None
                    self._ended.set()
                    nursery.cancel_scope.cancel()
        except Exception:
            failed = True
            raise
        finally:
            self._view.server = None
            if self._is_here():
                # An aborted mount stays, and fails; a keeper starts another server after a failure.
                if self._inherited is None:
                    ends = is_connected(self._kernel)
                else:
                    ends = not (failed and self._answered)
                if ends:
                    mountpoints.detach(self._path)
            elif self._inherited is None and self._record is not None:
                mountpoints.detach_moved(self._record)  # the keeper does it otherwise
            self._fuse.close()
            if self._kernel >= 0:
                os.close(self._kernel)

    async def _report_ready(self, on_ready: OnReady) -> None:
        if self._device is not None:
            await trio.to_thread.run_sync(
                widen_read_ahead, self._path, self._device, abandon_on_cancel=True
            )
        while (queues := self._fuse.uring_queues()) == -errno.EINPROGRESS:
            await trio.sleep(_BEGIN_SECONDS)
        self._answered = True
        on_ready(self._path, URING_TRANSPORT if queues > 0 else DEVICE_TRANSPORT)
        if queues > 0:
            _log.info("%s: requests come over io_uring, in %d queues", self._path, queues)
        else:
            reason = _NO_URING.get(-queues, f"io_uring: {os.strerror(-queues)}")
            _log.info("%s: requests come through /dev/fuse: %s", self._path, reason)

    async def _stop_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_STOP_SECONDS):
                    await self._stop()
                # If the mount has moved with a directory above it, another may be there.
                if not self._ended.is_set() and self._is_here():
                    _log.warning("%s: detached while requests are under way", self._path)
                    with contextlib.suppress(DlfsError, OSError):
                        await trio.to_thread.run_sync(mountpoints.detach, self._path)
                    await self._stop()

    async def _stop(self) -> None:
        """Stop the loop and wait for its end."""
        while not self._ended.is_set():
            await trio.to_thread.run_sync(self._fuse.stop)
            with trio.move_on_after(_STOP_RETRY_SECONDS):
                await self._ended.wait()

    # ---- upcalls ---------------------------------------------------------------------------------

    async def _fetch_upcalls(self) -> None:
        assert self._nursery is not None
        while True:
            try:
                upcall = await trio.to_thread.run_sync(self._fuse.next_upcall, _UPCALL_SECONDS)
            except ClosedError:
                return  # unmounted
            if upcall is not None:
                self._nursery.start_soon(self._answer, upcall)

    async def _answer(self, upcall: native.Upcall) -> None:
        try:
            data = await self._handlers[upcall.kind](upcall)
        except Exception as error:  # noqa: BLE001
            self._fuse.reply(upcall.id, error=report_failure(error))
        else:
            self._fuse.reply(upcall.id, data)

    async def _look_up(self, upcall: native.Upcall) -> bytes:
        try:
            found = await self._lists.lookup(upcall.inode, upcall.name)
        except NotFoundError:
            return replies.of_no_entry()
        return replies.of_entry(found, self._options)

    async def _getattr(self, upcall: native.Upcall) -> bytes:
        return replies.of_attributes(await self._lists.getattr(upcall.inode), self._options)

    async def _readlink(self, _upcall: native.Upcall) -> bytes:
        return self._lists.readlink()

    async def _readdir(self, upcall: native.Upcall) -> bytes:
        entries = await self._lists.listing(upcall.inode, upcall.offset)
        plus = upcall.kind == replies.READDIRPLUS
        return replies.of_listing(entries, self._options, size=upcall.size, plus=plus)

    async def _statfs(self, upcall: native.Upcall) -> bytes:
        return replies.of_space(await self._lists.statfs(upcall.inode))

    async def _open_dataset(self, upcall: native.Upcall) -> bytes:
        dataset = self._view.dataset(upcall.dataset)
        loaded = await self._view.load(dataset)
        if not dataset.pin_count:
            self._attach(dataset, loaded)
        return b""

    async def _report_failure(self, upcall: native.Upcall) -> bytes:
        """Raise the error of a failure, which logs it, unless there is another reader now."""
        dataset = self._view.dataset(upcall.dataset)
        failure, reader = failure_of(upcall.failure), self._readers[dataset.number]
        present = self._fuse.reader_number(dataset.number)
        if upcall.reader not in (present, native.NO_READER):
            return b""
        if failure.member == native.NO_MEMBER:
            error = await trio.to_thread.run_sync(reader.explain_code, failure.code)
        else:
            error = await trio.to_thread.run_sync(reader.explain, failure)
        if not isinstance(error, MovedError) or upcall.reader == native.NO_READER:
            raise error
        await self._follow(dataset, reader)
        return b""

    async def _follow(self, dataset: ShownDataset, moved: SampleReader) -> None:
        """Have the library read a dataset by another reader than one whose samples were moved.

        Raises:
            StaleError: the dataset was removed.
            DlfsError: it cannot be opened again.
        """
        loaded = await self._view.load(dataset)
        self._view.dataset(dataset.number)  # its withdrawal has the lock, and waits for this upcall
        async with dataset.load_lock:
            if self._readers[dataset.number] is not moved:
                return  # another task has replaced it
            session = await trio.to_thread.run_sync(lambda: loaded.session)
            reader = session.reader
            replace = functools.partial(
                self._fuse.replace_reader, dataset.number, _native_reader(reader)
            )
            await trio.to_thread.run_sync(replace)
            self._readers[dataset.number] = reader
        _log.info("dataset %r was moved, and is read where it is now", dataset.info.name)

    # ---- datasets --------------------------------------------------------------------------------

    def add(self, dataset: ShownDataset) -> None:
        """Have the library know a dataset that is shown for the first time."""
        self._fuse.add_dataset(
            dataset.number,
            version=dataset.info.version,
            generation=dataset.generation,
            modified_ns=dataset.modified_ns,
        )

    def _attach(self, dataset: ShownDataset, loaded: Dataset) -> None:
        """Have the library read a loaded dataset."""
        reader = loaded.session.reader
        self._fuse.open_dataset(dataset.number, loaded.directory, _native_reader(reader))
        self._readers[dataset.number] = reader
        dataset.pin()  # until it is withdrawn
        if self._inherited is not None:
            self._inherited.numbers.set_loaded(dataset.number)

    async def withdraw(self, dataset: ShownDataset) -> None:
        """Stop using a dataset that was removed."""
        async with dataset.load_lock:
            await trio.to_thread.run_sync(self._fuse.withdraw_dataset, dataset.number)
        self._readers.pop(dataset.number, None)
        if dataset.pin_count:
            dataset.unpin()

    async def _keep_up(self) -> None:
        """Free memory after a time without use, follow datasets, and log members that were lost."""
        assert self._nursery is not None
        while True:
            await trio.sleep(_UPKEEP_SECONDS)
            self._fuse.expire_cache(CACHE_SECONDS)
            for number, reader in list(self._readers.items()):
                dataset = self._view.shown(number)
                assert isinstance(dataset, ShownDataset)
                if dataset.removed or dataset.load_lock.locked():
                    continue
                self._fuse.release_replaced(number)
                reader.watch_members()
                if reader.moved:
                    self._nursery.start_soon(self._follow_soon, dataset, reader)

    async def _follow_soon(self, dataset: ShownDataset, moved: SampleReader) -> None:
        with contextlib.suppress(DlfsError):  # the next read, or upkeep, tries again
            await self._follow(dataset, moved)


def _native_reader(reader: SampleReader) -> NativeReader:
    if not isinstance(reader.native, NativeReader):
        raise NativeError(
            "serve a dataset: expected its devices in this process; use --fuse=pyfuse3"
        )
    return reader.native


def widen_read_ahead(path: str, device: str) -> None:
    """Set the kernel's read-ahead on the mount to the largest request, if the system permits it.

    The kernel chooses a width of its own before it answers the first request, so this first sends
    one to the mount. It must therefore not run on the thread that answers upcalls. Another process
    sends it: a server that waits for its own answer could not die, and so not be replaced. If
    another file system is mounted there meanwhile, its setting stays.

    Args:
        path: the mount point.
        device: what ``mountpoint.device_of`` returned when the mount was made.
    """
    command = ["stat", "--format=%d", "--", path]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found = int(subprocess.run(command, capture_output=True, check=True).stdout)
        if f"{os.major(found)}:{os.minor(found)}" == device:
            (DEVICES / device / "read_ahead_kb").write_text(str(READ_AHEAD_KIB))
