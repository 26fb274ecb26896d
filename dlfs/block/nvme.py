"""NVMe commands as values, and the interface that runs them over any transport.

A block device over NVMe runs reads, writes and flushes in native code. Rare commands (reservations,
Identify, log pages) are encoded in Python and passed one at a time to a ``CommandRunner``:
libdlfs's own initiator or SPDK's controller. Statuses are returned and not raised, because a caller
often expects one other than success.

Source: NVM Express Base Specification 2.0, sections 3.3.3 (submission queue entry) and 3.3.3.2.1
(status field).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NvmeCommand:
    """The dwords of a submission queue entry that a caller sets; the runner sets CID and SGL.

    Attributes:
        opcode: 0..255.
        nsid: namespace ID; 0 if the command has none, 0xFFFFFFFF for all namespaces.
        cdw10: dword 10 of the entry, 32 bits; ``cdw11`` to ``cdw15`` likewise.
    """

    opcode: int
    nsid: int = 0
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0


@dataclass(frozen=True, slots=True)
class NvmeResult:
    """The completion of a command.

    Attributes:
        status: status code type << 8 | status code, without DNR and More; 0 is success.
        value: dwords 0 and 1 of the completion, 64 bits.
    """

    status: int
    value: int


class CommandRunner(Protocol):
    """Runs single commands on one controller and waits for each.

    Threads: any at once.
    """

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one admin command.

        Args:
            command: what to run.
            data: buffer of at most 64 KiB, which the controller fills, or reads if
                ``to_device``.
            to_device: True if ``data`` goes to the controller.

        Raises:
            DeviceLostError: the controller is lost and did not come back within its time limit.
            DeviceTimeoutError: the controller did not answer in time.
            ClosedError: the runner is closed.
        """

    def run_io(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one command on an I/O queue, as ``run_admin`` does on the admin queue."""


class NativeRunner:
    """A ``CommandRunner`` by a native function.

    Args:
        function: takes the words of a command, its data, ``io_queue`` and ``to_device``, and
            returns the status and the value.
    """

    def __init__(self, function: Callable[..., tuple[int, int]]) -> None:
        self._function = function

    def _run(
        self, command: NvmeCommand, data: bytearray | None, *, io_queue: bool, to_device: bool
    ) -> NvmeResult:
        words = astuple(command)
        return NvmeResult(*self._function(words, data, io_queue=io_queue, to_device=to_device))

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one admin command; see ``CommandRunner``."""
        return self._run(command, data, io_queue=False, to_device=to_device)

    def run_io(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one command on an I/O queue; see ``CommandRunner``."""
        return self._run(command, data, io_queue=True, to_device=to_device)
