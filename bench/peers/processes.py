"""What processes cost: CPU time and memory of a process and all below it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path

from bench.contestant import cpu_seconds_of


def descendants(pid: int) -> list[int]:
    """All processes below one, those that ended meanwhile left out."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                below = [int(word) for word in children.read_text().split()]
                found += below
                waiting += below
    return found


def own_cpu_seconds() -> float:
    """CPU time of this process, of the children that it waited for, and of those that live."""
    total = 0.0
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(whose)
        total += usage.ru_utime + usage.ru_stime
    return total + cpu_seconds_of_all(descendants(os.getpid()))


def cpu_seconds_of_all(pids: Iterable[int]) -> float:
    """CPU time of other processes, in ticks of 10 ms."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += cpu_seconds_of(pid)
    return total


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of processes together: a page that several have counts once, divided among them."""
    return sum(_field(pid, "smaps_rollup", "Pss:") for pid in pids)


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process had in its own page table, mapped files included."""
    return _field(pid, "status", "VmHWM:")


def _field(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
