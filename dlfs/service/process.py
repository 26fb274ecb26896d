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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from dlfs._native.malloc import give_back_freed_memory
from dlfs.base.memory_limit import default_service_bytes, describe_service_memory
from dlfs.base.wording import quote
from dlfs.connection.connection import OpenOptions
from dlfs.errors import UsageError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.signals import run_until_signal
from dlfs.service import systemd
from dlfs.service.access import Access
from dlfs.service.attachments import RULE_ON_MOUNT
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.service.published import PublishedSockets
from dlfs.service.server import SampleServer
from dlfs.service.sockets import AllowList, Listener, adopt, default_path, listen
from dlfs.service.state import ServerState
from dlfs.volume.volume import Volume

if TYPE_CHECKING:
    from dlfs.service.metrics import MetricsEndpoint
    from dlfs.service.mount import ServiceMount

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
        mount: directory to mount on; None: no mount.
        nested: show each volume in a directory of its own below ``mount``. So it is with several
            volumes; without it, ``mount`` has the datasets of the single volume.
        incoming: staging directory of the mount: see ``MountOptions``.
        fuse: server of the mount: see ``MountOptions``.
        metrics: ``HOST:PORT`` of the endpoint for Prometheus; None: no endpoint.
        cache_bytes: sample memory for all datasets, in bytes; by default a share of what the
            process may use.
        allow: users and groups that may use the socket, and read the volumes without a rule.
        rules: users and groups that may read one volume, by its label or UUID.
        sockets: directory of the published sockets; None: the service publishes none.
        depth: most operations in flight per member and thread.
    """

    volumes: Sequence[str]
    socket: str | None = None
    mount: str | None = None
    nested: bool = False
    incoming: str | None = None
    fuse: str = "auto"
    metrics: str | None = None
    cache_bytes: int = field(default_factory=default_service_bytes)
    allow: AllowList = field(default_factory=AllowList)
    rules: Mapping[str, AllowList] = field(default_factory=dict)
    sockets: str | None = None
    depth: int = 128

    def __post_init__(self) -> None:
        if not (self.volumes or self.sockets) or self.cache_bytes < 1:
            raise UsageError(
                f"serve: expected a volume and some cache, got {len(self.volumes)} volumes and "
                f"{self.cache_bytes} bytes"
            )
        if self.mount is not None and (self.rules or self.sockets):
            raise UsageError(f"serve: {RULE_ON_MOUNT}")
        if self.incoming is not None and self.mount is None:
            raise UsageError("serve: expected a mount (--mount DIR) for what programs write")
        if self.nested and self.mount is None:
            raise UsageError("serve: expected a mount (--mount DIR) to show each volume in")
        if self.incoming is not None and (self.nested or len(self.volumes) > 1):
            raise UsageError(
                f"serve: what programs write goes to the only volume, got {len(self.volumes)} "
                f"volumes{', nested' if self.nested else ''}; use dlfs mount --incoming"
            )


class NodeService:
    """A node service.

    Args:
        options: the volumes and how to serve them.

    Raises:
        DlfsError: a volume cannot be opened, two volumes are the same, or another service uses the
            socket.

    Attributes:
        state: the served volumes, and all that the sessions of clients share.
        listener: the socket that clients connect to.
        metrics: the endpoint for Prometheus; None without one.
    """

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        cache = DatasetCache(options.cache_bytes, expects_volumes=options.sockets is not None)
        open_options = OpenOptions(depth=options.depth)
        with ExitStack() as opened:
            served = [
                opened.enter_context(ServedVolume(uri, cache, open_options, self._find_rule))
                for uri in options.volumes
            ]
            self._check_rules(served)
            volumes = {volume.uuid: volume for volume in served}
            if len(volumes) < len(served):
                raise UsageError(f"serve {', '.join(options.volumes)}: a volume is given twice")
            self._mount = self._make_mount(served)
            self._sockets = PublishedSockets(
                None if options.sockets is None else os.path.abspath(options.sockets)
            )
            opened.callback(self._sockets.close)
            access = Access(options.allow, sockets=self._sockets)
            self.state = ServerState(volumes, cache, open_options, self._mount, access)
            self.metrics = self._open_metrics()
            if self.metrics is not None:
                opened.callback(self.metrics.close)
            self.listener = self._listen(served[0] if served else None)
            access.group = self.listener.group
            self.state.let_in = self.listener.let_in
            for volume in served:
                self.listener.let_in(volume.rule)
            _log.info("memory for samples: %s", describe_service_memory(options.cache_bytes))
            opened.pop_all()

    def _open_metrics(self) -> MetricsEndpoint | None:
        if self._options.metrics is None:
            return None
        from dlfs.service.metrics import MetricsEndpoint  # prometheus-client is needed only here

        endpoint = MetricsEndpoint(self._options.metrics, self.state.snapshot)
        _log.info("metrics on %s", endpoint.url)
        return endpoint

    def _find_rule(self, volume: Volume) -> AllowList | None:
        rules = self._options.rules
        return rules.get(str(volume.uuid), rules.get(volume.label))

    def _check_rules(self, volumes: Sequence[ServedVolume]) -> None:
        """Check that each rule is for one volume: a rule without effect would protect nothing."""
        for name in self._options.rules:
            found = [each for each in volumes if name in (each.label, str(each.uuid))]
            if len(found) != 1:
                listed = ", ".join(f"{quote(each.label)} ({each.uuid})" for each in volumes)
                raise UsageError(
                    f"serve: expected the label or UUID of one volume for --allow, got "
                    f"{quote(name)}, which {len(found)} have; there are: {listed}"
                )

    def _make_mount(self, volumes: Sequence[ServedVolume]) -> ServiceMount | None:
        options = self._options
        if options.mount is None:
            return None
        from dlfs.mount.options import MountOptions
        from dlfs.service.mount import ServiceMount

        nested = options.nested or len(options.volumes) > 1
        return ServiceMount(
            options.mount,
            MountOptions(incoming=options.incoming, fuse=options.fuse, nested=nested),
            volumes,
        )

    def _listen(self, first: ServedVolume | None) -> Listener:
        handed = systemd.listening_socket()
        if handed is not None:
            return adopt(handed)
        given = self._options.socket
        label = "service" if first is None else first.label or str(first.uuid)
        path = given or default_path(label)
        mount = self._options.mount
        return listen(
            os.path.abspath(path),
            self._options.allow,
            make_directory=given is None,
            mount=None if mount is None else mountpoints.resolve(mount),
        )

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
            self._sockets.close()
            if self.metrics is not None:
                self.metrics.close()

    async def _run(self, on_ready: Callable[[str], None]) -> None:
        async with trio.open_nursery() as nursery:
            if self._mount is not None:
                await nursery.start(self._mount.serve)
            server = SampleServer(self.state)
            nursery.start_soon(server.serve, self.listener)
            nursery.start_soon(_feed_watchdog)
            systemd.notify(f"READY=1\nSTATUS=serving on {self.listener.path}")
            on_ready(self.listener.path)


async def _feed_watchdog() -> None:
    """Notify systemd's watchdog as long as the trio loop runs."""
    seconds = systemd.watchdog_seconds()
    while seconds is not None:
        systemd.notify("WATCHDOG=1")
        await trio.sleep(seconds * _WATCHDOG_SHARE)
