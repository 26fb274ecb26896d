"""The pyfuse3 server of a mount: the plain reference.

One thread runs the FUSE loop (trio) and every handler; samples and metadata of the volume are read
in worker threads. A mount that ends goes away at once, even if files on it are open: programs that
still use them get ENOTCONN.
"""

from __future__ import annotations

import os

import pyfuse3
import trio

from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.open_file_cache import OpenFileCache
from dlfs.mount.operations import MountOperations
from dlfs.mount.options import DEVICE_TRANSPORT, MountOptions, OnReady
from dlfs.mount.view import ShownVolume, VolumeView
from dlfs.volume import Volume


class Pyfuse3Mount:
    """A mount that the pyfuse3 server answers.

    Args:
        volume: the volume; must outlive the mount.
        shown: the same volume, or one that shares its open datasets with a node service.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.

    Threads: the trio loop; one mount in a process.
    """

    def __init__(
        self, volume: Volume, shown: ShownVolume, path: str, options: MountOptions
    ) -> None:
        self._volume = volume
        self._path = path
        self._options = options
        self._view = VolumeView(shown)

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
        cache = OpenFileCache(budget_bytes=self._options.cache_bytes)
        try:
            self._mount(MountOperations(self._volume, self._view, cache, self._options))
            device = mountpoints.device_of(self._path)
            try:
                await self._answer(on_ready)
            finally:
                pyfuse3.close(unmount=mountpoints.device_of(self._path) == device)
        finally:
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

    async def _answer(self, on_ready: OnReady) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_ready, on_ready)
            nursery.start_soon(self._view.keep_current)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()

    async def _report_ready(self, on_ready: OnReady) -> None:
        await trio.to_thread.run_sync(os.stat, self._path, abandon_on_cancel=True)
        on_ready(self._path, DEVICE_TRANSPORT)
