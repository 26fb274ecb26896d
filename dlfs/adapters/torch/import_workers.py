"""``ImportWorkers``: processes of a rank that import parts of the source with rank 0's import.

Each runs ``dlfs import-worker``. It reads the invitation from a file in memory that only this user
can open, so it is neither on a disk nor in a command line. The system ends the processes if the
thread that has started them, and so the rank, ends. A process that was killed is started again, as
long as the rank has it; one that ends by itself is not, since it has nothing more to do.

Threads: one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from dlfs.base.closing import Closing
from dlfs.base.wording import quote
from dlfs.ingest.workers.launching import LogPipe

CHILD = (
    "import sys; from dlfs._native.processes import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); from dlfs.cli import main; main()"
)
"""Program of a child process that runs ``dlfs``: its arguments are the ID of its parent, and those
of the command. It ends with the thread that has started it."""
REJOIN_S = 10
"""Time for which a worker tries to reach an import that does not answer, in seconds. One that was
started again has another invitation."""
PAUSE_MAX_S = 5.0
"""Longest pause before a killed process is started again, in seconds."""

_PAUSE_S = 0.1
_STDIN = "/proc/self/fd/0"
_log = logging.getLogger("dlfs")


def child_environment() -> dict[str, str]:
    """Return the environment of a child process, which finds the packages of this one."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths}


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    pipe: LogPipe


class ImportWorkers(Closing):
    """The workers of one rank.

    Args:
        name: name of the dataset, for the log.
        count: number of processes.
        invitation: what they need to join, as text.

    Threads: one, which must not end before the processes.
    """

    def __init__(self, name: str, count: int, invitation: str) -> None:
        self._name, self._missing, self._invitation = name, count, invitation
        self._children: list[_Child] = []
        self._deaths = 0
        self._not_before_s = 0.0

    def check(self) -> None:
        """Start the processes that are missing, and log what they say."""
        for child in list(self._children):
            child.pipe.take(f"import worker {child.process.pid}")
            if child.process.poll() is not None:
                self._children.remove(child)
                self._end(child)
        while self._missing and time.monotonic() >= self._not_before_s:
            self._missing -= 1
            self._start()

    def _start(self) -> None:
        command = ["import-worker", _STDIN, "--wait", str(REJOIN_S)]
        pipe: LogPipe | None = None
        try:
            pipe = LogPipe()
            with open(os.memfd_create("dlfs-invitation", os.MFD_CLOEXEC), "wb", 0) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(self._invitation.encode())
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", CHILD, str(os.getpid()), *command],
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    stderr=pipe.write,
                    start_new_session=True,  # Ctrl-C is for the training loop
                    env=child_environment(),
                )
        except OSError as error:
            if pipe is not None:
                pipe.close()
            _log.warning("import %s: start a worker: %s", quote(self._name), error)
            return
        pipe.close_write()
        self._children.append(_Child(process, pipe))

    def _end(self, child: _Child) -> None:
        """Take note of a process that has ended."""
        code, pid = child.process.wait(), child.process.pid
        child.pipe.take(f"import worker {pid}")
        child.pipe.close()
        if code < 0:
            self._missing += 1
            self._deaths += 1
            self._not_before_s = time.monotonic() + min(PAUSE_MAX_S, _PAUSE_S * self._deaths)
            text = "worker %d was ended by signal %d; another one is started"
            _log.warning(f"import %s: {text}", quote(self._name), pid, -code)

    def close(self) -> None:
        """Kill the processes, and wait until they have ended. Idempotent."""
        for child in self._children:
            child.process.kill()
        while self._children:
            child = self._children.pop()
            child.process.wait()
            child.pipe.close()
