"""NVMe reservations: the target itself refuses the writes of other hosts.

A lease (``dlfs.block.lease``) excludes writers that follow its protocol. A reservation also stops a
writer that was paused until its lease was taken over. The host that holds the lease also holds a
reservation of the type Write Exclusive: every host may read, one may write. (Write Exclusive -
Registrants Only would let every registered host write, and a host must register before it can
preempt.) Reservations belong to hosts, not to processes: between two writers of one host, the lease
decides, or the deadline of a grant.

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

An import with workers needs writers on several hosts, while others take the lease in between. Its
coordinator therefore exchanges its reservation for one of the type Write Exclusive - Registrants
Only (``admit``), which outlives each of its leases, and each worker registers its host (``join``).
A lost worker's host is preempted (``expel``). A host that takes a free lease next to such a
reservation registers and leaves the reservation alone. It does not unregister when it releases the
lease, because a worker of the import may have come to rely on the registration. A host that takes
the lease of a dead writer preempts all others, the import's workers included, since it cannot know
which of them was the dead one: then the import has to be resumed. The end of the import exchanges
the reservation again, and removes the registrations of other hosts (``dismiss``). If a worker was
lost, the new reservation stays as a fence. Between the two commands of an exchange there is no
reservation; the caller has the lease.

A target that has reservations without this type is refused for such imports: the Write Exclusive
reservations of other writers would lock the workers out in between.

Not every target has reservations: ``Reservation.probe`` finds out.

Source: NVM Express Base Specification 2.0, sections 5.17.2.1 (ONCS), 5.27.1.25 (Host Identifier),
7.2 to 7.5 (the four commands), 8.19; NVM Express NVM Command Set Specification 1.0, section
4.1.5.1 (RESCAP).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from dlfs.base.units import KIB
from dlfs.block.nvme import CommandRunner, NvmeCommand, NvmeResult
from dlfs.errors import DeviceError, LeaseLostError, LimitError, LockedError

IDENTIFY_BYTES = 4096
REPORT_BYTES = 4096
"""Bytes of a reservation report that are read first: up to 63 registered controllers."""

REPORT_BYTES_MAX = 64 * KIB
"""Largest report that is read: 1023 registered controllers. The workers of one import may need a
controller each."""

STATUS_CONFLICT = 0x083
"""Reservation Conflict, a generic command status."""

_ONCS_OFFSET = 520
_ONCS_RESERVATIONS = 1 << 5
_RESCAP_OFFSET = 31
_RESCAP_WRITE_EXCLUSIVE = 1 << 1
_RESCAP_REGISTRANTS_ONLY = 1 << 3
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
"""Type of a writer's reservation (RTYPE): its host alone may write."""

REGISTRANTS_ONLY = 3
"""Type of the reservation of an import with workers (RTYPE): all registered hosts may write."""

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


