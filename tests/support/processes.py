"""Processes that are forks of one server, which has imported what tests need.

A process that imports dlfs by itself takes some tenths of a second of CPU time for it, and seconds
for PyTorch. What such a process receives is pickled, as with ``spawn``.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Self

DESCRIPTOR_MIN = 200
"""Above the numbers of descriptors that a program is to have."""


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
    "dlfs.mount.native_server",
    "dlfs.mount.pyfuse3_server",
    "dlfs.mount.supervise.daemon",
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
        from dlfs.cli import main

        output, its_output = os.pipe()
        with log.open("ab") as errors, os.fdopen(its_output, "wb"):
            descriptors = {1: its_output, 2: errors.fileno()}
            self._process = _start(main, arguments, os.environ, descriptors)
        self.stdout = os.fdopen(output, "rb", buffering=0)
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
            with contextlib.suppress(ProcessLookupError):  # ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class MountServer:
    """A background server of a mount, as ``subprocess.Popen`` starts it: the ends of two pipes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_streams: object,
    ) -> None:
        (its_input, requests), (output, its_output) = os.pipe(), os.pipe()
        with os.fdopen(its_input), os.fdopen(its_output, "w"):
            descriptors = {0: its_input, 1: its_output, 2: its_output}
            descriptors |= dict(zip(pass_fds, pass_fds, strict=True))
            arguments = command[command.index("-m") + 2 :]
            _start(_serve_mount, arguments, env, descriptors)
        self.stdin = os.fdopen(requests, "w")
        self.stdout = os.fdopen(output, errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stdout.close()
        self.stdin.close()


def _serve_mount() -> None:
    from dlfs.mount.supervise import daemon
    from dlfs.mount.supervise.reporting import become_daemon

    become_daemon()
    daemon.main()


def _start(
    main: Callable[[], None],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
) -> ForkServerProcess:
    """Start a process that runs a program, with descriptors by the numbers that it is to have."""
    given = {number: Connection(os.dup(each)) for number, each in descriptors.items()}
    settings = (Path.cwd(), os.sched_getaffinity(0), dict(environment), ["dlfs", *arguments])
    process = PROCESSES.Process(target=_run, args=(main, given, *settings))
    process.start()
    return process


def _run(
    main: Callable[[], None],
    given: dict[int, Connection],
    folder: Path,
    processors: set[int],
    environment: dict[str, str],
    words: list[str],
) -> None:
    # Not before all are out of the way: the number of one may be wanted for another.
    moved = {
        number: fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, DESCRIPTOR_MIN)
        for number, each in given.items()
    }
    for each in given.values():
        each.close()
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(folder)
    os.sched_setaffinity(0, processors)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    main()
