"""Background servers of mounts that start at once: forks of a process that has imported them.

A new interpreter, as ``dlfs mount`` starts it, takes half a second of CPU time to import what a
server needs. ``Starter`` runs that interpreter once and stands for ``subprocess.Popen`` in
``dlfs.mount.supervise.background``: each server has the arguments, the environment, the
descriptors, the working directory and the processors that its caller gives it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
ORDER_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 16
DESCRIPTOR_MIN = 200
"""Above the numbers of descriptors that a server is to have."""


class Started:
    """A server, as its caller uses a ``subprocess.Popen``: the ends of two pipes."""

    def __init__(self, requests: int, output: int) -> None:
        self.stdin = os.fdopen(requests, "w")
        self.stdout = os.fdopen(output, errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stdout.close()
        self.stdin.close()


class Starter:
    """The process whose forks are servers; in place of the module ``subprocess``."""

    PIPE = subprocess.PIPE
    STDOUT = subprocess.STDOUT

    def __init__(self) -> None:
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "import tests.fuse.forking as own; own.fork_servers()"],
                cwd=ROOT,
                stdin=other,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def Popen(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_streams: object,
    ) -> Started:
        """Fork a server."""
        order = {
            "arguments": command[command.index("-m") + 2 :],
            "descriptors": [0, 1, *pass_fds],
            "environment": dict(env),
            "folder": os.getcwd(),
            "processors": list(os.sched_getaffinity(0)),
        }
        (its_input, requests), (output, its_output) = os.pipe(), os.pipe()
        try:
            descriptors = [its_input, its_output, *pass_fds]
            socket.send_fds(self._link, [json.dumps(order).encode()], descriptors)
        finally:
            os.close(its_input)
            os.close(its_output)
        return Started(requests, output)

    def close(self) -> None:
        """End the process; its forks go on."""
        with contextlib.closing(self._link):
            self._link.shutdown(socket.SHUT_RDWR)
        self._process.wait()


def fork_servers() -> None:
    """Fork servers as ordered over standard input, until it is closed."""
    import dlfs.mount.native_server
    import dlfs.mount.pyfuse3_server  # noqa: F401
    from dlfs.mount.supervise import daemon

    link = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        message, descriptors, *_ = socket.recv_fds(link, ORDER_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            return
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link.close()
    _obey(json.loads(message), descriptors)
    daemon._become_daemon()
    daemon.main()


def _obey(order: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process what an order says."""
    # Not before all are out of the way: the number of one may be wanted for another.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, DESCRIPTOR_MIN) for each in descriptors]
    for descriptor, number in zip(moved, order["descriptors"], strict=True):
        os.dup2(descriptor, number)
    os.dup2(1, 2)
    for descriptor in {*descriptors, *moved} - {*order["descriptors"]}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    os.sched_setaffinity(0, order["processors"])
    sys.argv[1:] = order["arguments"]
