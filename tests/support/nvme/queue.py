"""One queue of a controller on its connection: receives commands, transfers data, sends answers.

Source: NVM Express TCP Transport Specification 1.0c, section 3.3.2 (data transfer), and NVM Express
Base Specification 2.0, section 6.3 (Connect).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from tests.support.nvme.authentication import Responder
from tests.support.nvme.command import (
    FABRICS,
    SGL_IN_CAPSULE,
    SGL_TRANSPORT,
    Answer,
    Command,
    Event,
    Fabrics,
    Status,
    completion,
    event_of,
)
from tests.support.nvme.controller import Controller, connect_fields
from tests.support.nvme.pdu import (
    R2T,
    C2HData,
    CapsuleCmd,
    CapsuleResp,
    FatalError,
    H2CData,
    Pdu,
    PduError,
)

if TYPE_CHECKING:
    from tests.support.nvme.server import Connection

ADMIN_IN_CAPSULE_BYTES = 8192
CONNECT_BYTES = 1024
DYNAMIC = 0xFFFF
_AUTHENTICATION_DEMANDED = 1 << 17  # AUTHREQ.ATR of a Connect's result
_SECURE_CHANNEL_DEMANDED = 1 << 18  # AUTHREQ.ASCR
_IN_DATA = 1 << 16  # the invalid parameter of a Connect is in its data


@dataclass
class Transfer:
    """A command whose data is requested by R2Ts.

    Attributes:
        command: the command, which is executed when its data is complete.
        event: kind of the command.
        data: the data received so far.
        asked_bytes: bytes that R2Ts have requested.
        windows: next offset and end of each outstanding R2T, by tag.
        damaged: True if a digest of the data was wrong.
    """

    command: Command
    event: Event
    data: bytearray
    asked_bytes: int = 0
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    damaged: bool = False


class Queue:
    """A queue, whose number its Connect command determines.

    Args:
        connection: connection of the queue.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.number: int | None = None
        self._entries = 0
        self._head = 0
        self._flow_control = True
        self._outstanding: set[int] = set()
        self._transfers: dict[int, Transfer] = {}
        self._event_requests: list[int] = []
        self._events: list[int] = []
        self._last_tag = 0
        self._responder: Responder | None = None

    @property
    def is_admin(self) -> bool:
        """True if the queue is connected as queue 0."""
        return self.number == 0

    # ---- commands --------------------------------------------------------------------------------

    def command(self, pdu: CapsuleCmd) -> None:
        """Process a command, at once or when its data is complete."""
        command = Command.decode(pdu.entry)
        event = event_of(command, admin=not self.number)
        server = self._connection.server
        server.counters.commands[event] += 1
        if self._entries:
            self._head = (self._head + 1) % self._entries
        refused = self._check(command, pdu)
        self._outstanding.add(command.cid)
        if refused is not None:
            server.note_violation(f"{event.value}: refused with {refused.status:#05x}")
        elif pdu.damaged:
            refused = Answer(Status.TRANSIENT_TRANSPORT)
        elif command.to_controller and command.length:
            refused = self._refusal(command)
            if refused is None and command.sgl == SGL_TRANSPORT:
                self._begin_transfer(command, event)
                return
        if refused is None:
            data = bytes(memoryview(pdu.data)[command.address :][: command.length])
            refused = self._execute(command, data)
        self._reply(event, command, refused)

    def _check(self, command: Command, pdu: CapsuleCmd) -> Answer | None:
        """Raise PduError for a command that violates the protocol."""
        if command.cid in self._outstanding:
            return Answer(Status.CID_CONFLICT)
        if command.flags != 0x40:
            return Answer(Status.INVALID_FIELD)
        if self.number and len(self._outstanding) >= self._entries:
            return Answer(Status.SEQUENCE_ERROR)
        limit = ADMIN_IN_CAPSULE_BYTES
        if self.number and self._connection.controller is not None:
            limit = self._connection.controller.subsystem.settings.in_capsule_bytes
        carried = len(memoryview(pdu.data))
        if command.to_controller and command.sgl == SGL_IN_CAPSULE:
            if carried > limit or command.address + command.length > carried:
                return Answer(Status.SGL_OFFSET_INVALID)
            return None
        if carried:
            return Answer(Status.SGL_TYPE_INVALID)
        if command.length and command.sgl != SGL_TRANSPORT:
            return Answer(Status.SGL_TYPE_INVALID)
        return None

    def _refusal(self, command: Command) -> Answer | None:
        """Return the error of a command that needs no data to be found; None if valid."""
        if command.opcode == FABRICS or not self.number:
            return Answer(Status.SGL_TYPE_INVALID) if command.sgl == SGL_TRANSPORT else None
        controller = self._connection.controller
        return None if controller is None else controller.check_io(command)

    def _authenticate(self, command: Command, data: bytes) -> Answer | None:
        """Return the answer of authentication; None if the command may run."""
        if self._responder is None:
            return None
        if command.opcode == FABRICS:
            if command.fabrics_type == Fabrics.CONNECT:
                return None
            if command.fabrics_type == Fabrics.AUTHENTICATION_SEND:
                return Answer() if self._responder.send(data) else Answer(Status.INVALID_FIELD)
            if command.fabrics_type == Fabrics.AUTHENTICATION_RECEIVE:
                return Answer(data=self._responder.receive(command.length))
        return None if self._responder.done else Answer(Status.AUTHENTICATION_REQUIRED)

    def _fabrics(self, command: Command, data: bytes) -> Answer:
        controller = self._connection.controller
        if command.fabrics_type == Fabrics.CONNECT:
            return self._connect(command, data)
        if controller is None:
            return Answer(Status.SEQUENCE_ERROR)
        if command.fabrics_type == Fabrics.DISCONNECT and self.number:
            return Answer()
        if command.fabrics_type == Fabrics.PROPERTY_GET and self.is_admin:
            return controller.property_get(command)
        if command.fabrics_type == Fabrics.PROPERTY_SET and self.is_admin:
            return controller.property_set(command)
        return Answer(Status.INVALID_FIELD)

    def _execute(self, command: Command, data: bytes) -> Answer:
        controller = self._connection.controller
        refused = self._authenticate(command, data)
        if refused is not None:
            return refused
        if command.opcode == FABRICS:
            return self._fabrics(command, data)
        if controller is None:
            return Answer(Status.SEQUENCE_ERROR)
        if not self.is_admin:
            return controller.io(command, data) if controller.ready else Answer(Status.ABORTED)
        event = event_of(command, admin=True)
        if event == Event.KEEP_ALIVE or controller.subsystem.settings.traffic_keeps_alive:
            self._connection.keep_alive_seen_s = trio.current_time()
        if event == Event.ASYNC_EVENT:
            if len(self._event_requests) >= controller.subsystem.settings.async_events:
                return Answer(Status.ASYNC_LIMIT)
            self._event_requests.append(command.cid)
        return controller.admin(command, data)

    def raise_event(self, value: int) -> None:
        """Complete an Asynchronous Event Request, now or when the host sends one."""
        self._events.append(value)
        self._complete_events()

    def _complete_events(self) -> None:
        while self._events and self._event_requests:
            cid = self._event_requests.pop(0)
            self._outstanding.discard(cid)
            entry = completion(cid, Answer(value=self._events.pop(0)), self._head)
            self._connection.answer(Event.ASYNC_EVENT, [CapsuleResp(entry)])

    # ---- Connect ---------------------------------------------------------------------------------

    def _connect(self, command: Command, data: bytes) -> Answer:
        if len(data) != CONNECT_BYTES:
            return Answer(Status.SGL_LENGTH_INVALID)
        if self.number is not None:
            return Answer(Status.SEQUENCE_ERROR)
        if command.cdw10 & 0xFFFF:
            return Answer(Status.CONNECT_FORMAT)
        host_id, number, subsystem_nqn, host_nqn = connect_fields(data)
        server = self._connection.server
        subsystem = server.subsystems.get(subsystem_nqn)
        if subsystem is None:
            return Answer(Status.CONNECT_PARAMETERS, _IN_DATA | 256)
        if subsystem.hosts is not None and host_nqn not in subsystem.hosts:
            return Answer(Status.CONNECT_HOST, _IN_DATA | 512)
        queue, entries = command.cdw10 >> 16, (command.cdw11 & 0xFFFF) + 1
        limit = subsystem.settings.queue_entries if queue else 4096
        if not 2 <= entries <= limit:
            return Answer(Status.CONNECT_PARAMETERS, 44)
        if queue == 0:
            if number != DYNAMIC:
                return Answer(Status.CONNECT_PARAMETERS, _IN_DATA | 16)
            controller = Controller(
                subsystem,
                host_nqn,
                host_id,
                command.cdw12,
                lambda: server.discovery_log,
                server.ana_states,
            )
        else:
            found = subsystem.controllers.get(number)
            refused = self._refuse_queue(found, queue, host_id, host_nqn)
            if found is None or refused is not None:
                return refused or Answer(Status.CONNECT_PARAMETERS, _IN_DATA | 16)
            controller = found
        self.number, self._entries, self._head = queue, entries, 1 % entries
        self._flow_control = not command.cdw11 >> 16 & 4
        self._connection.attach(controller)
        if subsystem.authentication is None:
            return Answer(value=controller.number)
        self._responder = Responder(subsystem.authentication, host_nqn, subsystem.nqn)
        demand = _AUTHENTICATION_DEMANDED
        if subsystem.authentication.secure_channel:
            demand |= _SECURE_CHANNEL_DEMANDED
        return Answer(value=controller.number | demand)

    def _refuse_queue(
        self, controller: Controller | None, queue: int, host_id: bytes, host_nqn: str
    ) -> Answer | None:
        mine = list(self._connection.server.connections)
        if controller is None or not any(
            each.controller is controller and each.queue and each.queue.is_admin for each in mine
        ):
            return Answer(Status.CONNECT_PARAMETERS, _IN_DATA | 16)
        if (host_id, host_nqn) != (controller.host_id, controller.host_nqn):
            return Answer(Status.CONNECT_PARAMETERS, _IN_DATA)
        taken = any(
            each.controller is controller and each.queue and each.queue.number == queue
            for each in mine
        )
        if taken or queue > controller.queues_granted:
            return Answer(Status.CONNECT_PARAMETERS, 42)
        return None if controller.ready else Answer(Status.CONTROLLER_BUSY)

    # ---- data from the host ----------------------------------------------------------------------

    def _begin_transfer(self, command: Command, event: Event) -> None:
        transfer = Transfer(command, event, bytearray(command.length))
        self._transfers[command.cid] = transfer
        self._ask(transfer)

    def _ask(self, transfer: Transfer) -> None:
        """Send R2Ts up to the number that may be outstanding."""
        transport = self._connection.server.transport
        most = min(transport.r2ts, self._connection.host_r2ts)
        asked: list[Pdu] = []
        while transfer.asked_bytes < transfer.command.length and len(transfer.windows) < most:
            start = transfer.asked_bytes
            length = transfer.command.length - start
            length = min(length, transport.r2t_bytes or length)
            tag = self._free_tag()
            transfer.windows[tag] = (start, start + length)
            transfer.asked_bytes += length
            asked.append(R2T(transfer.command.cid, tag, start, length))
        if asked:
            self._connection.answer(Event.R2T, asked, transfer.command)

    def _free_tag(self) -> int:
        used = {tag for transfer in self._transfers.values() for tag in transfer.windows}
        while True:
            self._last_tag = (self._last_tag + 1) & 0xFFFF
            if self._last_tag not in used:
                return self._last_tag

    def data(self, pdu: H2CData) -> None:
        """Process data that an R2T requested.

        Raises:
            PduError: no R2T requested the data.
        """
        transfer = self._transfers.get(pdu.cccid)
        window = None if transfer is None else transfer.windows.get(pdu.tag)
        if transfer is None or window is None:
            raise self._bad_data(FatalError.INVALID_HEADER_FIELD, 8, pdu)
        data = memoryview(pdu.data)
        at, end = window
        if len(data) > self._connection.server.transport.h2c_bytes_max:
            raise self._bad_data(FatalError.LIMIT_EXCEEDED, 16, pdu)
        if pdu.offset != at or at + len(data) > end or not data:
            raise self._bad_data(FatalError.OUT_OF_RANGE, 12, pdu)
        if pdu.last != (at + len(data) == end):
            raise self._bad_data(FatalError.INVALID_HEADER_FIELD, 1, pdu)
        self._connection.server.counters.commands[Event.WRITE_DATA] += 1
        transfer.data[at : at + len(data)] = data
        transfer.damaged |= pdu.damaged
        transfer.windows[pdu.tag] = (at + len(data), end)
        self._connection.answer(Event.WRITE_DATA, [], transfer.command)
        if at + len(data) < end:
            return
        del transfer.windows[pdu.tag]
        self._ask(transfer)
        if not transfer.windows:
            self._end_transfer(transfer)

    def _bad_data(self, fes: FatalError, at: int, pdu: H2CData) -> PduError:
        message = f"H2CData of command {pdu.cccid}, tag {pdu.tag}, at {pdu.offset}: {fes.name}"
        return PduError(fes, at, pdu.specific(), message)

    def _end_transfer(self, transfer: Transfer) -> None:
        del self._transfers[transfer.command.cid]
        if transfer.damaged:
            answer = Answer(Status.TRANSIENT_TRANSPORT)
        else:
            answer = self._execute(transfer.command, bytes(transfer.data))
        self._reply(transfer.event, transfer.command, answer)

    # ---- answers ---------------------------------------------------------------------------------

    def _reply(self, event: Event, command: Command, answer: Answer) -> None:
        if answer.deferred:
            self._complete_events()
            return
        self._outstanding.discard(command.cid)
        pdus: list[Pdu] = []
        data = memoryview(answer.data)[: command.length]
        good = answer.status == Status.SUCCESS
        spared = self._connection.server.transport.success_flag and not self._flow_control
        short = spared and good and bool(data) and answer.value == 0
        if good and data:
            pdus += self._data_pdus(command, data, success=short)
        if not short:
            head = self._head if self._flow_control else 0
            pdus.append(CapsuleResp(completion(command.cid, answer, head)))
        self._connection.answer(event, pdus, command)

    def _data_pdus(self, command: Command, data: memoryview, *, success: bool) -> list[C2HData]:
        piece = self._connection.server.transport.c2h_bytes or len(data)
        found = []
        for at in range(0, len(data), piece):
            part = data[at : at + piece]
            last = at + len(part) == len(data)
            pdu = C2HData(command.cid, 0, at, part, last=last, success=success and last)
            found.append(pdu)
        return found
