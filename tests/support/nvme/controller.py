"""A dynamic controller: one host's association with one subsystem, and its answers to commands.

A command is passed with all its data and answered at once: nothing here waits. Connections, queues
and data transfers are in ``server`` and ``queue``.

Source: NVM Express Base Specification 2.0, sections 3.1 (properties), 5 (admin commands), 6
(Fabrics commands) and NVM Command Set Specification 1.0, section 3.2 (reads and writes).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tests.support.nvme import identify
from tests.support.nvme.command import (
    NSID_ALL,
    Admin,
    Answer,
    Command,
    Nvm,
    Status,
)
from tests.support.nvme.identify import DISCOVERY_NQN, VERSION
from tests.support.nvme.namespace import Namespace

if TYPE_CHECKING:
    from tests.support.nvme.subsystem import Subsystem

PROPERTY_CAP = 0x00
PROPERTY_VS = 0x08
PROPERTY_CC = 0x14
PROPERTY_CSTS = 0x1C

FEATURE_WRITE_CACHE = 0x06
FEATURE_QUEUES = 0x07
FEATURE_ASYNC_EVENTS = 0x0B
FEATURE_KEEP_ALIVE = 0x0F
FEATURE_HOST_IDENTIFIER = 0x81

LOG_ERRORS = 0x01
LOG_HEALTH = 0x02
LOG_NAMESPACES = 0x04
LOG_ANA = 0x0C
LOG_DISCOVERY = 0x70

_ANA_STATUSES = {
    identify.AnaState.PERSISTENT_LOSS: Status.ANA_PERSISTENT_LOSS,
    identify.AnaState.INACCESSIBLE: Status.ANA_INACCESSIBLE,
    identify.AnaState.CHANGE: Status.ANA_TRANSITION,
}

KEEP_ALIVE_UNIT_MS = 100
READY_TIMEOUT_UNITS = 20  # of 500 ms


class Controller:
    """A controller that a host's admin Connect created.

    Args:
        subsystem: subsystem of the controller.
        host_nqn: NQN of the host.
        host_id: ID of the host, 16 bytes.
        keep_alive_ms: KATO; 0: none.
        discovery_log: returns the present discovery log page.
        ana_states: ANA state of each group that is not optimized at the host's port.

    Attributes:
        changed: namespaces that changed since the host last read their list.
    """

    def __init__(
        self,
        subsystem: Subsystem,
        host_nqn: str,
        host_id: bytes,
        keep_alive_ms: int,
        discovery_log: Callable[[], bytes],
        ana_states: Mapping[int, identify.AnaState] = MappingProxyType({}),
    ) -> None:
        self.subsystem = subsystem
        self.host_nqn = host_nqn
        self.host_id = host_id
        self.keep_alive_ms = keep_alive_ms
        self.configuration = 0
        self.shut_down = False
        self.queues_granted = 0
        self.changed = set[int]()
        self._discovery_log = discovery_log
        self._ana_states = ana_states
        self._features: dict[int, int] = {FEATURE_WRITE_CACHE: 1}
        self.number = subsystem.add(self)

    @property
    def ready(self) -> bool:
        """The ready bit CSTS.RDY, always equal to CC.EN."""
        return bool(self.configuration & 1)

    @property
    def is_discovery(self) -> bool:
        """True for a discovery controller, which has no namespaces."""
        return self.subsystem.nqn == DISCOVERY_NQN

    def close(self) -> None:
        """End the association. Idempotent."""
        self.subsystem.remove(self.number)

    def reports(self, notice: int) -> bool:
        """Return True if the host has enabled an event, a bit of Set Features 0Bh."""
        return bool(self._features.get(FEATURE_ASYNC_EVENTS, 0) & notice)

    # ---- properties ------------------------------------------------------------------------------

    def property_get(self, command: Command) -> Answer:
        """Run Property Get."""
        wide = command.cdw10 & 7
        mqes = self.subsystem.settings.queue_entries - 1
        status = self.ready | (2 << 2) * self.shut_down
        values = {
            PROPERTY_CAP: (mqes | 1 << 16 | READY_TIMEOUT_UNITS << 24 | 1 << 37, 1),
            PROPERTY_VS: (VERSION, 0),
            PROPERTY_CC: (self.configuration, 0),
            PROPERTY_CSTS: (status, 0),
        }
        value, width = values.get(command.cdw11, (0, -1))
        if width != wide:
            return Answer(Status.INVALID_FIELD)
        return Answer(value=value)

    def property_set(self, command: Command) -> Answer:
        """Run Property Set, which may set CC only."""
        if command.cdw10 & 7 or command.cdw11 != PROPERTY_CC:
            return Answer(Status.INVALID_FIELD)
        value = command.cdw12
        sizes = (value >> 16 & 15, value >> 20 & 15)
        if value & 1 and not self.is_discovery and sizes != (6, 4):
            return Answer(Status.INVALID_FIELD)
        self.shut_down = bool(value >> 14 & 3)
        self.configuration = value
        return Answer()

    # ---- admin commands --------------------------------------------------------------------------

    def admin(self, command: Command, data: bytes) -> Answer:
        """Run any admin command that is not a Fabrics command."""
        if not self.ready:
            return Answer(Status.SEQUENCE_ERROR)
        answers: dict[int, Callable[[Command, bytes], Answer]] = {
            Admin.GET_LOG_PAGE: self._log_page,
            Admin.IDENTIFY: self._identify,
            Admin.ABORT: lambda _command, _data: Answer(value=1),
            Admin.SET_FEATURES: self._set_features,
            Admin.GET_FEATURES: self._get_features,
            Admin.ASYNC_EVENT: lambda _command, _data: Answer(deferred=True),
            Admin.KEEP_ALIVE: self._keep_alive,
        }
        answer = answers.get(command.opcode)
        return Answer(Status.INVALID_OPCODE) if answer is None else answer(command, data)

    def _keep_alive(self, _command: Command, _data: bytes) -> Answer:
        return Answer() if self.keep_alive_ms else Answer(Status.KEEP_ALIVE_INVALID)

    def _identify(self, command: Command, _data: bytes) -> Answer:
        if command.length != identify.IDENTIFY_BYTES:
            return Answer(Status.SGL_LENGTH_INVALID)
        spaces = list(self.subsystem.namespaces.values())
        structure, nsid = command.cdw10 & 0xFF, command.nsid
        if structure == 1:
            settings, nqn = self.subsystem.settings, self.subsystem.nqn
            return Answer(data=identify.controller_page(settings, self.number, nqn, spaces))
        if self.is_discovery or structure > 3:
            return Answer(Status.INVALID_FIELD)
        if structure == 2:
            return Answer(data=identify.active_list_page(spaces, nsid))
        if not 1 <= nsid <= max(self.subsystem.namespaces, default=0):
            return Answer(Status.INVALID_NAMESPACE)
        namespace = self.subsystem.namespaces.get(nsid)
        if structure == 3:
            if namespace is None:
                return Answer(Status.INVALID_NAMESPACE)
            return Answer(data=identify.descriptors_page(namespace))
        if namespace is None:  # inactive
            return Answer(data=bytes(identify.IDENTIFY_BYTES))
        return Answer(data=identify.namespace_page(namespace))

    def _log_page(self, command: Command, _data: bytes) -> Answer:
        kind = command.cdw10 & 0xFF
        length = ((command.cdw10 >> 16 | (command.cdw11 & 0xFFFF) << 16) + 1) * 4
        offset = command.cdw12 | command.cdw13 << 32
        if length != command.length or offset % 4:
            return Answer(Status.INVALID_FIELD)
        if kind == LOG_DISCOVERY and self.is_discovery:
            page = self._discovery_log()
        elif kind in (LOG_ERRORS, LOG_HEALTH) and not self.is_discovery:
            page = bytes(512)
        elif kind == LOG_NAMESPACES and not self.is_discovery:
            found = sorted(self.changed)
            self.changed.clear()
            page = struct.pack(f"<{len(found)}I", *found).ljust(4096, b"\0")
        elif kind == LOG_ANA and self.subsystem.settings.ana:
            spaces = list(self.subsystem.namespaces.values())
            groups_only = bool(command.cdw10 >> 8 & 1)
            page = identify.ana_page(spaces, self._ana_states, lists=not groups_only)
        else:
            return Answer(Status.INVALID_LOG_PAGE)
        if offset > len(page):
            return Answer(Status.INVALID_FIELD)
        return Answer(data=page[offset : offset + length].ljust(length, b"\0"))

    def _set_features(self, command: Command, _data: bytes) -> Answer:
        feature, value = command.cdw10 & 0xFF, command.cdw11
        if feature == FEATURE_KEEP_ALIVE:
            self.keep_alive_ms = value
        elif feature == FEATURE_QUEUES and not self.is_discovery:
            requested = min(value & 0xFFFF, value >> 16)
            if requested == 0xFFFF:
                return Answer(Status.INVALID_FIELD)
            self.queues_granted = min(requested + 1, self.subsystem.settings.io_queues)
            return Answer(value=(self.queues_granted - 1) * 0x10001)
        elif feature in (FEATURE_ASYNC_EVENTS, FEATURE_WRITE_CACHE):
            self._features[feature] = value
        else:
            return Answer(Status.INVALID_FIELD)
        return Answer()

    def _get_features(self, command: Command, _data: bytes) -> Answer:
        feature = command.cdw10 & 0xFF
        if feature == FEATURE_KEEP_ALIVE:
            return Answer(value=self.keep_alive_ms)
        if feature == FEATURE_QUEUES and not self.is_discovery:
            granted = self.queues_granted or self.subsystem.settings.io_queues
            return Answer(value=(granted - 1) * 0x10001)
        if feature == FEATURE_HOST_IDENTIFIER:
            return Answer(data=self.host_id)
        if feature in (FEATURE_ASYNC_EVENTS, FEATURE_WRITE_CACHE):
            return Answer(value=self._features.get(feature, 0))
        return Answer(Status.INVALID_FIELD)

    # ---- I/O commands ----------------------------------------------------------------------------

    def check_io(self, command: Command) -> Answer | None:
        """Return the error of an I/O command that needs no data to be found; None if valid."""
        if command.opcode not in frozenset(Nvm):
            return Answer(Status.INVALID_OPCODE)
        if command.opcode == Nvm.FLUSH and command.nsid == NSID_ALL:
            return None
        namespace = self.subsystem.namespaces.get(command.nsid)
        if namespace is None:
            return Answer(Status.INVALID_NAMESPACE)
        state = self._ana_states.get(namespace.ana_group, identify.AnaState.OPTIMIZED)
        if state in _ANA_STATUSES:
            return Answer(_ANA_STATUSES[state])
        if command.opcode in (Nvm.READ, Nvm.WRITE):
            return self._check_transfer(command, namespace)
        if command.opcode == Nvm.FLUSH and not namespace.reservations.allows(
            self.host_id, write=True
        ):
            return Answer(Status.RESERVATION_CONFLICT)
        return None

    def _check_transfer(self, command: Command, namespace: Namespace) -> Answer | None:
        blocks = (command.cdw12 & 0xFFFF) + 1
        start = command.cdw10 | command.cdw11 << 32
        if command.length != blocks * namespace.block_bytes:
            return Answer(Status.SGL_LENGTH_INVALID)
        if command.length > self.subsystem.settings.transfer_bytes_max:
            return Answer(Status.INVALID_FIELD)
        if start + blocks > namespace.blocks:
            return Answer(Status.LBA_OUT_OF_RANGE)
        if namespace.read_only and command.opcode == Nvm.WRITE:
            return Answer(Status.WRITE_PROTECTED)
        if not namespace.reservations.allows(self.host_id, write=command.opcode == Nvm.WRITE):
            return Answer(Status.RESERVATION_CONFLICT)
        return None

    def io(self, command: Command, data: bytes) -> Answer:
        """Run any I/O command, with all its data."""
        refused = self.check_io(command)
        if refused is not None:
            return refused
        if command.nsid == NSID_ALL:
            for each in self.subsystem.namespaces.values():
                each.flush()
            return Answer()
        namespace = self.subsystem.namespaces[command.nsid]
        start = command.cdw10 | command.cdw11 << 32
        if command.opcode == Nvm.READ:
            return Answer(data=namespace.read(start, (command.cdw12 & 0xFFFF) + 1))
        if command.opcode == Nvm.WRITE:
            namespace.write(start, data)
            if command.cdw12 & 1 << 30:  # FUA: flushing everything is more than required
                namespace.flush()
            return Answer()
        if command.opcode == Nvm.FLUSH:
            namespace.flush()
            return Answer()
        with self.subsystem.mutex:
            return self._reservation(command, namespace, data)

    def _reservation(self, command: Command, namespace: Namespace, data: bytes) -> Answer:
        found = namespace.reservations
        if command.opcode == Nvm.RESERVATION_REPORT:
            length = (command.cdw10 + 1) * 4
            if length != command.length:
                return Answer(Status.SGL_LENGTH_INVALID)
            if not command.cdw11 & 1:
                return Answer(Status.HOST_ID_FORMAT)
            report = found.report(self.subsystem.hosts_connected())
            return Answer(data=report[:length].ljust(length, b"\0"))
        wanted = 8 if command.opcode == Nvm.RESERVATION_RELEASE else 16
        if len(data) != wanted:
            return Answer(Status.SGL_LENGTH_INVALID)
        change = {
            Nvm.RESERVATION_REGISTER: found.register,
            Nvm.RESERVATION_ACQUIRE: found.acquire,
            Nvm.RESERVATION_RELEASE: found.release,
        }[Nvm(command.opcode)]
        return Answer(change(self.host_id, command.cdw10, data))


def connect_fields(data: bytes) -> tuple[bytes, int, str, str]:
    """Decode Connect's data: host identifier, CNTLID, subsystem NQN and host NQN."""
    host_id, number = struct.unpack_from("<16sH", data)
    names = (data[256:512], data[512:768])
    subsystem_nqn, host_nqn = (name.split(b"\0")[0].decode(errors="replace") for name in names)
    return host_id, number, subsystem_nqn, host_nqn
