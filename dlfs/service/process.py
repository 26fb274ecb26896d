"""The node service process: the sample server and, on request, a mount in the same trio loop.

``NodeService`` opens the volumes (``ServedVolume``) with one ``DatasetCache``, listens on a Unix
socket, and runs a ``SampleServer``, a metrics endpoint and a mount. It runs until SIGTERM or
SIGINT, or until the mount fails. Then it removes the socket's file and the mount, but frees no
memory: clients may still read the sample memory. So the caller must end the process without closing
the service's objects. If the mount is unmounted from outside, the sample server continues.

Under systemd the socket may come from a ``.socket`` unit. The service notifies systemd when it is
ready, periodically while it is alive, and when it stops.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from dlfs._native.malloc import give_back_freed_memory
from dlfs.connection import OpenOptions
from dlfs.errors import UsageError
from dlfs.mount.signals import run_until_signal
from dlfs.service import systemd
from dlfs.service.dataset_cache import CACHE_BYTES, DatasetCache, ServedVolume
from dlfs.service.server import SampleServer
from dlfs.service.sockets import AllowList, Listener, adopt, default_path, listen

if TYPE_CHECKING:
    from dlfs.service.metrics import MetricsEndpoint

_WATCHDOG_SHARE = 1 / 3
"""Time between two notifications of systemd's watchdog, as a share of the watchdog's timeout."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of a node service.

    Attributes:
        volumes: URI of each volume, as ``dlfs.open`` takes it.
        socket: path of the service's socket; None: a default path with the label or UUID of the
            first volume.
        mount: directory to mount the volume on, which must be the only one; None: no mount.
        incoming: staging directory of the mount: see ``MountOptions``.
        fuse: server of the mount: see ``MountOptions``.
        metrics: ``HOST:PORT`` of the endpoint for Prometheus; None: no endpoint.
        cache_bytes: sample memory for all datasets, in bytes.
        allow: users and groups that may use the socket.
        open_options: options for opening the volumes' devices.
    """

    volumes: Sequence[str]
    socket: str | None = None
    mount: str | None = None
    incoming: str | None = None
    fuse: str = "auto"
    metrics: str | None = None
    cache_bytes: int = CACHE_BYTES
    allow: AllowList = field(default_factory=AllowList)
    open_options: OpenOptions = field(default_factory=OpenOptions)

    def __post_init__(self) -> None:
        if not self.volumes or self.cache_bytes < 1:
            raise UsageError(
                f"serve: expected a volume and some cache, got {len(self.volumes)} volumes and "
                f"{self.cache_bytes} bytes"
            )
        if self.incoming is not None and self.mount is None:
            raise UsageError("serve: expected a mount (--mount DIR) for what programs write")
        if self.mount is not None and len(self.volumes) > 1:
            raise UsageError(
                f"serve: a mount shows one volume, got {len(self.volumes)}; mount the others with "
                "dlfs mount"
            )


class NodeService:
    """A node service.

    Args:
        options: the volumes and how to serve them.

    Raises:
        DlfsError: a volume cannot be opened, two volumes are the same, or another service uses the
            socket.

    Attributes:
        volumes: the served volumes.
        server: the sample server.
        listener: the socket that clients connect to.
        metrics: the endpoint for Prometheus; None without one.
    """

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._cache = DatasetCache(options.cache_bytes)
        with ExitStack() as opened:
            self.volumes = [
                opened.enter_context(ServedVolume(uri, self._cache, options.open_options))
                for uri in options.volumes
            ]
            if len({volume.uuid for volume in self.volumes}) < len(self.volumes):
                raise UsageError(f"serve {', '.join(options.volumes)}: a volume is given twice")
            self.server = SampleServer(self.volumes, self._cache, options.allow)
            self.metrics = self._open_metrics()
            if self.metrics is not None:
                opened.callback(self.metrics.close)
            self.listener = self._listen()
            opened.pop_all()

    def _open_metrics(self) -> MetricsEndpoint | None:
        if self._options.metrics is None:
            return None
        from dlfs.service.metrics import MetricsEndpoint  # prometheus-client is needed only here

        endpoint = MetricsEndpoint(self._options.metrics, self.server.snapshot)
        _log.info("metrics on %s", endpoint.url)
        return endpoint

    def _listen(self) -> Listener:
        handed = systemd.listening_socket()
        if handed is not None:
            return adopt(handed)
        first = self.volumes[0]
        given = self._options.socket
        path = given or default_path(first.label or str(first.uuid))
        return listen(os.path.abspath(path), self._options.allow, make_directory=given is None)

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT.

        Args:
            on_ready: called with the socket's path when clients can connect and the mount answers.

        Raises:
            DlfsError: the volume cannot be mounted.

        Threads: the main thread, which receives the signals.
        """
        give_back_freed_memory()  # memory of past requests returns to the system
        _, descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_max, descriptors_max))
        try:
            run_until_signal(self._run, on_ready)
        finally:
            systemd.notify("STOPPING=1")
            self.listener.close()
            if self.metrics is not None:
                self.metrics.close()

    async def _run(self, on_ready: Callable[[str], None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.server.serve, self.listener)
            if self._options.mount is not None:
                await nursery.start(self._mount, self._options.mount)
            nursery.start_soon(_feed_watchdog)
            systemd.notify(f"READY=1\nSTATUS=serving on {self.listener.path}")
            on_ready(self.listener.path)

    async def _mount(self, directory: str, task_status: trio.TaskStatus[None]) -> None:
        """Mount the volume and serve the mount until it is unmounted."""
        from dlfs.mount.mountpoint import prepare
        from dlfs.mount.options import MountOptions
        from dlfs.mount.server import serve_view

        volume = self.volumes[0]
        path = prepare(directory)
        options = MountOptions(incoming=self._options.incoming, fuse=self._options.fuse)
        await serve_view(volume.volume, volume, path, options, lambda _path: task_status.started())
        _log.warning("%s was unmounted; clients are still served", path)


async def _feed_watchdog() -> None:
    """Notify systemd's watchdog as long as the trio loop runs."""
    seconds = systemd.watchdog_seconds()
    while seconds is not None:
        systemd.notify("WATCHDOG=1")
        await trio.sleep(seconds * _WATCHDOG_SHARE)
