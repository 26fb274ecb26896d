"""Block devices in memory, for tests and trials.

A registry of the process holds them by name. Closing a device keeps its bytes, opening the name
again finds them, and ``MemoryDevice.forget`` frees them. A forked child has its own copy of all of
them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from dlfs._native.device import NativeDevice
from dlfs.base.forks import Lock
from dlfs.block.device import NativeBackedDevice
from dlfs.block.lock import HolderRecord
from dlfs.errors import NotFoundError, UsageError


@dataclass
class _Entry:
    native: NativeDevice
    users: int = 0
    forgotten: bool = False
    locked_by: weakref.ref[MemoryDevice] | None = None
    """The device that has the lock, unless it was collected."""
    mutex: Lock = field(default_factory=Lock)


_registry: dict[str, _Entry] = {}
_registry_mutex = Lock()

BLOCK_BYTES = 512
"""Default block size of a device in memory, in bytes: the smallest, which suits every volume."""


class MemoryDevice(NativeBackedDevice):
    """A device in memory: a new one, or the existing one of this name.

    Args:
        name: name in the process's registry.
        size_bytes: size, a multiple of ``block_bytes``. That of an existing device must be equal.
            None: the device must exist.
        block_bytes: a power of two, 512..65536.
        writable: True to open it for writing too.

    Raises:
        NotFoundError: there is no device of that name, and no size was given to create one.
        UsageError: the sizes do not fit each other, or differ from the existing device's.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int | None = None,
        *,
        block_bytes: int | None = None,
        writable: bool = False,
    ) -> None:
        with _registry_mutex:
            entry = _registry.get(name)
            if entry is None:
                entry = _Entry(self._make(name, size_bytes, block_bytes or BLOCK_BYTES))
                _registry[name] = entry
            native = entry.native
            for what, expected, got in (
                ("bytes", size_bytes, native.size_bytes),
                ("bytes a block", block_bytes, native.block_bytes),
            ):
                if expected is not None and expected != got:
                    raise UsageError(f"open mem:{name}: expected {expected} {what}, it has {got}")
            entry.users += 1
        self.name = name
        self._entry = entry
        super().__init__(native, uri=native.uri, identity=f"memory:{name}", writable=writable)

    @staticmethod
    def _make(name: str, size_bytes: int | None, block_bytes: int) -> NativeDevice:
        if size_bytes is None:
            raise NotFoundError(
                f"open mem:{name}: no such device in this process; mem:{name}?size=64MiB makes one"
            )
        uri = f"mem:{name}?size={size_bytes}"
        if block_bytes != BLOCK_BYTES:
            uri += f"&block={block_bytes}"
        return NativeDevice.memory(size_bytes, block_bytes, uri=uri)

    @staticmethod
    def exists(name: str) -> bool:
        """Return True if this process has a device of this name."""
        with _registry_mutex:
            return name in _registry

    @staticmethod
    def forget(name: str) -> None:
        """Free a device and its bytes once no object has it open. Ignores an unknown name."""
        with _registry_mutex:
            entry = _registry.pop(name, None)
            if entry is not None:
                entry.forgotten = True
                if entry.users == 0:
                    entry.native.close()

    def check_can_grant(self) -> None:
        """Raises UsageError: no other process reaches it."""
        raise UsageError(
            f"grant writing to {self.uri}: expected a device that other processes reach, got one "
            "in the memory of this process"
        )

    def _acquire(self, _: HolderRecord) -> bool:
        with self._entry.mutex:
            holder = self._entry.locked_by
            if holder is not None and holder() is not None:
                return False
            self._entry.locked_by = weakref.ref(self)
            return True

    def _release(self) -> None:
        with self._entry.mutex:
            if self._entry.locked_by is not None and self._entry.locked_by() is self:
                self._entry.locked_by = None

    def _close_native(self, native: NativeDevice) -> None:
        with _registry_mutex:
            self._entry.users -= 1
            if self._entry.forgotten and self._entry.users == 0:
                native.close()
