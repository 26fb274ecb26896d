"""The pyfuse3 server of a mount: the plain reference.

One thread runs the FUSE loop (trio) and every handler; samples and metadata of the volume are read
in worker threads. A mount that ends goes away at once, even if files on it are open: programs that
still use them get ENOTCONN.
"""

from __future__ import annotations

import contextlib
import os

import pyfuse3
import trio

from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.inode_numbers import ROOT
from dlfs.mount.mount_view import MountView, Shown
from dlfs.mount.open_file_cache import OpenFileCache
from dlfs.mount.operations import MountOperations
from dlfs.mount.options import DEVICE_TRANSPORT, MountOptions, OnReady
from dlfs.mount.view import ShownDataset

OPEN_FILES_SHARE = 4
"""Copies of open files take a quarter of ``cache_bytes``, in addition to the samples' memory."""


class Pyfuse3Mount:
    """A mount that the pyfuse3 server answers.

    Args:
        view: what the mount shows.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.

    Threads: the trio loop; one mount in a process.
    """

    def __init__(self, view: MountView, path: str, options: MountOptions) -> None:
        self._view = view
        self._path = path
        self._options = options
        self._cache: OpenFileCache | None = None

    def on_removed(self, dataset: ShownDataset) -> None:
        """Do nothing: a removed dataset stays until no file is open on it."""

    async def forget_name(self, name: bytes) -> None:
        """Have the kernel forget a name in the root, whose listing it does not cache."""
        with contextlib.suppress(FileNotFoundError):  # the kernel knows nothing of it
            await trio.to_thread.run_sync(pyfuse3.invalidate_entry, ROOT, name)

    async def withdraw(self, shown: Shown) -> None:
        """Stop using a dataset or a directory of a volume that was removed from the mount."""
        if isinstance(shown, ShownDataset) and self._cache is not None:
            async with shown.load_lock:
                self._cache.withdraw(shown)

    def expire_root(self) -> None:
        """Have the next request for the root read the list of datasets again."""
        self._view.expire()

    async def serve(self, on_ready: OnReady) -> None:
        """Mount, and answer until the mount is unmounted; unmount it when cancelled.

        Args:
            on_ready: called with the path and the transport when the mount answers.

        Raises:
            DeviceError: the system refused the mount.
        """
        cache = self._cache = OpenFileCache(
            budget_bytes=self._options.cache_bytes // OPEN_FILES_SHARE
        )
        try:
            await self._view.restore()
            self._mount(MountOperations(self._view, cache, self._options))
            record = mountpoints.record_of(self._path)
            device = None if record is None else record.device
            try:
                await self._answer(cache, on_ready)
            finally:
                here = mountpoints.device_of(self._path) == device
                if not here and record is not None:
                    mountpoints.detach_moved(record)
                pyfuse3.close(unmount=here)
        finally:
            cache.give_up_early_read()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(cache.close)
            self._view.close()

    def _mount(self, operations: MountOperations) -> None:
        try:
            pyfuse3.init(operations, self._path, set(self._options.for_kernel()))
        except RuntimeError as error:
            raise DeviceError(
                f"mount on {self._path}: the system refused (is /dev/fuse there, fusermount3 "
                "installed, and allow_other permitted?)"
            ) from error

    async def _answer(self, cache: OpenFileCache, on_ready: OnReady) -> None:
        async with trio.open_nursery() as nursery:
            self._view.server, self._view.nursery = self, nursery
            nursery.start_soon(self._report_ready, on_ready)
            nursery.start_soon(self._view.keep_current)
            nursery.start_soon(cache.give_up_early_reads)
            try:
                await pyfuse3.main()
            finally:
                self._view.server = self._view.nursery = None
            nursery.cancel_scope.cancel()

    async def _report_ready(self, on_ready: OnReady) -> None:
        await trio.to_thread.run_sync(os.stat, self._path, abandon_on_cancel=True)
        on_ready(self._path, DEVICE_TRANSPORT)
