"""Reservations of one namespace: its registrants, its holder, and who may read and write it.

A registrant is a host with its 128-bit identifier, so that it outlives connections and controllers.
Without persistence through power loss (PTPL) a power loss of the target removes registrants.

Source: NVM Express Base Specification 2.0, sections 8.19 and 7.1 to 7.6.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum

from tests.support.nvme.command import Status

_KEYS = struct.Struct("<QQ")
_KEY = struct.Struct("<Q")
CAPABILITIES = 0xFF  # PTPL, all six types, IEKEY as of 1.3


class ReservationType(IntEnum):
    """Type of a reservation (RTYPE)."""

    NONE = 0
    WRITE_EXCLUSIVE = 1
    EXCLUSIVE_ACCESS = 2
    WRITE_EXCLUSIVE_REGISTRANTS = 3
    EXCLUSIVE_ACCESS_REGISTRANTS = 4
    WRITE_EXCLUSIVE_ALL = 5
    EXCLUSIVE_ACCESS_ALL = 6


_OF_ALL = (ReservationType.WRITE_EXCLUSIVE_ALL, ReservationType.EXCLUSIVE_ACCESS_ALL)
_READS_SHARED = (
    ReservationType.NONE,
    ReservationType.WRITE_EXCLUSIVE,
    ReservationType.WRITE_EXCLUSIVE_REGISTRANTS,
    ReservationType.WRITE_EXCLUSIVE_ALL,
)


@dataclass
class Reservations:
    """The reservations of one namespace.

    Attributes:
        keys: key of each registrant, by host identifier.
        holder: host identifier of the holder; with the types All Registrants, all are holders.
        kind: type of the reservation; NONE: there is none.
        generation: number of changes of registrations.
        persistent: True if registrations survive a power loss.
    """

    keys: dict[bytes, int] = field(default_factory=dict)
    holder: bytes | None = None
    kind: ReservationType = ReservationType.NONE
    generation: int = 0
    persistent: bool = False

    def allows(self, host: bytes, *, write: bool) -> bool:
        """Return True if a host may read or, with ``write``, write."""
        if self.kind == ReservationType.NONE or (not write and self.kind in _READS_SHARED):
            return True
        if self.kind in (ReservationType.WRITE_EXCLUSIVE, ReservationType.EXCLUSIVE_ACCESS):
            return host == self.holder
        return host in self.keys

    def holds(self, host: bytes) -> bool:
        """Return True if a host holds the reservation."""
        if self.kind in _OF_ALL:
            return host in self.keys
        return self.kind != ReservationType.NONE and host == self.holder

    def lose_power(self) -> None:
        """Remove everything unless it is persistent."""
        if not self.persistent:
            self.keys, self.holder, self.kind = {}, None, ReservationType.NONE
            self.generation = 0

    # ---- commands --------------------------------------------------------------------------------

    def register(self, host: bytes, cdw10: int, data: bytes) -> int:
        """Run Reservation Register and return its status."""
        current, new = _KEYS.unpack_from(data)
        action, ignore = cdw10 & 7, bool(cdw10 & 8)
        if action > 2:
            return Status.INVALID_FIELD
        known = self.keys.get(host)
        if action == 0:
            if known not in (None, new):
                return Status.RESERVATION_CONFLICT
            self.keys[host] = new
        else:
            if known is None or (known != current and not ignore):
                return Status.RESERVATION_CONFLICT
            if action == 1:
                self._unregister(host)
            else:
                self.keys[host] = new
        if cdw10 >> 30 in (2, 3):
            self.persistent = cdw10 >> 30 == 3
        self.generation += 1
        return Status.SUCCESS

    def acquire(self, host: bytes, cdw10: int, data: bytes) -> int:
        """Run Reservation Acquire and return its status."""
        current, preempted = _KEYS.unpack_from(data)
        action, kind = cdw10 & 7, cdw10 >> 8 & 0xFF
        if cdw10 & 8 or action > 2 or not 1 <= kind <= 6:
            return Status.INVALID_FIELD
        if self.keys.get(host) != current:
            return Status.RESERVATION_CONFLICT
        if action:
            return self._preempt(host, ReservationType(kind), preempted)
        if self.kind != ReservationType.NONE:
            same = self.holds(host) and self.kind == kind
            return Status.SUCCESS if same else Status.RESERVATION_CONFLICT
        self.holder, self.kind = host, ReservationType(kind)
        return Status.SUCCESS

    def release(self, host: bytes, cdw10: int, data: bytes) -> int:
        """Run Reservation Release and return its status."""
        (current,) = _KEY.unpack_from(data)
        action, kind = cdw10 & 7, cdw10 >> 8 & 0xFF
        if cdw10 & 8 or action > 1:
            return Status.INVALID_FIELD
        if self.keys.get(host) != current:
            return Status.RESERVATION_CONFLICT
        if action == 1:
            self.keys.clear()
            self._end()
            self.generation += 1
            return Status.SUCCESS
        if not self.holds(host):
            return Status.SUCCESS
        if kind != self.kind:
            return Status.INVALID_FIELD
        self._end()
        return Status.SUCCESS

    def report(self, controllers: dict[bytes, int]) -> bytes:
        """Encode the extended report; ``controllers`` has a controller's number by host."""
        head = struct.pack("<IBH2xB", self.generation, self.kind, len(self.keys), self.persistent)
        parts = [head.ljust(64, b"\0")]
        for host, key in self.keys.items():
            number = controllers.get(host, 0xFFFF)
            entry = struct.pack("<HB5xQ", number, self.holds(host), key) + host
            parts.append(entry.ljust(64, b"\0"))
        return b"".join(parts)

    # ---- parts -----------------------------------------------------------------------------------

    def _end(self) -> None:
        self.holder, self.kind = None, ReservationType.NONE

    def _unregister(self, host: bytes) -> None:
        was_holder = self.holder == host
        del self.keys[host]
        if self.kind in _OF_ALL:
            if not self.keys:
                self._end()
        elif was_holder:
            self._end()

    def _preempt(self, host: bytes, kind: ReservationType, key: int) -> int:
        if self.kind in _OF_ALL and key == 0:
            self.keys = {host: self.keys[host]}
            self.holder, self.kind = host, kind
            self.generation += 1
            return Status.SUCCESS
        if key == 0:
            return Status.INVALID_FIELD
        victims = [other for other, its in self.keys.items() if its == key]
        if not victims:
            return Status.RESERVATION_CONFLICT
        takes = self.kind not in _OF_ALL and self.holder in victims
        for victim in victims:
            if victim != host:
                self._unregister(victim)
        if takes:
            self.holder, self.kind = host, kind
        self.generation += 1
        return Status.SUCCESS
