"""The connections of a target, on trio: receives PDUs, executes commands, sends PDUs.

Each connection has one task. It receives bytes, processes every complete PDU, then sends all
answers together. A host's violation of the specification is refused as the specification says and
noted in ``Server.violations``, so that a test of an initiator can require that there was none.

Every answer (the PDUs after a command, an ICReq or an accepted connection) passes the server's
script, if there is one, which may change it (``faults``).

Source: NVM Express TCP Transport Specification 1.0c, sections 3.3 to 3.5.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from dlfs.base.units import KIB
from tests.support.nvme.command import Command, Event
from tests.support.nvme.controller import Controller
from tests.support.nvme.identify import AnaState
from tests.support.nvme.pdu import (
    TO_CONTROLLER,
    C2HTermReq,
    CapsuleCmd,
    Decoder,
    FatalError,
    Frame,
    H2CData,
    H2CTermReq,
    ICReq,
    ICResp,
    Pdu,
    PduError,
    PduType,
    Wire,
    frame_of,
)
from tests.support.nvme.queue import Queue
from tests.support.nvme.subsystem import Subsystem

RECEIVE_BYTES = 256 * KIB
VIOLATIONS_MAX = 100
_KEEP_ALIVE_LOOK_S = 0.1


@dataclass(frozen=True)
class Transport:
    """The parameters of a target's transport.

    Attributes:
        header_digest: grants header digests if the host requests them.
        data_digest: grants data digests if the host requests them.
        host_alignment: CPDA, the alignment of data in the host's PDUs; in dwords, 0's based.
        h2c_bytes_max: MAXH2CDATA, a multiple of 4.
        c2h_bytes: data bytes of one C2HData of a read; 0: all.
        r2t_bytes: bytes that one R2T requests; 0: all.
        r2ts: outstanding R2Ts of one command, if the host allows as many.
        success_flag: end reads by the SUCCESS flag if the host's Connect allows it.
    """

    header_digest: bool = True
    data_digest: bool = True
    host_alignment: int = 0
    h2c_bytes_max: int = 128 * KIB
    c2h_bytes: int = 0
    r2t_bytes: int = 0
    r2ts: int = 1
    success_flag: bool = True


@dataclass
class Counters:
    """Counters of a target.

    Attributes:
        connections: accepted connections.
        commands: commands of each kind.
        keep_alives_missed: controllers that were closed after a keep-alive timeout.
    """

    connections: int = 0
    commands: Counter[Event] = field(default_factory=Counter)
    keep_alives_missed: int = 0


# ---- steps of an answer other than PDUs ----------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Wait before the next step."""

    seconds: float


@dataclass(frozen=True)
class Close:
    """Close the connection."""

    reset: bool = False


@dataclass(frozen=True)
class Mute:
    """Keep the connection open but send nothing on it any more."""


Step = Pdu | Frame | bytes | Wait | Close | Mute


class Script(Protocol):
    """Changes answers."""

    def play(
        self,
        event: Event,
        steps: Sequence[Step],
        connection: Connection,
        command: Command | None = None,
    ) -> Iterable[Step]:
        """Return the steps to take instead."""

    def pieces(self, connection: Connection, data: bytearray, /) -> Iterable[bytes | Wait] | None:
        """Return how to split what is sent; None: not at all."""


