"""``ProcessLauncher``: workers that are processes of this host.

They join over the UNIX socket of the import. Each is killed by the system when the coordinator's
thread ends (PR_SET_PDEATHSIG), and belongs to a process group of its own, so that Ctrl-C reaches
the coordinator alone. One that ends is replaced, as long as parts are left; but not if
``FAILURES_MAX`` in a row could not join, or ``DEATHS_MAX`` were killed before they had.

What they log is logged by the coordinator.

Threads: one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from dlfs.errors import DeviceError, LimitError
from dlfs.ingest.workers.invitation import VARIABLE, Invitation

FAILURES_MAX = 3
"""Workers in a row that end by themselves before they have joined, before it is an error."""
DEATHS_MAX = 20
"""Workers in a row that are killed before they have joined, before it is an error."""
PAUSE_S = 0.1
"""Pause before the next worker is started after such a one, times their number, in seconds."""

_WORKER = "dlfs.ingest.workers.process"
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 4096
_log = logging.getLogger("dlfs")


class LogPipe:
    """A pipe whose lines are logged.

    Attributes:
        last: the last line; empty without.
    """

    def __init__(self) -> None:
        self._read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._rest = b""
        self.last = ""

    def take(self, name: str) -> None:
        """Log the lines that are there, up to the size of a pipe; a name begins each."""
        with suppress(BlockingIOError):
            *lines, rest = (self._rest + os.read(self._read, _READ_BYTES)).split(b"\n")
            self._rest = rest[-_LINE_BYTES_MAX:]
            for line in lines:
                text = " ".join(line[:_LINE_BYTES_MAX].decode("utf-8", "replace").split())
                if text:
                    self.last = text
                    _log.warning("%s: %s", name, text)

    def close(self) -> None:
        """Close both ends that are open."""
        self.close_write()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def close_write(self) -> None:
        """Close the end that the process has."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1


@dataclass
class _Child:
    """A process that was started."""

    process: subprocess.Popen[bytes]
    pipe: LogPipe
    has_joined: bool = False

    @property
    def name(self) -> str:
        return f"worker process {self.process.pid}"


class ProcessLauncher:
    """Starts processes of this host.

    Args:
        count: number of processes, > 0.
        invitation: what they need to join.
    """

    def __init__(self, count: int, invitation: Invitation) -> None:
        self._count = count
        self._invitation = invitation
        self._children: list[_Child] = []
        self._failures = self._deaths = 0
        self._not_before_s = 0.0

    def check(self, wanted: int, joined: Collection[int]) -> None:
        """Log what the processes say, and replace those that have ended.

        Args:
            wanted: number of workers that could have a part.
            joined: process IDs of the workers that have joined.

        Raises:
            DeviceError: the processes end before they join.
            LimitError: the system refuses another process.
        """
        for child in list(self._children):
            child.pipe.take(child.name)
            if child.process.pid in joined and not child.has_joined:
                child.has_joined = True
                self._failures = self._deaths = 0
            code = child.process.poll()
            if code is not None:
                self._children.remove(child)
                child.pipe.take(child.name)
                child.pipe.close()
                if not child.has_joined:
                    self._note_failure(child, code)
        while len(self._children) < min(self._count, wanted):
            if time.monotonic() < self._not_before_s:
                return
            self._children.append(self._start())

    def _note_failure(self, child: _Child, code: int) -> None:
        self._deaths += code < 0
        self._failures += code >= 0
        self._not_before_s = time.monotonic() + PAUSE_S * (self._deaths + self._failures)
        if self._failures >= FAILURES_MAX or self._deaths >= DEATHS_MAX:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            said = f": {child.pipe.last}" if child.pipe.last else ""
            count = self._failures + self._deaths
            raise DeviceError(
                f"start workers: expected processes that join the import, got {count} in a row "
                f"that ended before; the last by {how}{said}",
                0,
            )

    def _start(self) -> _Child:
        pipe = LogPipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=pipe.write,
                stderr=pipe.write,
                env=worker_environment(self._invitation),
                process_group=0,
            )
        except OSError as error:
            pipe.close()
            raise LimitError(
                f"start a worker: the system refuses another process: {error.strerror}"
            ) from error
        pipe.close_write()
        return _Child(process, pipe)

    def close(self) -> None:
        """Kill all processes, and wait until they have ended."""
        for child in self._children:
            child.process.kill()
        while self._children:
            child = self._children[-1]
            child.process.wait()
            child.pipe.close()
            self._children.pop()


def worker_environment(invitation: Invitation) -> dict[str, str]:
    """Return the environment of a process, which finds the packages of this one."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return {**os.environ, VARIABLE: invitation.text, "PYTHONPATH": paths}
