"""``ProcessLauncher``: workers that are processes of this host.

They join over the UNIX socket of the import. Each is killed by the system when the coordinator's
thread ends (PR_SET_PDEATHSIG), and belongs to a process group of its own, so that Ctrl-C reaches
the coordinator alone. One that ends is replaced, as long as parts are left. It is an error if all
fail to join, ``FAILURES_MAX`` times in a row, or ``DEATHS_MAX`` if they are killed (``Losses``).

What they log is logged by the coordinator.

Threads: one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dlfs.errors import DeviceError, LimitError
from dlfs.ingest.workers.invitation import VARIABLE, Invitation, boot_id
from dlfs.ingest.workers.messages import Hello

FAILURES_MAX = 3
"""Losses in a row of workers that end by themselves before any has joined, before it is an
error."""
DEATHS_MAX = 20
"""Losses in a row of workers that are killed before any has joined, before it is an error."""
PAUSE_S = 0.1
"""Pause before the next worker is started after such a loss, times their number, in seconds."""
PAUSE_MAX_S = 5.0
"""Longest such pause, in seconds."""

_WORKER = "dlfs.ingest.workers.process"
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 4096
_log = logging.getLogger("dlfs")


class Losses:
    """Counts how often workers are lost without progress, which is that one has joined.

    Workers that are lost at once are one loss, however many they are: a worker counts only if it
    was started after the last loss.

    Attributes:
        not_before_s: time before which no further worker is to be started, of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self._failures = self._deaths = 0
        self._round = 0
        self.not_before_s = 0.0

    @property
    def round(self) -> int:
        """Number of losses so far, to be noted for a worker that is started."""
        return self._round

    @property
    def count(self) -> int:
        """Number of losses since the last progress."""
        return self._failures + self._deaths

    @property
    def is_error(self) -> bool:
        """True if there were so many that it is an error."""
        return self._failures >= FAILURES_MAX or self._deaths >= DEATHS_MAX

    def note_progress(self) -> None:
        """Take note that a worker has joined, or works."""
        self._failures = self._deaths = 0

    def note(self, began: int, *, was_killed: bool) -> None:
        """Take note of the end of a worker that may not have joined.

        Args:
            began: ``round`` when it was started.
            was_killed: True if it did not end by itself.
        """
        if began < self._round:
            return
        self._round += 1
        self._deaths += was_killed
        self._failures += not was_killed
        self.not_before_s = time.monotonic() + min(PAUSE_MAX_S, PAUSE_S * self.count)


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
    began: int
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
        self._losses = Losses()
        self._boot_id = boot_id()

    def check(self, wanted: int, joined: Mapping[int, Hello]) -> None:
        """Log what the processes say, and replace those that have ended.

        Args:
            wanted: number of workers that could have a part.
            joined: what each worker that has joined says of itself, by its number.

        Raises:
            DeviceError: the processes end before they join.
            LimitError: the system refuses another process.
        """
        if joined:
            self._losses.note_progress()
        here = {hello.pid for hello in joined.values() if hello.boot_id == self._boot_id}
        for child in list(self._children):
            child.pipe.take(child.name)
            child.has_joined |= child.process.pid in here
            code = child.process.poll()
            if code is not None:
                self._children.remove(child)
                child.pipe.take(child.name)
                child.pipe.close()
                if not child.has_joined:
                    self._note_failure(child, code)
        while len(self._children) < min(self._count, wanted):
            if time.monotonic() < self._losses.not_before_s:
                return
            self._children.append(self._start())

    def _note_failure(self, child: _Child, code: int) -> None:
        self._losses.note(child.began, was_killed=code < 0)
        if self._losses.is_error:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            said = f": {child.pipe.last}" if child.pipe.last else ""
            raise DeviceError(
                f"start workers: expected processes that join the import, but they ended before, "
                f"{self._losses.count} times in a row; the last by {how}{said}",
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
        return _Child(process, pipe, self._losses.round)

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
