"""``SampleMemory``: the mapping of a reader's sample memory (the arena) in this process.

A program that tells a device of the mapping, such as one that page-locks it for a GPU, registers as
its user. The reader closes its users when it is closed, before the memory can be unmapped.

Threads: any.
"""

from __future__ import annotations

from typing import Protocol

from dlfs._native.handle import Handle
from dlfs.base.closing import LiveObjects


class MemoryUser(Protocol):
    """An object that must be closed before the sample memory is unmapped."""

    def close(self) -> None:
        """Stop using the memory. Idempotent; any thread."""


class SampleMemory:
    """The mapping of a reader's sample memory, which stays mapped while this object is open.

    Args:
        owner: owner of the native object that has the mapping.
        address: address of the first byte.
        size_bytes: length of the mapping in bytes.
        writable: False if this process has mapped it read-only, as clients of a service do.

    Attributes:
        owner: as given; None once this is closed.
        closed: True once ``close`` was called.
    """

    def __init__(self, owner: Handle, address: int, size_bytes: int, *, writable: bool) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.writable = writable
        self.closed = False
        self.owner: Handle | None = owner
        self._users: LiveObjects[MemoryUser] = LiveObjects()

    def contains(self, address: int) -> bool:
        """Return True if an address lies in the mapping."""
        return self.address <= address < self.address + self.size_bytes

    def add_user(self, user: MemoryUser) -> None:
        """Close a user of the mapping before the memory is unmapped; now, if this is closed.

        The user is referred to weakly.
        """
        self._users.add(user)
        if self.closed:
            user.close()

    def close(self) -> None:
        """Close all users, and give the mapping up. Idempotent."""
        self.closed = True
        for user in self._users:
            user.close()
        self.owner = None
