"""Starts the process that reads a source, and ends it.

The command line starts it while it still loads itself and opens the volume (``start_early``), so
that an import does not wait for the start of two interpreters one after the other. Hence this
module loads no numpy.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final
from weakref import finalize

from dlfs.ingest.isolation.confines import NOTE_BYTES
from dlfs.ingest.isolation.memory import SharedMemory

BUFFERS: Final = 2
"""Number of shared buffers."""

_WORKER = "dlfs.ingest.isolation.worker"

_ENVIRONMENT: Mapping[str, str] = {
    "HDF5_PLUGIN_PRELOAD": "::",  # no filters from folders that HDF5 was compiled with
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve memory, which the limit counts
    "OPENBLAS_NUM_THREADS": "1",
}

_REMOVED = ("HDF5_VDS_PREFIX", "HDF5_EXTFILE_PREFIX", "ADIOS2_PLUGIN_PATH")
"""Variables by which a library finds what a file names elsewhere."""

TAIL_BYTES: Final = 4096
"""Bytes that are kept of what the process writes to its stderr."""

_PIPE_BYTES = 1 << 16
_SHOWN_MAX = 200

_early: list[IsolatedProcess] = []


class StderrTail:
    """The last bytes that a process wrote to its stderr, a pipe.

    A process that writes more than a pipe holds waits until ``take`` is called.

    Args:
        descriptor: the end of the pipe to read from; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._tail = b""
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def take(self) -> None:
        """Read what is there, up to the size of a pipe; keep the last bytes."""
        if not self.is_open:
            return
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, _PIPE_BYTES)
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self.is_open = bool(data)

    def last_line(self) -> str:
        """Return the last line that a process wrote, after its end."""
        self.take()
        lines = [one for one in self._tail.decode("utf-8", "replace").splitlines() if one.strip()]
        return " ".join(lines[-1].split())[:_SHOWN_MAX] if lines else ""

    def close(self) -> None:
        """Close the descriptor; closing it again does nothing."""
        self.is_open = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class IsolatedProcess:
    """A process that waits for the source to read.

    Attributes:
        connection: socket to the process.
        process: the process.
        note: memory with the note of what it reads.
        buffers: memory of the blocks.
        stderr: the end of what it writes to its stderr.
        end: function that ends the process; calling it again does nothing.
    """

    def __init__(self) -> None:
        self.note = SharedMemory.create(NOTE_BYTES)
        self.buffers = [SharedMemory.create(1) for _ in range(BUFFERS)]
        readable, writable = os.pipe()
        self.stderr = StderrTail(readable)
        try:
            self.connection, self.process = self._start(writable)
        finally:
            os.close(writable)
        memories: list[SharedMemory | StderrTail] = [self.note, self.stderr, *self.buffers]
        self.end = finalize(self, _end, self.connection, self.process, memories)

    def _start(self, stderr: int) -> tuple[Connection, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), *(memory.descriptor for memory in (self.note, *self.buffers))]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=passed,
                env=_environment(),
            )
        return Connection(ours.detach()), process


def start_early() -> None:
    """Start a process for the next source, if none waits for one."""
    if not _early:
        _early.append(IsolatedProcess())


def take_process() -> IsolatedProcess:
    """Return the process that was started early, or start one."""
    return _early.pop() if _early else IsolatedProcess()


def end_early() -> None:
    """End the process that was started early, if no source took it."""
    while _early:
        _early.pop().end()


def _environment() -> dict[str, str]:
    """Return the environment of the process: nothing that a file names is looked for elsewhere."""
    found = {**os.environ, **_ENVIRONMENT}
    # The packages of this process, which may have been found by sys.path alone.
    found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    if "HDF5_PLUGIN_PATH" in os.environ:  # the user says where filters are
        del found["HDF5_PLUGIN_PRELOAD"]
    return {name: value for name, value in found.items() if name not in _REMOVED}


def _end(
    connection: Connection,
    process: subprocess.Popen[bytes],
    memories: Sequence[SharedMemory | StderrTail],
) -> None:
    """End a process, which has nothing to save."""
    connection.close()
    if process.poll() is None:
        process.kill()
    process.wait()
    for memory in memories:
        memory.close()
