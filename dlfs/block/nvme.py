"""NVMe commands as values, and what runs them, whatever the transport.

A block device over NVMe runs reads, writes and flushes in native code. What is rare and small
(reservations, Identify, log pages) is encoded in Python and passed, one command at a time, to a
``CommandRunner``: our own initiator's association, or SPDK's controller. Statuses come back as
values, for a caller often expects one that is not success.

Source: NVM Express Base Specification 2.0, sections 3.3.3 (submission queue entry) and 3.3.3.2.1
(status field).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NvmeCommand:
    """The dwords of a submission queue entry that a caller decides; CID and SGL are the runner's.

    Attributes:
        opcode: 0..255.
        nsid: of the namespace; 0 where the command has none, 0xFFFFFFFF for all.
        cdw10: dword 10 of the entry, 32 bits, as are those that follow.
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
    """What a controller answered.

    Attributes:
        status: status code type << 8 | status code, without DNR and More; 0 is success.
        value: dwords 0 and 1 of the completion, 64 bits.
    """

    status: int
    value: int


class CommandRunner(Protocol):
    """Runs single commands on one controller, and waits for each.

    Threads: any at once.
    """

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one admin command.

        Args:
            command: what to run.
            data: filled by the controller, or read by it with ``to_device``; at most 4096 bytes.
            to_device: the direction of ``data``.

        Raises:
            DeviceLostError: the controller is gone, and did not come back within its budget.
            DeviceTimeoutError: it did not answer in time.
            ClosedError: the runner is closed.
        """

    def run_io(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Run one command on an I/O queue, as ``run_admin`` does on the admin queue."""
