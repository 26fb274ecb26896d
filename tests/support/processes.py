"""Processes that are forks of one server, which has imported what tests need.

A process that imports dlfs by itself takes some tenths of a second of CPU time for it, and seconds
for PyTorch. What such a process receives is pickled, as with ``spawn``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path


class _Process(ForkServerProcess):
    def run(self) -> None:
        # By default, a child would start its own in the same way, and so a server for them.
        multiprocessing.set_start_method("fork", force=True)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


PROCESSES = _Context()
"""Context of these processes. Its server starts with the first of them."""

_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Have the server import modules when it starts, those that are installed."""
    _preloaded.extend(modules)
    PROCESSES.set_forkserver_preload(_preloaded)


preload(
    "pytest",  # which is the main module of such a process, too
    "dlfs.cli.commands",
    "dlfs.cli.streams",
    "dlfs.mount.server",
    "dlfs.service.client",
    "dlfs.service.process",
    "dlfs.volume.volume",
    "tests.service.serving",
)


class DlfsProcess:
    """The command ``dlfs``, with the methods of ``subprocess.Popen`` that its tests need.

    Args:
        arguments: of the command line.
        log: file to which its stderr is appended.

    Attributes:
        pid: ID of the process.
        stdout: its output.
    """

    def __init__(self, *arguments: str, log: Path) -> None:
        receiving, sending = PROCESSES.Pipe(duplex=False)
        with receiving, sending:
            self._process = PROCESSES.Process(
                target=_run, args=(sending, log, Path.cwd(), dict(os.environ), arguments)
            )
            self._process.start()
            self.stdout = os.fdopen(os.dup(receiving.fileno()), "rb", buffering=0)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float = 100) -> int:
        """Wait for the end of the process, and return its exit code."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("dlfs", timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def _run(
    output: Connection,
    log: Path,
    folder: Path,
    environment: dict[str, str],
    arguments: tuple[str, ...],
) -> None:
    from dlfs.cli import main

    os.dup2(output.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    output.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["dlfs", *arguments]
    main()
