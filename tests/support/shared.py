"""A file that is locked like a shared namespace: by a lease instead of by the operating system.

It is for tests of leases between processes without a target. It has no reservations.
"""

from __future__ import annotations

import os

from dlfs._native.device import NativeDevice
from dlfs.block.nvme import NvmeCommand, NvmeResult
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.block.uri import format_path


class PlainController:
    """A controller that answers every command with success and zeros, so without reservations."""

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        """Fill ``data`` with zeros and return success."""
        del command
        if data is not None and not to_device:
            data[:] = bytes(len(data))
        return NvmeResult(0, 0)

    run_io = run_admin


class SharedFileDevice(SharedNamespaceDevice):
    """A file as a device that several processes lock by a lease.

    Args:
        path: path of an existing file.
        writable: True to open it for writing too.

    Raises:
        NotFoundError: there is no such file.
        DeviceError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = False) -> None:
        name = os.fspath(path)
        uri = format_path(name)
        native = NativeDevice.open_file(name, uri=uri, writable=writable)
        super().__init__(native, uri=uri, identity=f"shared:{name}", writable=writable)

    @property
    def runner(self) -> PlainController:
        """Runner of commands, without reservations."""
        return PlainController()

    @property
    def nsid(self) -> int:
        """Namespace ID, always 1."""
        return 1

    def incarnation(self) -> int:
        """Return 0: a file has no controllers."""
        return 0

    def limit_writes(self, incarnation: int, until_s: float | None) -> None:
        """Do nothing: writes to a file cannot be limited."""