def acquire(
    nsid: int, key: int, preempted_key: int | None = None, *, kind: int = WRITE_EXCLUSIVE
) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Acquire and its data.

    Args:
        nsid: namespace ID.
        key: this host's key.
        preempted_key: key of the host that loses its registration, and whose commands in flight
            are aborted; None preempts no host.
        kind: type of the reservation. Has no effect if the preempted host does not hold one.
    """
    action = 0 if preempted_key is None else _PREEMPT_AND_ABORT
    command = NvmeCommand(_ACQUIRE, nsid, cdw10=action | kind << 8)
    return command, bytearray(struct.pack("<QQ", key, preempted_key or 0))


def release(nsid: int, key: int, *, kind: int = WRITE_EXCLUSIVE) -> tuple[NvmeCommand, bytearray]:
    """Encode Reservation Release of a type, and its data."""
    command = NvmeCommand(_RELEASE, nsid, cdw10=kind << 8)
    return command, bytearray(struct.pack("<Q", key))


def report(nsid: int, length_bytes: int = REPORT_BYTES) -> NvmeCommand:
    """Encode Reservation Report of some bytes, a multiple of 4, in the extended form."""
    return NvmeCommand(_REPORT, nsid, cdw10=length_bytes // 4 - 1, cdw11=1)


def report_bytes(data: bytes | bytearray) -> int:
    """Return the length of a whole report of which the beginning was read."""
    _, _, count = _REPORT_HEADER.unpack_from(data)
    return _REPORT_HEADER_BYTES + int(count) * _CONTROLLER.size


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

    @property
    def is_dlfs(self) -> bool:
        """True if the host registered a key of DLFS."""
        return self.key >> 32 == KEY_TAG >> 32


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

    @property
    def admits_writers(self) -> bool:
        """True if an import of DLFS lets all registered hosts write."""
        holder = self.holder
        return self.kind == REGISTRANTS_ONLY and holder is not None and holder.is_dlfs

    def find(self, host_identifier: bytes) -> Registrant | None:
        """Return the registration of a host; None if it has none."""
        return next((r for r in self.registrants if r.host_identifier == host_identifier), None)


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
        can_admit: True if the target has the type Write Exclusive - Registrants Only.

    Attributes:
        key: the key of this host.
        can_admit: as given.
        admits_writers: True if ``acquire`` found, or ``admit`` made, a reservation with which all
            registered hosts may write.

    Threads: one at a time.
    """

    def __init__(
        self,
        runner: CommandRunner,
        nsid: int,
        uri: str,
        host_identifier: bytes,
        *,
        can_admit: bool,
    ) -> None:
        self._runner = runner
        self._nsid = nsid
        self._uri = uri
        self._host = host_identifier
        self._fences = False
        self.key = reservation_key(host_identifier)
        self.can_admit = can_admit
        self.admits_writers = False

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
        types = namespace[_RESCAP_OFFSET]
        if not types & _RESCAP_WRITE_EXCLUSIVE:
            return None
        host = bytearray(_HOST_IDENTIFIER_BYTES)
        answer = runner.run_admin(get_host_identifier(), host)
        if answer.status or not any(host):
            return None  # a host without an identifier cannot reserve
        can_admit = bool(types & _RESCAP_REGISTRANTS_ONLY)
        return cls(runner, nsid, uri, bytes(host), can_admit=can_admit)

    def report(self) -> ReservationReport:
        """Read the registered hosts and the holder from the target.

        Raises:
            LimitError: more controllers are registered than ``REPORT_BYTES_MAX`` has room for.
            DeviceError: the target is lost or refuses the command.
        """
        length_bytes = REPORT_BYTES
        while True:
            data = bytearray(length_bytes)
            answer = self._runner.run_io(report(self._nsid, length_bytes), data)
            _expect(answer, "report reservations", self._uri)
            needed_bytes = report_bytes(data)
            if needed_bytes <= length_bytes:
                return ReservationReport.decode(data)
            if needed_bytes > REPORT_BYTES_MAX:
                raise LimitError(
                    f"report reservations of {self._uri}: expected a report of at most "
                    f"{REPORT_BYTES_MAX} bytes, got {needed_bytes}"
                )
            length_bytes = needed_bytes

    def _unless_own(self, holder: Registrant | None) -> Registrant | None:
        return None if holder is None or holder.host_identifier == self._host else holder

    # ---- a writer's ------------------------------------------------------------------------------

    def preempt_reservation(self, *, expired: bool) -> None:
        """Preempt the reservation that an earlier DLFS writer left on a namespace.

        Called while the lease is free and about to be claimed. The reservation of an import with
        workers stays, unless a writer died; this host registers for it, so that it may write.

        Args:
            expired: True if the last holder of the lease died.

        Raises:
            LockedError: software other than DLFS holds a reservation for another host.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report()
        if found.admits_writers and not expired:
            self._register()
            return
        self._fences = self._fences or expired or found.holder is not None
        if found.holder is None:
            return
        holder = self._unless_own(found.holder)
        if holder is not None and not holder.is_dlfs:
            raise LockedError(
                f"lock {self._uri}: reserved by {holder}, by other software than DLFS"
            )
        if holder is not None or found.admits_writers:
            self._take(found, WRITE_EXCLUSIVE, "preempt the reservation of an earlier writer")

    def acquire(self) -> None:
        """Reserve the namespace for this host, or register for an import's reservation.

        The caller holds the lease.

        Raises:
            LockedError: another host has reserved it.
            DeviceError: the target is lost or refuses the command.
        """
        self._register()
        self.admits_writers = self.report().admits_writers
        if self.admits_writers:
            return
        command, data = acquire(self._nsid, self.key)
        try:
            self._run(command, data, "reserve")
        except LeaseLostError as error:
            holder = self._unless_own(self.report().holder)
            raise LockedError(
                f"lock {self._uri}: reserved by {holder or 'another host'}"
            ) from error

    def check_not_taken(self) -> None:
        """Check that no other host holds a reservation. Called after a reconnect.

        Raises:
            LeaseLostError: another host holds one, or has removed this one from an import's.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report()
        holder = self._unless_own(found.holder)
        shared = self.admits_writers and found.admits_writers and found.find(self._host)
        if holder is not None and not shared:
            raise LeaseLostError(f"write to {self._uri}: it is reserved by {holder} now")

    def release(self) -> None:
        """Release reservation and registration, unless they fence off a stopped host.

        Leaves those of an import with workers alone. The caller still holds the lease.

        Raises:
            LeaseLostError: another host has taken them.
            DeviceError: the target is lost or refuses the command.
        """
        if self._fences or self.admits_writers:
            return
        try:
            command, data = release(self._nsid, self.key)
            self._run(command, data, "release the reservation")
            command, data = unregister(self._nsid, self.key)
            self._run(command, data, "unregister from reservations")
        except LeaseLostError:
            if self._unless_own(self.report().holder) is not None:
                raise  # otherwise the target lost power and has forgotten this host

    # ---- an import's -----------------------------------------------------------------------------

    def admit(self) -> bool:
        """Let registered hosts write, after all other hosts were removed.

        The caller holds the lease.

        Returns:
            True if other hosts were registered, or this host's reservation is a fence.

        Raises:
            LeaseLostError: another host was faster.
            DeviceError: the target is lost or refuses the command.
        """
        removed = self._take(self.report(), REGISTRANTS_ONLY, "admit writers")
        self.admits_writers = True
        return removed or self._fences

    def dismiss(self, *, fence: bool) -> None:
        """Reserve the namespace for this host alone, after an import. The caller holds the lease.

        Args:
            fence: True if a worker was lost: then the reservation outlives the lease.

        Raises:
            LeaseLostError: another host was faster.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report()
        elsewhere = self._unless_own(found.holder) is not None  # the coordinator may be stopped
        self._take(found, WRITE_EXCLUSIVE, "dismiss the writers")
        self.admits_writers = False
        self._fences = self._fences or fence or elsewhere

    def join(self) -> None:
        """Register this host as that of a worker.

        Raises:
            LockedError: another host reserved the namespace, and not for an import with workers.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report()
        holder = self._unless_own(found.holder)
        if found.admits_writers:
            self._register()
        elif holder is not None:  # none: the target lost power, and the deadline alone decides
            raise LockedError(
                f"write to {self._uri} under grants: reserved by {holder}, and not for an import "
                "with workers"
            )

    def expel(self, key: int) -> bool:
        """Preempt a worker's host and abort its commands in flight.

        Args:
            key: key of the host, another one than this.

        Returns:
            False if no import's reservation is there, so that the target refuses no host.

        Raises:
            LeaseLostError: this host was itself preempted.
            DeviceError: the target is lost or refuses the command.
        """
        found = self.report()
        if not found.admits_writers:
            return False
        if any(registrant.key == key for registrant in found.registrants):
            self._preempt(key, REGISTRANTS_ONLY, "expel a worker's host")
        return True

    # ---- commands --------------------------------------------------------------------------------

    def _take(self, found: ReservationReport, kind: int, action: str) -> bool:
        """Hold a reservation of a type, and remove all other hosts of DLFS.

        Returns:
            True if there were such hosts.
        """
        self._register()
        holder = self._unless_own(found.holder)
        others = {r.key for r in found.registrants if r.is_dlfs and self._unless_own(r)}
        if holder is not None:
            others.add(holder.key)
        for key in others:
            self._preempt(key, kind, action)
        if holder is not None or (found.holder is not None and found.kind == kind):
            return bool(others)
        if found.holder is not None:
            self._run(*release(self._nsid, self.key, kind=found.kind), action)
        self._run(*acquire(self._nsid, self.key, kind=kind), action)
        return bool(others)

    def _preempt(self, key: int, kind: int, action: str) -> None:
        self._run(*acquire(self._nsid, self.key, preempted_key=key, kind=kind), action)

    def _register(self) -> None:
        command, data = register(self._nsid, self.key)
        try:
            self._run(command, data, "register for a reservation")
        except LeaseLostError as error:
            raise LockedError(
                f"lock {self._uri}: this host is registered already, with another key than "
                f"0x{self.key:016x}: by other software than DLFS"
            ) from error

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
