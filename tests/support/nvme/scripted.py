"""``ScriptedTarget``: a target in a thread of the test's process, controlled by the test.

The thread runs trio. Methods that a test calls run there, and the caller waits for them. While the
target is killed, its port stays bound and refuses connections, so that a restart can use it again.

Threads: any at once, except ``stop``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import trio

from dlfs.base.units import MIB
from dlfs.errors import DeviceError, UsageError
from tests.support.nvme.controller import Controller
from tests.support.nvme.identify import (
    DISCOVERY_NQN,
    NOTICE_ANA,
    NOTICE_NAMESPACE,
    AnaState,
    DiscoveryRecord,
    discovery_page,
)
from tests.support.nvme.namespace import Namespace
from tests.support.nvme.server import Counters, Script, Server, Transport
from tests.support.nvme.subsystem import Subsystem

Result = TypeVar("Result")

DEFAULT_NQN = "nqn.2026-11.org.dlfs:scripted"
_BACKLOG = 128
_PORT_TRIES = 16
# Asynchronous events, as in dword 0 of their completions.
_DISCOVERY_CHANGED = 0x70F002
_NAMESPACES_CHANGED = 0x040002
_ANA_CHANGED = 0x0C0302


class ScriptedTarget:
    """An NVMe/TCP target on 127.0.0.1, which follows the specification except for its script.

    Args:
        subsystems: subsystems to export; by default ``DEFAULT_NQN`` with one namespace of 2 MiB.
            Without a discovery subsystem, one that demands no authentication is added.
        transport: parameters of the transport.
        script: faults; None: none.
        ipv6: listen on ::1, too.
        port: port to listen on; 0: any.

    Raises:
        DeviceError: the port is in use.
    """

    def __init__(
        self,
        subsystems: Sequence[Subsystem] | None = None,
        *,
        transport: Transport | None = None,
        script: Script | None = None,
        ipv6: bool = False,
        port: int = 0,
    ) -> None:
        if subsystems is None:
            subsystems = [Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)])]
        self.subsystems = list(subsystems)
        self.addresses = ["127.0.0.1", "::1"] if ipv6 else ["127.0.0.1"]
        self.port = 0
        self._asked_port = port
        self._transport = transport or Transport()
        self._script = script
        self._extra_records: list[DiscoveryRecord] = []
        self._generation = 0
        self._placeholders: list[socket.socket] = []
        self._listeners: list[trio.socket.SocketType] = []
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and serve in a thread.

        Raises:
            DeviceError: the port is in use.
        """
        self._placeholders = _reserve_port(self.addresses, self._asked_port)
        self.port = self._placeholders[0].getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(
            target=trio.run, args=(self._main, started), name=f"nvme-target-{self.port}"
        )
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        if self._thread is None:
            return
        self._call(self._cancel)
        self._thread.join()
        self._thread = None
        for placeholder in self._placeholders:
            placeholder.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    async def _main(self, started: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        discovery = Subsystem(DISCOVERY_NQN, [])
        found = {subsystem.nqn: subsystem for subsystem in [discovery, *self.subsystems]}
        self._server = Server(found, self._transport, self._script)
        self._update_discovery()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._listen()
                started.set()
                await trio.sleep_forever()
        finally:
            self._unlisten()
            self._server.drop_all(reset=True)

    def _cancel(self) -> None:
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    def _listen(self) -> None:
        assert self._nursery is not None
        for address in self.addresses:
            listener = _bound_socket(address, self.port)
            listener.listen(_BACKLOG)
            self._listeners.append(trio.socket.from_stdlib_socket(listener))
        for each in self._listeners:
            self._nursery.start_soon(self.server.accept, each, self._nursery)

    def _unlisten(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _call(self, function: Callable[[], Result]) -> Result:
        if self._thread is None or self._token is None:
            raise UsageError("use a scripted target: it is not running")
        return trio.from_thread.run_sync(function, trio_token=self._token)

    # ---- state -----------------------------------------------------------------------------------

    @property
    def server(self) -> Server:
        """The server with all connections.

        Raises:
            UsageError: the target was never started.
        """
        if self._server is None:
            raise UsageError("use a scripted target: it was never started")
        return self._server

    @property
    def counters(self) -> Counters:
        """Counters of connections and commands."""
        return self.server.counters

    @property
    def violations(self) -> list[str]:
        """Descriptions of the hosts' violations of the specification."""
        return self.server.violations

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._call(lambda: len(self.server.connections))

    @property
    def namespace(self) -> Namespace:
        """The first namespace of the first subsystem."""
        return next(iter(self.subsystems[0].namespaces.values()))

    def uri(self, subsystem_nqn: str | None = None, *, nsid: int = 1, **options: object) -> str:
        """Return the device URI of a namespace; options as in ``dlfs.block.uri``."""
        nqn = subsystem_nqn or self.subsystems[0].nqn
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return f"nvme-tcp://127.0.0.1:{self.port}/{nqn}?nsid={nsid}{query}"

    # ---- control ---------------------------------------------------------------------------------

    def play(self, script: Script | None) -> None:
        """Replace the script from now on; None: no faults."""

        def change() -> None:
            self.server.script = script

        self._call(change)

    def drop_connections(self, *, reset: bool = True) -> None:
        """Close all connections and continue to listen."""
        self._call(lambda: self.server.drop_all(reset=reset))

    def kill(self) -> None:
        """Reset all connections and refuse new ones. Idempotent."""

        def die() -> None:
            self._unlisten()
            self.server.drop_all(reset=True)

        self._call(die)

    def restart(self, *, lose_cache: bool = False, lose_reservations: bool = False) -> None:
        """Start again on the same port; kills the target first if it runs.

        Args:
            lose_cache: undo writes since the last flush if the cache is volatile.
            lose_reservations: remove reservations that are not persistent.
        """
        self.kill()
        for subsystem in self.subsystems:
            subsystem.lose(cache=lose_cache, reservations=lose_reservations)
        self._call(self._listen)

    def pause(self) -> None:
        """Stop answering: connections are accepted, but nothing is sent."""
        self._call(self.server.pause)

    def resume(self) -> None:
        """Answer again."""
        self._call(self.server.resume)

    def list_also(self, records: Sequence[DiscoveryRecord]) -> None:
        """Add records to the discovery log page and notify hosts that it changed."""

        def change() -> None:
            self._extra_records += records
            self._update_discovery()
            for connection in self.server.connections:
                controller, queue = connection.controller, connection.queue
                if controller is not None and controller.is_discovery and queue is not None:
                    queue.raise_event(_DISCOVERY_CHANGED)
                    connection.post_later(0, list)

        self._call(change)

    def notify_of_namespaces(self, *nsids: int) -> None:
        """Notify hosts that namespaces were added, removed or changed."""

        def notify() -> None:
            for controller in self._notify(NOTICE_NAMESPACE, _NAMESPACES_CHANGED):
                controller.changed.update(nsids)

        self._call(notify)

    def set_ana_state(self, state: AnaState, *, group: int = 1, notify: bool = True) -> None:
        """Change the ANA state of a group at this target's port, and notify hosts of it."""

        def change() -> None:
            self.server.ana_states[group] = state
            if notify:
                self._notify(NOTICE_ANA, _ANA_CHANGED)

        self._call(change)

    def _notify(self, notice: int, event: int) -> list[Controller]:
        """Send an event to every host that has enabled it; return the controllers."""
        notified = []
        for connection in self.server.connections:
            controller, queue = connection.controller, connection.queue
            if controller is None or queue is None or not queue.is_admin:
                continue
            if controller.reports(notice):
                queue.raise_event(event)
                connection.post_later(0, list)
                notified.append(controller)
        return notified

    def records(self) -> list[DiscoveryRecord]:
        """Return the discovery records of this target: each subsystem at each address."""
        return [
            DiscoveryRecord(subsystem.nqn, address, self.port, number)
            for subsystem in self.subsystems
            for number, address in enumerate(self.addresses, 1)
            if subsystem.nqn != DISCOVERY_NQN
        ]

    def _update_discovery(self) -> None:
        self._generation += 1
        found = [*self.records(), *self._extra_records]
        self.server.discovery_log = discovery_page(found, self._generation)


def _bound_socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


def _reserve_port(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Bind one port at every address without listening."""
    for _ in range(_PORT_TRIES):
        bound: list[socket.socket] = []
        try:
            for address in addresses:
                at = bound[0].getsockname()[1] if bound else port
                bound.append(_bound_socket(address, at))
        except OSError as error:
            for each in bound:
                each.close()
            if port or not bound:
                raise DeviceError(f"listen on {addresses[0]} port {port}: {error}") from error
            continue
        return bound
    raise DeviceError(f"listen on {addresses}: no port is free on all of them")
