"""Stands for a device that cannot be had, where others are there in its stead.

A volume with replicas is read although a member is missing; this takes the member's place among
the devices. Every use of it fails with the reason why the device cannot be had.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from dlfs.errors import DeviceLostError, DlfsError

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike, NativeDevice
    from dlfs.block.device import QueuePair


class MissingDevice:
    """A device that is not there.

    Args:
        uri: what would open it; what errors call it.
        reason: why it cannot be had.
        given: whether the URI is one that can be tried again.

    Threads: any at once.
    """

    size_bytes = 0
    block_bytes = 512
    writable = False
    patience_ms = 0
    queue_pairs_max = 0
    gap_bytes = 0

    def __init__(self, uri: str, reason: DlfsError, *, given: bool = True) -> None:
        self.uri = uri
        self.reason = reason
        self.given = given

    def __repr__(self) -> str:
        return f"<MissingDevice {self.uri}: {self.reason}>"

    @property
    def identity(self) -> str:
        """Its own: nobody knows whether it is another one."""
        return f"missing:{id(self)}"

    @property
    def native(self) -> NativeDevice:
        """Raises DeviceLostError, as all that follows."""
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

    def close(self) -> None:
        """Does nothing."""

    def _fail(self, action: str) -> NoReturn:
        raise DeviceLostError(f"{action} {self.uri}: {self.reason}") from self.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
