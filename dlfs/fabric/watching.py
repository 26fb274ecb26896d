"""Follows discovery logs while a volume that was found by discovery is open.

``DiscoveryWatch`` stays connected to the discovery controllers. When one reports that its log has
changed, the log is read again, and its addresses become paths of the devices of this process that
were found by the same controllers and belong to the same subsystems: a node that joins later takes
over when the present path is lost. Devices that were given, or found by other controllers, are left
alone: a controller has no say in other volumes of the process. Other changes need no action. A
namespace that left is reported by its own controller, and members are chosen when a volume is
opened only.

The watch also logs the health warnings of all NVMe/TCP devices of this process, as warnings.

Threads: one thread for each watch, which looks twice a second whether an event has arrived. That
costs no message. A forked child has no watch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dlfs.base.forks import Event, OwnerProcess
from dlfs.base.threads import start_thread
from dlfs.block import (
    NvmeTcpAssociation,
    NvmeTcpDevice,
    NvmeTcpDiscoverUri,
    open_nvme_devices,
    parse_uri,
)
from dlfs.errors import DlfsError
from dlfs.fabric.discovery import DISCOVERY_NQN, read_paths

LOOK_S = 0.5
"""Time between two looks for events."""
RETRY_S = 10.0
"""Time between two attempts to reach a discovery controller."""

_log = logging.getLogger("dlfs")


class _Follower:
    """The connection to one discovery controller, and the addresses that it listed last."""

    def __init__(self, uri: NvmeTcpDiscoverUri) -> None:
        self.paths: dict[str, list[tuple[str, int]]] = {}
        self._uri = uri
        self._association: NvmeTcpAssociation | None = None
        self._seen: tuple[int, int] | None = None  # counts of events when the log was read last
        self._tried: tuple[int, int] | None = None  # the same, of the last attempt
        self._retry_s = 0.0

    def look(self) -> None:
        """Read the log if it has changed, or the controller was connected anew."""
        now_s = time.monotonic()
        if self._association is None:
            if now_s < self._retry_s:
                return
            self._retry_s = now_s + RETRY_S
            place = (self._uri.host, self._uri.port)
            # A command to a lost controller makes one attempt to connect: close() waits for it.
            options = replace(self._uri.options, reconnect_ms=0)
            self._association = NvmeTcpAssociation([place], DISCOVERY_NQN, options)
        status = self._association.status()
        seen = (status.discovery_events, status.reconnects)
        is_read = seen == self._seen and status.connected
        if is_read or (seen == self._tried and now_s < self._retry_s):
            return
        self._tried, self._retry_s = seen, now_s + RETRY_S
        self._read(self._association)
        self._seen = seen

    def _read(self, association: NvmeTcpAssociation) -> None:
        self.paths = {
            nqn: [(address.host, address.port) for address in addresses]
            for nqn, addresses in read_paths(association, self._uri).items()
        }

    def close(self) -> None:
        """Disconnect."""
        if self._association is not None:
            self._association.close()
            self._association = None


class DiscoveryWatch:
    """Gives devices the paths that discovery controllers list later.

    Args:
        controllers: URIs of the discovery controllers, as the caller gave them.
    """

    def __init__(self, controllers: Mapping[str, NvmeTcpDiscoverUri]) -> None:
        self._controllers = tuple(controllers)
        self._followers = [_Follower(uri) for uri in controllers.values()]
        self._warned: dict[str, int] = {}
        self._owner = OwnerProcess()
        self._stop = Event()
        self._thread = start_thread(
            threading.Thread(target=self._run, name="dlfs-discovery", daemon=True)
        )

    def close(self) -> None:
        """Disconnect from the controllers and end the thread. Idempotent."""
        if self._owner.is_current():
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for follower in self._followers:
                # The log stays as it was read last; the volume does not depend on it.
                with contextlib.suppress(DlfsError):
                    follower.look()
            for device in open_nvme_devices():
                with contextlib.suppress(DlfsError):  # it may be closed meanwhile
                    self._serve(device)
        for follower in self._followers:
            follower.close()

    def _serve(self, device: NvmeTcpDevice) -> None:
        nqn = device.address.subsystem_nqn
        followers = self._followers if device.discovery == self._controllers else []
        found = [path for follower in followers for path in follower.paths.get(nqn, ())]
        status = device.offer_paths(found)
        if status.health_events > self._warned.get(device.uri, 0):
            _log.warning(
                "%s: the controller reports %s, critical warnings %#04x",
                device.uri,
                status.last_event,
                status.health_warnings,
            )
        self._warned[device.uri] = status.health_events


def watch_discovery(uris: Sequence[str]) -> DiscoveryWatch | None:
    """Watch the discovery controllers among a volume's URIs; None if there are none."""
    parsed = {uri: parse_uri(uri) for uri in uris}
    controllers = {
        uri: found for uri, found in parsed.items() if isinstance(found, NvmeTcpDiscoverUri)
    }
    return DiscoveryWatch(controllers) if controllers else None
