"""NVMe reservations: the target itself refuses the writes of other hosts.

A lease (``dlfs.block.lease``) excludes writers that follow its protocol. A reservation also stops a
writer that was paused until its lease was taken over. The host that holds the lease also holds a
reservation of the type Write Exclusive: every host may read, one may write. (Write Exclusive -
Registrants Only would let every registered host write, and a host must register before it can
preempt.) Reservations belong to hosts, not to processes: between two writers of one host, the lease
decides.

The key of a host is derived from its host identifier, so that all its processes and paths use the
same one. The upper half of the key marks it as DLFS's. Only the holder of the lease changes the
reservation, with one exception: before a writer claims the lease of a dead holder, it preempts that
host's reservation and aborts its commands in flight. The holder releases the reservation before the
lease.

A host that took over from a dead holder keeps its reservation when it releases the lease, as a
fence: the other host may have been stopped only, and could otherwise write when it continues. A
reservation of DLFS next to a free lease is such a fence. The next host preempts it and then keeps
its own in turn. Reservations of other software are not touched. Reservations do not survive a power
loss of the target (CPTPL 0); from then on, the lease alone decides.

Not every target has reservations: ``Reservation.probe`` finds out.

Source: NVM Express Base Specification 2.0, sections 5.17.2.1 (ONCS), 5.27.1.25 (Host Identifier),
7.2 to 7.5 (the four commands), 8.19; NVM Express NVM Command Set Specification 1.0, section
4.1.5.1 (RESCAP).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from dlfs.block.nvme import CommandRunner, NvmeCommand, NvmeResult
from dlfs.errors import DeviceError, LeaseLostError, LockedError

IDENTIFY_BYTES = 4096
REPORT_BYTES = 4096
"""Bytes of a reservation report that are read: up to 63 registered controllers."""

STATUS_CONFLICT = 0x083
"""Reservation Conflict, a generic command status."""

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


_IDENTIFY, _GET_FEATURES = 0x06, 0x0A
_REGISTER, _REPORT, _ACQUIRE, _RELEASE = 0x0D, 0x0E, 0x11, 0x15
_UNREGISTER = 1  # an action of _REGISTER
_PREEMPT_AND_ABORT = 2  # an action of _ACQUIRE

WRITE_EXCLUSIVE = 1
"""Type of DLFS's reservations (RTYPE)."""

KEY_TAG = int.from_bytes(b"DLFS", "big") << 32
"""Upper half of DLFS's keys."""

_IGNORE_EXISTING_KEY = 1 << 3


# ---- commands ------------------------------------------------------------------------------------


def identify_controller() -> NvmeCommand:
    """Encode Identify Controller (CNS 1)."""
    return NvmeCommand(_IDENTIFY, cdw10=1)


def identify_namespace(nsid: int) -> NvmeCommand:
    """Encode Identify Namespace (CNS 0)."""
    return NvmeCommand(_IDENTIFY, nsid=nsid, cdw10=0)


def get_host_identifier() -> NvmeCommand:
    """Encode Get Features of the 128-bit host identifier."""
    return NvmeCommand(
        _GET_FEATURES, cdw10=_FEATURE_HOST_IDENTIFIER, cdw11=_EXTENDED_HOST_IDENTIFIER
    )


def register(nsid: int, key: int) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Register that makes ``key`` this host's, whatever it was, and its data."""
    command = NvmeCommand(_REGISTER, nsid, cdw10=_IGNORE_EXISTING_KEY)
    return command, bytearray(struct.pack("<QQ", 0, key))


def unregister(nsid: int, key: int) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Register that removes this host's key, and its data."""
    return NvmeCommand(_REGISTER, nsid, cdw10=_UNREGISTER), bytearray(struct.pack("<QQ", key, 0))


def acquire(nsid: int, key: int, preempted_key: int | None = None) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Acquire, type Write Exclusive, and its data.

    Args:
        nsid: namespace ID.
        key: this host's key.
        preempted_key: key of the host that loses its registration, and whose commands in flight
            are aborted; None preempts no host.
    """
    action = 0 if preempted_key is None else _PREEMPT_AND_ABORT
    command = NvmeCommand(_ACQUIRE, nsid, cdw10=action | WRITE_EXCLUSIVE << 8)
    return command, bytearray(struct.pack("<QQ", key, preempted_key or 0))


def release(nsid: int, key: int) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Release, type Write Exclusive, and its data."""
    command = NvmeCommand(_RELEASE, nsid, cdw10=WRITE_EXCLUSIVE << 8)
    return command, bytearray(struct.pack("<Q", key))


