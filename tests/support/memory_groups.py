"""Control groups with a limit of memory, which a process joins before it starts its program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import retried

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")

_ENTER = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group.

    Attributes:
        directory: its directory.
        version: 1 or 2.
    """

    directory: Path
    version: int

    def run(self, *command: str, **popen: Any) -> subprocess.Popen[bytes]:
        """Start a command in the group."""
        entry = str(self.directory / "cgroup.procs")
        return subprocess.Popen([sys.executable, "-c", _ENTER, entry, *command], **popen)

    def wrapped(self, *command: str) -> tuple[str, ...]:
        """Return a command that runs another one in the group."""
        return ("-c", _ENTER, str(self.directory / "cgroup.procs"), sys.executable, *command)

    def kills(self) -> int:
        """Return how many processes the kernel has killed for lack of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.directory / name).read_text().split("\n")
        counts = dict(line.split() for line in lines if line)
        return int(counts.get("oom_kill", 0))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group for the duration of a block; skip the test where groups cannot be made."""
    name = f"dlfs-test-{os.getpid()}"
    version = 1 if (V1 / "memory.limit_in_bytes").exists() else 2
    directory = (V1 if version == 1 else V2) / name
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"control groups for memory cannot be made: {error}")
    try:
        file = "memory.limit_in_bytes" if version == 1 else "memory.max"
        try:
            (directory / file).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"control groups have no limit of memory: {error}")
        yield MemoryGroup(directory, version)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """Remove a group; its last processes may be about to end."""
    retried(directory.rmdir, OSError)
