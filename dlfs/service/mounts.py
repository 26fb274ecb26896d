"""The mounts of a node service: of its only volume, or of each volume in a directory of its own.

A **nested** mount point DIR has a directory for each volume, named by the volume's label, or by its
UUID where the label is empty, no file name, or taken. They come and go with their volumes.

Threads: the trio loop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from dataclasses import dataclass, field
from uuid import UUID

import trio

from dlfs.errors import DlfsError, NotFoundError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.options import MountOptions
from dlfs.mount.server import serve_view
from dlfs.service.dataset_cache import ServedVolume

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Mount:
    """A volume that is mounted, or being mounted."""

    path: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


class ServiceMounts:
    """The mounts of a service.

    Args:
        directory: mount point.
        options: options of each mount.
        nested: mount each volume in a directory of its own below the mount point.
    """

    def __init__(self, directory: str, options: MountOptions, *, nested: bool) -> None:
        self._directory = directory
        self._options = options
        self._mounts: dict[UUID, _Mount] = {}
        self._nursery: trio.Nursery | None = None
        self.nested = nested

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        """Serve the mounts until cancelled, then unmount them.

        Raises:
            DeviceError: the mount of the only volume failed.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def add(self, volume: ServedVolume) -> str:
        """Mount a volume and return its mount point.

        Raises:
            DlfsError: it cannot be mounted there: see ``mountpoint.prepare`` and ``serve_view``.
        """
        assert self._nursery is not None
        path = await trio.to_thread.run_sync(self._prepare, volume)
        mount = self._mounts[volume.uuid] = _Mount(path)
        await self._nursery.start(self._serve, volume, mount)
        return path

    async def remove(self, volume: UUID, *, force: bool) -> None:
        """Unmount a volume; do nothing if it is not mounted.

        Args:
            volume: UUID of the volume.
            force: unmount it while programs use it; their next calls fail.

        Raises:
            DeviceError: programs use it (EBUSY), without ``force``.
        """
        mount = self._mounts.get(volume)
        if mount is None:
            return
        if force:
            mount.scope.cancel()
        else:
            await trio.to_thread.run_sync(mountpoints.unmount, mount.path)
        await mount.ended.wait()

    def _prepare(self, volume: ServedVolume) -> str:
        if not self.nested:
            return mountpoints.prepare(self._directory)
        if not os.path.isdir(self._directory):
            raise NotFoundError(
                f"mount on {self._directory}: no such directory; 'mkdir -p {self._directory}' "
                "makes it"
            )
        path = os.path.join(self._directory, self._name(volume))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        return mountpoints.prepare(path)

    def _name(self, volume: ServedVolume) -> str:
        taken = {os.path.basename(mount.path) for mount in self._mounts.values()}
        label = volume.label
        usable = label not in ("", ".", "..", *taken) and "/" not in label and "\0" not in label
        return label if usable else str(volume.uuid)

    async def _serve(
        self, volume: ServedVolume, mount: _Mount, task_status: trio.TaskStatus[None]
    ) -> None:
        """Serve one mount until it is unmounted."""
        ready = False

        def on_ready(_path: str, _transport: str) -> None:
            nonlocal ready
            ready = True
            task_status.started()

        serve = functools.partial(
            serve_view, volume.volume, volume, mount.path, self._options, on_ready
        )
        try:
            with mount.scope:
                await serve()
            if not mount.scope.cancelled_caught:
                _log.warning("%s was unmounted; clients are still served", mount.path)
        except (DlfsError, OSError):
            if not (ready and self.nested):
                raise
            _log.exception("%s: the mount failed; clients are still served", mount.path)
        finally:
            del self._mounts[volume.uuid]
            if self.nested:
                with contextlib.suppress(OSError):
                    os.rmdir(mount.path)
            mount.ended.set()