def report(nsid: int) -> NvmeCommand:
    """Encode Reservation Report of ``REPORT_BYTES``, in the extended form."""
    return NvmeCommand(_REPORT, nsid, cdw10=REPORT_BYTES // 4 - 1, cdw11=1)


# ---- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registrant:
    """A registered host, through one of its controllers.

    Attributes:
        controller: controller ID.
        holds: True if the host holds the reservation.
        key: the key that it registered.
        host_identifier: 16 bytes.
    """

    controller: int
    holds: bool
    key: int
    host_identifier: bytes

    def __str__(self) -> str:
        return f"the host with identifier {self.host_identifier.hex()} (key 0x{self.key:016x})"


@dataclass(frozen=True)
class ReservationReport:
    """The registered hosts of a namespace and the holder of its reservation."""

    generation: int
    """Counter of changes of registrations."""
    kind: int
    """Type of the reservation; 0: there is none."""
    registrants: tuple[Registrant, ...]

    @classmethod
    def decode(cls, data: bytes | bytearray) -> ReservationReport:
        """Decode a report in the extended form; ignores registrants beyond the end of ``data``."""
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
        """Holder of the reservation; None if there is none."""
        return next((r for r in self.registrants if self.kind and r.holds), None)


# ---- a host's reservation ------------------------------------------------------------------------


def reservation_key(host_identifier: bytes) -> int:
    """Return the key that a host registers."""
    return KEY_TAG | int.from_bytes(hashlib.sha256(host_identifier).digest()[:4], "big")


class Reservation:
    """This host's reservation of one namespace.

    Args:
        runner: runs commands on its controller.
        nsid: namespace ID.
        uri: URI of the device, for error messages.
        host_identifier: this host's, 16 bytes.

    Threads: one at a time.
    """

    def __init__(self, runner: CommandRunner, nsid: int, uri: str, host_identifier: bytes) -> None:
        self._runner = runner
        self._nsid = nsid
        self._uri = uri
        self._host = host_identifier
        self._key = reservation_key(host_identifier)
        self._fences = False

    @classmethod
    def probe(cls, runner: CommandRunner, nsid: int, uri: str) -> Reservation | None:
        """Find out if a target has usable reservations; return None if not.

        Raises:
            DeviceError: the target is lost or refuses Identify.
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
        """Read the registered hosts and the holder from the target.

        Raises:
            DeviceError: the target is lost or refuses the command.
        """
        data = bytearray(REPORT_BYTES)
        answer = self._runner.run_io(report(self._nsid), data)
        _expect(answer, "report reservations", self._uri)
        return ReservationReport.decode(data)

    def _holder_elsewhere(self) -> Registrant | None:
        return self._unless_own(self.report().holder)

    def _unless_own(self, holder: Registrant | None) -> Registrant | None:
        return None if holder is None or holder.host_identifier == self._host else holder

    def preempt_reservation(self, *, expired: bool) -> None:
        """Preempt the reservation that an earlier DLFS writer left on a namespace.

        Called while the lease is free and about to be claimed.

        Args:
            expired: True if the last holder of the lease died.

        Raises:
            LockedError: software other than DLFS holds a reservation for another host.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report().holder
        self._fences = self._fences or expired or found is not None
        holder = self._unless_own(found)
        if holder is None:
            return
        if holder.key >> 32 != KEY_TAG >> 32:
            raise LockedError(
                f"lock {self._uri}: reserved by {holder}, by other software than DLFS"
            )
        self._register()
        command, data = acquire(self._nsid, self._key, preempted_key=holder.key)
        self._run(command, data, "preempt the reservation of an earlier writer")

    def acquire(self) -> None:
        """Reserve the namespace for this host. The caller holds the lease.

        Raises:
            LockedError: another host has reserved it.
            DeviceError: the target is lost or refuses the command.
        """
        self._register()
        command, data = acquire(self._nsid, self._key)
        try:
            self._run(command, data, "reserve")
        except LeaseLostError as error:
            raise LockedError(
                f"lock {self._uri}: reserved by {self._holder_elsewhere() or 'another host'}"
            ) from error

    def check_not_taken(self) -> None:
        """Check that no other host holds a reservation. Called after a reconnect.

        Raises:
            LeaseLostError: another host holds one.
            DeviceError: the target is lost or refuses the command.
        """
        holder = self._holder_elsewhere()
        if holder is not None:
            raise LeaseLostError(f"write to {self._uri}: it is reserved by {holder} now")

    def _register(self) -> None:
        command, data = register(self._nsid, self._key)
        try:
            self._run(command, data, "register for a reservation")
        except LeaseLostError as error:
            raise LockedError(
                f"lock {self._uri}: this host is registered already, with another key than "
                f"0x{self._key:016x}: by other software than DLFS"
            ) from error

    def release(self) -> None:
        """Release reservation and registration, unless they fence off a stopped host.

        The caller still holds the lease.

        Raises:
            LeaseLostError: another host has taken them.
            DeviceError: the target is lost or refuses the command.
        """
        if self._fences:
            return
        try:
            command, data = release(self._nsid, self._key)
            self._run(command, data, "release the reservation")
            command, data = unregister(self._nsid, self._key)
            self._run(command, data, "unregister from reservations")
        except LeaseLostError:
            if self._holder_elsewhere() is not None:
                raise  # otherwise the target lost power and has forgotten this host

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
