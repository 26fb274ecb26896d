"""What the system tells of processes, and the standard streams of one that stays behind.

Source: proc_pid_stat(5), proc_pid_status(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def _field_of(pid: int, name: str) -> str:
    """Return a field of a process's status; nothing if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{name}:\t(\S+)", text, re.MULTILINE)
    return "" if found is None else found[1]


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal or a debugger."""
    return _field_of(pid, "State") in ("T", "t")


def is_dying(pid: int) -> bool:
    """Return True if the first thread of a process has ended, or its memory is being dumped."""
    return _field_of(pid, "State") in ("", "Z", "X") or _field_of(pid, "CoreDumping") == "1"


def leave_streams() -> None:
    """Redirect the standard streams, which belong to the caller, to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    os.chdir("/")
