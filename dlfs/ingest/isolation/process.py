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

_early: list[IsolatedProcess] = []


class IsolatedProcess:
    """A process that waits for the source to read.

    Attributes:
        connection: socket to the process.
        process: the process.
        note: memory with the note of what it reads.
        buffers: memory of the blocks.
        stderr: what it writes to its stderr.
        end: function that ends the process; calling it again does nothing.
    """

    def __init__(self) -> None:
        self.note = SharedMemory.create(NOTE_BYTES)
        self.buffers = [SharedMemory.create(1) for _ in range(BUFFERS)]
        self.stderr = SharedMemory.create(0)
        memories = [self.note, self.stderr, *self.buffers]
        self.connection, self.process = self._start()
        self.end = finalize(self, _end, self.connection, self.process, memories)

    def _start(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), *(memory.descriptor for memory in (self.note, *self.buffers))]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr.descriptor,
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
    connection: Connection, process: subprocess.Popen[bytes], memories: Sequence[SharedMemory]
) -> None:
    """End a process, which has nothing to save."""
    connection.close()
    if process.poll() is None:
        process.kill()
    process.wait()
    for memory in memories:
        memory.close()
