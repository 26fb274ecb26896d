"""NVMe reservations: the target itself refuses the writes of other hosts.

A lease (``dlfs.block.lease``) keeps honest writers apart; a reservation stops one that was paused
for so long that its lease was taken over. The host that holds the lease also holds a reservation of
the type Write Exclusive: every host may read, one may write. (Write Exclusive - Registrants Only
would let any host write that has registered, and a host must register before it can preempt.)
Reservations belong to hosts, not to processes: between two writers of one host, the lease decides.

The key of a host is made of its host identifier, so that all its processes and paths use the same;
its upper half tells that DLFS made it. A reservation is changed by the holder of the lease only,
with one exception: that of a host whose lease was seen to be dead is preempted, and what it has in
flight aborted, before the lease is claimed. It is released before the lease is.

A host that took over from a dead one is the exception to that: it keeps its reservation when it
gives the lease back, as a fence, for the other may only have stood still, and would write again
where nothing is reserved. A reservation of DLFS beside a free lease is such a fence: the next host
preempts it, and keeps its own in turn. Reservations of other software are left alone. Nothing is
kept through a power loss of the target (CPTPL 0): from there on, the lease alone decides.

Not every target has reservations: ``probe`` asks.

Source: NVM Express Base Specification 2.0, sections 5.17.2.1 (ONCS), 5.27.1.25 (Host Identifier),
7.2 to 7.5 (the four commands), 8.19; NVM Express NVM Command Set Specification 1.0, section
4.1.5.1 (RESCAP).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from dlfs.block.nvme import CommandRunner, NvmeCommand, NvmeResult
from dlfs.errors import DeviceError, LeaseLostError, LockedError

IDENTIFY_BYTES = 4096
REPORT_BYTES = 4096
"""Of a report that is read: up to 63 registered controllers."""

STATUS_CONFLICT = 0x083
"""Reservation Conflict, of the generic command status."""

_ONCS_OFFSET = 520
_ONCS_RESERVATIONS = 1 << 5
_RESCAP_OFFSET = 31
_RESCAP_WRITE_EXCLUSIVE = 1 << 1
_FEATURE_HOST_IDENTIFIER = 0x81
_EXTENDED_HOST_IDENTIFIER = 1
_HOST_IDENTIFIER_BYTES = 16

_REPORT_HEADER = struct.Struct("<I B H")
_REPORT_HEADER_BYTES = 64
_CONTROLLER = struct.Struct("<H B 5x Q 16s 32x")
_HOLDS = 1


class AdminOpcode(IntEnum):
    """Of the admin commands used here."""

    IDENTIFY = 0x06
    GET_FEATURES = 0x0A


class Opcode(IntEnum):
    """Of the reservation commands."""

    REGISTER = 0x0D
    REPORT = 0x0E
    ACQUIRE = 0x11
    RELEASE = 0x15


class RegisterAction(IntEnum):
    """What a Reservation Register command does (RREGA)."""

    REGISTER = 0
    UNREGISTER = 1


class AcquireAction(IntEnum):
    """What a Reservation Acquire command does (RACQA)."""

    ACQUIRE = 0
    PREEMPT_AND_ABORT = 2


WRITE_EXCLUSIVE = 1
"""The type of our reservations (RTYPE)."""

KEY_TAG = int.from_bytes(b"DLFS", "big") << 32
"""The upper half of our keys."""

_IGNORE_EXISTING_KEY = 1 << 3
_RELEASE = 0


# ---- commands ------------------------------------------------------------------------------------


def identify_controller() -> NvmeCommand:
    """Identify, CNS 1."""
    return NvmeCommand(AdminOpcode.IDENTIFY, cdw10=1)


def identify_namespace(nsid: int) -> NvmeCommand:
    """Identify, CNS 0."""
    return NvmeCommand(AdminOpcode.IDENTIFY, nsid=nsid, cdw10=0)


def get_host_identifier() -> NvmeCommand:
    """Get Features, the host identifier of 128 bits."""
    return NvmeCommand(
        AdminOpcode.GET_FEATURES, cdw10=_FEATURE_HOST_IDENTIFIER, cdw11=_EXTENDED_HOST_IDENTIFIER
    )


def register(nsid: int, action: RegisterAction, key: int) -> tuple[NvmeCommand, bytearray]:
    """Reservation Register with its data.

    Args:
        nsid: of the namespace.
        action: REGISTER makes ``key`` this host's, whatever it was; UNREGISTER removes it.
        key: 64 bits, not 0.
    """
    if action == RegisterAction.REGISTER:
        command = NvmeCommand(Opcode.REGISTER, nsid, cdw10=action | _IGNORE_EXISTING_KEY)
        return command, bytearray(struct.pack("<QQ", 0, key))
    return NvmeCommand(Opcode.REGISTER, nsid, cdw10=action), bytearray(struct.pack("<QQ", key, 0))


def acquire(
    nsid: int, action: AcquireAction, key: int, preempted_key: int = 0
) -> tuple[NvmeCommand, bytearray]:
    """Reservation Acquire, Write Exclusive, with its data.

    Args:
        nsid: of the namespace.
        action: ACQUIRE, or PREEMPT_AND_ABORT the host that has ``preempted_key``.
        key: this host's.
        preempted_key: of the host that is to lose its registration.
    """
    command = NvmeCommand(Opcode.ACQUIRE, nsid, cdw10=action | WRITE_EXCLUSIVE << 8)
    return command, bytearray(struct.pack("<QQ", key, preempted_key))


def release(nsid: int, key: int) -> tuple[NvmeCommand, bytearray]:
    """Reservation Release, Write Exclusive, with its data."""
    command = NvmeCommand(Opcode.RELEASE, nsid, cdw10=_RELEASE | WRITE_EXCLUSIVE << 8)
    return command, bytearray(struct.pack("<Q", key))


def report(nsid: int) -> NvmeCommand:
    """Reservation Report of ``REPORT_BYTES``, in the extended form."""
    return NvmeCommand(Opcode.REPORT, nsid, cdw10=REPORT_BYTES // 4 - 1, cdw11=1)


# ---- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registrant:
    """A host that has registered, through one of its controllers."""

    controller: int
    holds: bool
    key: int
    host_identifier: bytes

    def __str__(self) -> str:
        return f"the host with identifier {self.host_identifier.hex()} (key 0x{self.key:016x})"


@dataclass(frozen=True)
class ReservationReport:
    """Who has registered with a namespace, and who holds the reservation."""

    generation: int
    kind: int
    """0: there is no reservation."""
    registrants: tuple[Registrant, ...]

    @classmethod
    def decode(cls, data: bytes | bytearray) -> ReservationReport:
        """Read a report in the extended form; what it lacks in length is not there."""
        padded = bytes(data).ljust(_REPORT_HEADER_BYTES, b"\0")
        generation, kind, count = _REPORT_HEADER.unpack_from(padded)
        found = []
        for i in range(count):
            start = _REPORT_HEADER_BYTES + i * _CONTROLLER.size
            if start + _CONTROLLER.size > len(padded):
                break
            controller, status, key, host = _CONTROLLER.unpack_from(padded, start)
            found.append(Registrant(controller, bool(status & _HOLDS), key, host))
        return cls(generation, kind, tuple(found))

    @property
    def holder(self) -> Registrant | None:
        """Who holds the reservation."""
        return next((r for r in self.registrants if self.kind and r.holds), None)


# ---- a host's reservation ------------------------------------------------------------------------


def key_of(host_identifier: bytes) -> int:
    """The key that a host registers."""
    return KEY_TAG | int.from_bytes(hashlib.sha256(host_identifier).digest()[:4], "big")


class Reservation:
    """This host's reservation of one namespace.

    Args:
        runner: of its controller.
        nsid: of the namespace.
        uri: of the device, for errors.
        host_identifier: 16 bytes, of this host.

    Threads: one at a time.
    """

    def __init__(self, runner: CommandRunner, nsid: int, uri: str, host_identifier: bytes) -> None:
        self._runner = runner
        self._nsid = nsid
        self._uri = uri
        self._host = host_identifier
        self._key = key_of(host_identifier)
        self._fences = False

    @classmethod
    def probe(cls, runner: CommandRunner, nsid: int, uri: str) -> Reservation | None:
        """Ask a target for reservations; None where it has none that can be used.

        Raises:
            DeviceError: the target is gone or refuses to identify itself.
        """
        controller = bytearray(IDENTIFY_BYTES)
        _expect(runner.run_admin(identify_controller(), controller), "identify the controller", uri)
        if not int.from_bytes(controller[_ONCS_OFFSET : _ONCS_OFFSET + 2], "little") & (
            _ONCS_RESERVATIONS
        ):
            return None
        namespace = bytearray(IDENTIFY_BYTES)
        _expect(
            runner.run_admin(identify_namespace(nsid), namespace), f"identify namespace {nsid}", uri
        )
        if not namespace[_RESCAP_OFFSET] & _RESCAP_WRITE_EXCLUSIVE:
            return None
        host = bytearray(_HOST_IDENTIFIER_BYTES)
        answer = runner.run_admin(get_host_identifier(), host)
        if answer.status or not any(host):
            return None  # a host without an identifier cannot reserve
        return cls(runner, nsid, uri, bytes(host))

    def report(self) -> ReservationReport:
        """Who has registered and who holds.

        Raises:
            DeviceError: the target is gone, or refuses.
        """
        data = bytearray(REPORT_BYTES)
        answer = self._runner.run_io(report(self._nsid), data)
        _expect(answer, "report reservations", self._uri)
        return ReservationReport.decode(data)

    def _holder_elsewhere(self) -> Registrant | None:
        return self._unless_own(self.report().holder)

    def _unless_own(self, holder: Registrant | None) -> Registrant | None:
        return None if holder is None or holder.host_identifier == self._host else holder

    def make_way(self, *, lapsed: bool) -> None:
        """See that this host may write to a namespace whose lease is free.

        Args:
            lapsed: the lease was left by a holder who died: its reservation is preempted.

        Raises:
            LockedError: another host has a reservation, by other software than DLFS.
            DeviceError: the target is gone, or refuses.
        """
        found = self.report().holder
        self._fences = self._fences or lapsed or found is not None
        holder = self._unless_own(found)
        if holder is None:
            return
        if holder.key >> 32 != KEY_TAG >> 32:
            raise LockedError(
                f"lock {self._uri}: reserved by {holder}, by other software than DLFS"
            )
        self._register()
        command, data = acquire(
            self._nsid, AcquireAction.PREEMPT_AND_ABORT, self._key, preempted_key=holder.key
        )
        self._run(command, data, "preempt the reservation of an earlier writer")

    def take(self) -> None:
        """Reserve the namespace for this host; call it with the lease.

        Raises:
            LockedError: another host has reserved it.
            DeviceError: the target is gone, or refuses.
        """
        self._register()
        command, data = acquire(self._nsid, AcquireAction.ACQUIRE, self._key)
        try:
            self._run(command, data, "reserve")
        except LeaseLostError as error:
            raise LockedError(
                f"lock {self._uri}: reserved by {self._holder_elsewhere() or 'another host'}"
            ) from error

    def check_not_taken(self) -> None:
        """Check that no other host holds a reservation; call it after a reconnect.

        Raises:
            LeaseLostError: another host does.
            DeviceError: the target is gone, or refuses.
        """
        holder = self._holder_elsewhere()
        if holder is not None:
            raise LeaseLostError(f"write to {self._uri}: it is reserved by {holder} now")

    def _register(self) -> None:
        command, data = register(self._nsid, RegisterAction.REGISTER, self._key)
        try:
            self._run(command, data, "register for a reservation")
        except LeaseLostError as error:
            raise LockedError(
                f"lock {self._uri}: this host is registered already, with another key than "
                f"0x{self._key:016x}: by other software than DLFS"
            ) from error

    def give_back(self) -> None:
        """Release reservation and registration, unless they fence a host that may stand still.

        Call it while the lease is held.

        Raises:
            LeaseLostError: another host has taken them.
            DeviceError: the target is gone, or refuses.
        """
        if self._fences:
            return
        try:
            command, data = release(self._nsid, self._key)
            self._run(command, data, "release the reservation")
            command, data = register(self._nsid, RegisterAction.UNREGISTER, self._key)
            self._run(command, data, "unregister from reservations")
        except LeaseLostError:
            if self._holder_elsewhere() is not None:
                raise  # else a target that lost its power has forgotten this host

    def _run(self, command: NvmeCommand, data: bytearray, action: str) -> None:
        answer = self._runner.run_io(command, data, to_device=True)
        if answer.status == STATUS_CONFLICT:
            raise LeaseLostError(
                f"{action} of {self._uri}: reservation conflict: another host has reserved the "
                f"namespace and fenced this one off"
            )
        _expect(answer, action, self._uri)


def _expect(answer: NvmeResult, action: str, uri: str) -> None:
    if answer.status:
        raise DeviceError(
            f"{action} of {uri}: expected success, got NVMe status 0x{answer.status:03x}"
        )
