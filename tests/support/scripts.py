"""Scripts that run in a process of their own, and are talked to over pipes."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.waiting import SECONDS_MAX


@contextlib.contextmanager
def running(script: str, *arguments: str, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a process of its own, talked to over pipes."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        **popen,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[bytes]) -> str:
    """Return the next line that a script prints."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], SECONDS_MAX)
    assert ready, f"heard nothing for {SECONDS_MAX} s"
    return process.stdout.readline().decode().strip()


def tell(process: subprocess.Popen[bytes], line: str = "go") -> None:
    """Send a line to a script, which then continues."""
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
