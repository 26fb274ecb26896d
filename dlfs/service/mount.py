"""The mount of a node service: of its only volume, or **nested**, with a directory for each volume.

The directories of a nested mount come and go with their volumes (``mount_view``).

Threads: the trio loop.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from uuid import UUID

import trio

from dlfs.errors import DeviceError, UsageError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import MountOptions
from dlfs.mount.server import serve_view
from dlfs.mount.users import find_users
from dlfs.mount.view import VolumeView
from dlfs.service.dataset_cache import ServedVolume
from dlfs.staging.server import SealServer

_log = logging.getLogger(__name__)


class ServiceMount:
    """The mount of a service.

    Args:
        directory: mount point.
        options: options of the mount.
        volumes: the volumes at the beginning.
    """

    def __init__(
        self, directory: str, options: MountOptions, volumes: Sequence[ServedVolume]
    ) -> None:
        self._directory = directory
        self._options = options
        self._sealing = (
            None if options.incoming is None else SealServer(volumes[0].volume, options.incoming)
        )
        self._view = MountView(volumes, nested=options.nested)
        self._record: mountpoints.MountRecord | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        """Mount, and serve the mount until it is unmounted or the call is cancelled.

        Raises:
            DlfsError: it cannot be mounted there: see ``mountpoint.prepare`` and ``serve_view``.
        """
        path = await trio.to_thread.run_sync(mountpoints.prepare, self._directory)

        def on_ready(path: str, _transport: str) -> None:
            self._record = mountpoints.record_of(path)
            task_status.started()

        try:
            with self._scope:
                await serve_view(self._view, path, self._options, on_ready, self._sealing)
            if not self._scope.cancelled_caught:
                _log.warning("%s was unmounted; clients are still served", path)
        finally:
            self._ended.set()

    async def add(self, volume: ServedVolume) -> str | None:
        """Show one more volume and return its directory; None if the mount is not nested or gone.

        Raises:
            LimitError: the mount has shown as many datasets and volumes as it can.
        """
        if not self._options.nested or self._ended.is_set():
            return None
        view = await self._view.add(volume)
        mount = self._find()
        return None if mount is None else os.fsdecode(os.path.join(mount.mountpoint, view.name))

    async def remove(self, volume: UUID, *, force: bool) -> None:
        """Stop showing a volume; do nothing if the mount does not show it.

        Args:
            volume: UUID of the volume.
            force: do so while programs use it; their next calls fail.

        Raises:
            DeviceError: programs use it (EBUSY), without ``force``.
        """
        view = next((each for each in self._view.volumes if each.volume.uuid == volume), None)
        if view is None or self._ended.is_set():
            return
        if self._options.nested:
            await self._remove_directory(view, force=force)
            return
        mount = self._find()
        if force:
            self._scope.cancel()
        elif mount is None:
            raise DeviceError(
                f"detach volume {volume}: its mount on {self._directory} was detached while "
                "programs use it; close their files, or use force=True, after which they fail",
                errno.EBUSY,
            )
        else:
            path = os.fsdecode(mount.mountpoint)
            await trio.to_thread.run_sync(mountpoints.unmount, path)
        await self._ended.wait()

    def connect_incoming(self, uid: int) -> socket.socket:
        """Return a connection to the server of the staging area, for a client of a user.

        Raises:
            UsageError: the mount has no ``incoming``.
        """
        if self._sealing is None:
            raise UsageError("seal: the service has no incoming; start it with --incoming AREA")
        return self._sealing.connect(uid)

    def _find(self) -> mountpoints.MountRecord | None:
        """Return the present record of the mount; None if it was detached (``umount --lazy``).

        A directory above the mount point may have been renamed, and another mount be in its place.
        """
        return None if self._record is None else mountpoints.find_again(self._record)

    async def _remove_directory(self, volume: VolumeView, *, force: bool) -> None:
        if not force:
            await self._check_unused(volume)
        await self._view.hide(volume)
        try:
            if not force:
                await self._check_unused(volume)  # by now, no program can open a file
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._view.unhide(volume)
            raise
        await self._view.remove(volume)

    async def _check_unused(self, volume: VolumeView) -> None:
        """Check that no program uses a volume's directory.

        Raises:
            DeviceError: some do.
        """
        mount = self._find()
        if mount is None:
            return  # /proc does not say of a file on which detached mount it is
        numbers = {shown.number for shown in self._view.shown_of(volume)}
        users = await trio.to_thread.run_sync(find_users, mount, volume.name, numbers)
        if users:
            path = os.fsdecode(os.path.join(mount.mountpoint, volume.name))
            raise DeviceError(
                f"detach volume {volume.volume.uuid}: processes use {path}: "
                f"{', '.join(map(str, users))}; close the files that are open on it, or use "
                "force=True, after which they fail",
                errno.EBUSY,
            )
