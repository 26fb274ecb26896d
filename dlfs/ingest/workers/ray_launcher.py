"""``RayLauncher``: workers that are tasks of a Ray cluster.

A process of this host is the driver of the cluster; see ``ray_driver``. It ends with the
coordinator, and Ray ends the tasks of a driver that has ended.

Threads: one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from dlfs.base.extras import install_command
from dlfs.errors import DeviceError, LimitError, UsageError
from dlfs.ingest.workers.engines import RayWorkers
from dlfs.ingest.workers.invitation import Invitation
from dlfs.ingest.workers.launching import LogPipe, worker_environment
from dlfs.ingest.workers.messages import Hello

CLOSE_S = 20.0
"""Longest time in which the driver cancels its tasks and ends, in seconds."""
_DRIVER = "dlfs.ingest.workers.ray_driver"


def check_ray() -> None:
    """Check that Ray is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            f"run workers by Ray: expected ray to be installed: {install_command('ray')}"
        )


class RayLauncher:
    """Starts tasks of a Ray cluster.

    Args:
        workers: the workers as the user wants them.
        invitation: what they need to join.
        only_here: True if they must run on this host, as those that write to files.
    """

    def __init__(
        self, workers: RayWorkers, invitation: Invitation, *, only_here: bool = False
    ) -> None:
        self._workers = workers
        self._invitation = invitation
        self._only_here = only_here
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = LogPipe()
        self._last = 0
        self._order = b""

    def check(self, wanted: int, joined: Mapping[int, Hello]) -> None:
        """Log what the driver says, and tell it how many workers there should be.

        Args:
            wanted: number of workers that could have a part.
            joined: what each worker that has joined says of itself, by its number.

        Raises:
            DeviceError: the driver has ended, as Ray has failed, or the tasks do not join.
            LimitError: the system refuses the process.
        """
        if self._process is None:
            self._process = self._start()
        self._pipe.take("Ray")
        code = self._process.poll()
        if code is not None:
            self._pipe.take("Ray")
            how = f"the driver ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise DeviceError(self._pipe.last or f"run workers by Ray: {how}", 0)
        self._last = max(self._last, *joined, 0)
        order = b"%d %d %d\n" % (wanted, self._last, len(joined))
        if order != self._order:
            self._order = order
            with suppress(OSError):  # it has ended, which the next call sees
                assert self._process.stdin is not None
                self._process.stdin.write(order)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", _DRIVER,
                 msgspec.json.encode(self._workers).decode(), *["here"] * self._only_here],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # messages of Ray for people
                stderr=self._pipe.write,
                env=worker_environment(self._invitation),
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            raise LimitError(
                f"run workers by Ray: the system refuses a process: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Have all tasks cancelled, and wait until the driver has ended."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipe.close()
