"""A placeholder for a device that cannot be opened.

A volume with replicas can be read although a member is missing. A ``MissingDevice`` then stands in
the list of its devices. Every use of it fails with the reason why the device cannot be opened.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

from dlfs.base.closing import Closing
from dlfs.errors import DeviceLostError, DlfsError, drop_tracebacks

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike, NativeDevice
    from dlfs.block.device import QueuePair


class MissingDevice(Closing):
    """A device that cannot be opened.

    Args:
        uri: URI of the device, also for error messages.
        reason: why it cannot be opened.
        given: True if the caller gave the URI, so that it can be tried again.
        refused: True if only a record on a device names the URI, and it must not be opened.

    Threads: any at once.
    """

    size_bytes = 0
    block_bytes = 512
    writable = False
    operation_timeout_ms = 0
    queue_pairs_max = 0
    gap_bytes = 0
    drops_reads = True
    grants_expire = False
    lease_times = None
    writer_key = None
    writers_admitted = False

    def __init__(
        self, uri: str, reason: DlfsError, *, given: bool = True, refused: bool = False
    ) -> None:
        self.uri = uri
        drop_tracebacks(reason)
        self.reason = reason
        self.given = given
        self.refused = refused

    def __repr__(self) -> str:
        return f"<MissingDevice {self.uri}: {self.reason}>"

    @property
    def identity(self) -> str:
        """Identifier of this object: it is unknown which device it is."""
        return f"missing:{id(self)}"

    @property
    def native(self) -> NativeDevice:
        """Raises DeviceLostError."""
        self._fail("use")

    def queue_pair(self, depth: int) -> QueuePair:
        """Raises DeviceLostError."""
        self._fail(f"make a queue pair of depth {depth} of")

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Raises DeviceLostError."""
        self._fail(f"read {length_bytes} bytes at byte {offset_bytes} of")

    def write(self, offset_bytes: int, data: BytesLike) -> None:
        """Raises DeviceLostError."""
        self._fail(f"write {memoryview(data).nbytes} bytes at byte {offset_bytes} of")  # type: ignore[arg-type]

    def flush(self) -> None:
        """Raises DeviceLostError."""
        self._fail("flush")

    def lock_exclusive(self, holder: str, *, record: bool = True) -> None:
        """Raises DeviceLostError."""
        self._fail(f"lock for {holder}, with{'' if record else 'out'} a record,")

    def unlock(self) -> None:
        """Does nothing."""

    def incarnation(self) -> int:
        """Return 0: there is no connection."""
        del self
        return 0

    def begin_granted(self, slot: int) -> None:
        """Raises DeviceLostError."""
        self._fail(f"write as writer {slot} under grants to")

    def extend_grant(self, until_s: float, *, incarnation: int) -> None:
        """Raises DeviceLostError."""
        del until_s, incarnation
        self._fail("extend a grant of")

    def end_granted(self) -> None:
        """Does nothing."""

    def check_can_grant(self) -> None:
        """Raises DeviceLostError."""
        self._fail("grant writing to")

    def admit_writers(self) -> bool:
        """Raises DeviceLostError."""
        self._fail("admit writers to")

    def dismiss_writers(self, *, fence: bool) -> None:
        """Raises DeviceLostError."""
        del fence
        self._fail("dismiss the writers of")

    def expel_writer(self, key: int | None, living: Collection[int | None] = ()) -> bool:
        """Raises DeviceLostError."""
        del key, living
        self._fail("expel a writer of")

    def granted_writers_gone(self, slot: int | None = None) -> bool:
        """Raises DeviceLostError."""
        del slot
        self._fail("find the granted writers of")

    def close(self) -> None:
        """Does nothing."""

    def _fail(self, action: str) -> NoReturn:
        raise DeviceLostError(f"{action} {self.uri}: {self.reason}") from self.reason
