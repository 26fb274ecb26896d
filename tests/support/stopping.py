"""Stopping a process by SIGSTOP, for the tests of what others then do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_for

STOPPED = "Tt"


def stop_process(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for_stop(pid)


def wait_for_stop(pid: int) -> None:
    """Wait until each thread of a process is stopped: they do not all stop at once."""
    wait_for(
        lambda: all(state in STOPPED for state in _thread_states(pid)), f"the stop of process {pid}"
    )


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "stat").read_text().rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
    return states