class Server:
    """All connections of one target.

    Args:
        subsystems: subsystems by NQN, with the discovery subsystem.
        transport: parameters of the transport.
        script: changes answers; None: none are changed.
    """

    def __init__(
        self,
        subsystems: dict[str, Subsystem],
        transport: Transport,
        script: Script | None,
    ) -> None:
        self.subsystems = subsystems
        self.transport = transport
        self.script = script
        self.counters = Counters()
        self.violations: list[str] = []
        self.connections: set[Connection] = set()
        self.discovery_log: bytes = b""
        self.ana_states: dict[int, AnaState] = {}
        self._running = trio.Event()
        self._running.set()

    async def accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                accepted, _ = await listener.accept()
            except (OSError, trio.ClosedResourceError):
                return
            self.counters.connections += 1
            connection = Connection(self, accepted, self.counters.connections)
            self.connections.add(connection)
            nursery.start_soon(connection.run)

    def drop_all(self, *, reset: bool) -> None:
        """End every connection at once."""
        for connection in list(self.connections):
            connection.close(reset=reset)

    def pause(self) -> None:
        """Stop answering."""
        if self._running.is_set():
            self._running = trio.Event()

    def resume(self) -> None:
        """Answer again, also commands that were received meanwhile."""
        self._running.set()

    async def until_running(self) -> None:
        """Wait while the target is paused."""
        if not self._running.is_set():
            await self._running.wait()

    def note_violation(self, message: str) -> None:
        """Note a violation by the host."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(message)

    def end_association(self, controller: Controller, *, reset: bool) -> None:
        """Close a controller and all its connections."""
        controller.close()
        for connection in list(self.connections):
            if connection.controller is controller:
                connection.close(reset=reset)


class Connection:
    """One TCP connection, which serves one queue."""

    def __init__(self, server: Server, accepted: trio.socket.SocketType, number: int) -> None:
        self.server = server
        self.number = number
        self.queue: Queue | None = None
        self.controller: Controller | None = None
        self.host_r2ts = 1
        self.to_host = Wire()
        self.keep_alive_seen_s = 0.0
        self.gathered: list[list[Step]] = []
        self._socket = accepted
        self._decoder = Decoder((PduType.IC_REQ, PduType.H2C_TERM_REQ))
        self._outbox: list[bytearray | Wait | Close | Mute] = []
        self._sending = False
        self._muted = False
        self._closed = False
        self._nursery: trio.Nursery | None = None

    # ---- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until either side closes."""
        if self._closed:
            return  # ended between its acceptance and now
        try:
            with contextlib.suppress(OSError):  # the host is gone already
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.answer(Event.ACCEPT, [])
                await self._flush()
                await self._receive()
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    def close(self, *, reset: bool = False) -> None:
        """End the connection, and with an admin queue the association. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if reset:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        self._socket.close()
        self.server.connections.discard(self)
        if self.controller is not None and self.queue is not None and self.queue.is_admin:
            self.server.end_association(self.controller, reset=reset)

    async def _receive(self) -> None:
        while not self._closed:
            try:
                data = await self._socket.recv(RECEIVE_BYTES)
            except (OSError, trio.ClosedResourceError):
                return
            if not data:
                return
            await self.server.until_running()
            self._decoder.feed(data)
            self._handle_all()
            await self._flush()

    def _handle_all(self) -> None:
        try:
            while not self._closed and (pdu := self._decoder.next()) is not None:
                self._handle(pdu)
        except PduError as error:
            self.server.note_violation(str(error))
            self.post([C2HTermReq(error.fes, error.fei, error.header), Close()])

    # ---- receiving -------------------------------------------------------------------------------

    def _handle(self, pdu: Pdu) -> None:
        if isinstance(pdu, ICReq):
            self._initialize(pdu)
        elif isinstance(pdu, CapsuleCmd):
            if self.queue is None:
                self.queue = Queue(self)
            self.queue.command(pdu)
        elif isinstance(pdu, H2CData):
            if self.queue is None:
                raise PduError(FatalError.SEQUENCE, 0, b"", "H2CData before any command")
            self.queue.data(pdu)
        elif isinstance(pdu, H2CTermReq):
            self.server.note_violation(f"the host ended connection {self.number}: {pdu.fes}")
            self.post([Close()])

    def _initialize(self, request: ICReq) -> None:
        transport = self.server.transport
        if request.pfv or request.alignment > 31 or request.digests > 3:
            raise PduError(FatalError.UNSUPPORTED_PARAMETER, 8, request.specific()[:8], "ICReq")
        header_digest = bool(request.digests & 1) and transport.header_digest
        data_digest = bool(request.digests & 2) and transport.data_digest
        response = ICResp(
            0, transport.host_alignment, header_digest | data_digest << 1, transport.h2c_bytes_max
        )
        self.answer(Event.INITIALIZE, [response])
        host_bytes = (transport.host_alignment + 1) * 4
        self.host_r2ts = request.limit + 1
        self.to_host = Wire(header_digest, data_digest, (request.alignment + 1) * 4)
        self._decoder.wire = Wire(header_digest, data_digest, host_bytes)
        self._decoder.accepted = TO_CONTROLLER - {PduType.IC_REQ}

    def attach(self, controller: Controller) -> None:
        """Make this the connection of a controller's queue."""
        self.controller = controller
        assert self._nursery is not None
        if self.queue is not None and self.queue.is_admin:
            self.keep_alive_seen_s = trio.current_time()
            self._nursery.start_soon(self._watch_keep_alive, controller)

    async def _watch_keep_alive(self, controller: Controller) -> None:
        while True:
            await trio.sleep(_KEEP_ALIVE_LOOK_S)
            limit_s = controller.keep_alive_ms / 1000
            if limit_s and trio.current_time() > self.keep_alive_seen_s + limit_s:
                self.server.counters.keep_alives_missed += 1
                self.server.end_association(controller, reset=True)
                return

    # ---- sending ---------------------------------------------------------------------------------

    def answer(self, event: Event, steps: Sequence[Step], command: Command | None = None) -> None:
        """Send an answer as the script changes it."""
        script = self.server.script
        self.post(steps if script is None else script.play(event, steps, self, command))

    def post(self, steps: Iterable[Step]) -> None:
        """Append steps for the next ``_flush``."""
        for step in steps:
            if isinstance(step, Wait | Close | Mute):
                self._outbox.append(step)
                continue
            if not self._outbox or not isinstance(self._outbox[-1], bytearray):
                self._outbox.append(bytearray())
            out = self._outbox[-1]
            assert isinstance(out, bytearray)
            if isinstance(step, bytes):
                out += step
                continue
            frame = step if isinstance(step, Frame) else frame_of(step, self.to_host)
            for part in frame.parts():
                out += part

    def post_later(self, seconds: float, steps: Callable[[], Iterable[Step]]) -> None:
        """Take steps after a while."""

        async def later() -> None:
            await trio.sleep(seconds)
            self.post(steps())
            await self._flush()

        assert self._nursery is not None
        if not self._closed:  # else the host has left
            with contextlib.suppress(RuntimeError):  # its tasks are just ending
                self._nursery.start_soon(later)

    async def _flush(self) -> None:
        if self._sending:
            return  # the task that sends now also sends the added steps
        self._sending = True
        try:
            while self._outbox and not self._closed:
                step = self._outbox.pop(0)
                if isinstance(step, bytearray):
                    await self._send(step)
                elif isinstance(step, Wait):
                    await trio.sleep(step.seconds)
                elif isinstance(step, Mute):
                    self._muted = True
                else:
                    self.close(reset=step.reset)
        except (OSError, trio.ClosedResourceError):
            self.close()
        finally:
            self._sending = False

    async def _send(self, data: bytearray) -> None:
        if self._muted:
            return
        script = self.server.script
        pieces = None if script is None else script.pieces(self, data)
        for piece in (data,) if pieces is None else pieces:
            if isinstance(piece, Wait):
                await trio.sleep(piece.seconds)
                continue
            left = memoryview(piece)
            while left:
                await self.server.until_running()
                left = left[await self._socket.send(left) :]
