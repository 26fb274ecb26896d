"""Stopping a process by SIGSTOP, for the tests of what others then do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

SECONDS_MAX = 60
STOPPED = "Tt"


def stop_process(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for_stop(pid)


def wait_for_stop(pid: int) -> None:
    """Wait until each thread of a process is stopped: they do not all stop at once."""
    deadline = time.monotonic() + SECONDS_MAX
    while not all(state in STOPPED for state in _thread_states(pid)):
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX} s for the stop of process {pid}"
        time.sleep(0.001)


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "stat").read_text().rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
    return states
