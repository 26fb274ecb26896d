"""CPU time and memory of processes, from ``getrusage`` and ``/proc``."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SNAPSHOT_SECONDS = 0.5
"""Interval between two snapshots of the memory of processes: each walks their page tables."""


# ---- CPU time ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopwatch:
    """Elapsed time and CPU time of a block, in seconds; set when the block ends."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


def cpu_seconds() -> float:
    """Return the CPU time of all threads of this process."""
    return _used(resource.RUSAGE_SELF)


def cpu_seconds_of_children() -> float:
    """Return the CPU time of this process's children that have ended."""
    return _used(resource.RUSAGE_CHILDREN)


def _used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def timed(
    cpu: Callable[[], float] = cpu_seconds, *, servers: Iterable[int] = ()
) -> Iterator[Stopwatch]:
    """Time the block, with the CPU time that ``cpu`` returns and that of other processes."""
    watch = Stopwatch()
    used, start = cpu() + cpu_seconds_of_all(servers), time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - start
    watch.cpu_seconds = cpu() + cpu_seconds_of_all(servers) - used


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of another process, which the kernel counts in ticks of 10 ms."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_all(pids: Iterable[int]) -> float:
    """Return the CPU time of several processes; those that have ended count 0."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += cpu_seconds_of(pid)
    return total


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process and all processes below it, ended or running."""
    ended = cpu_seconds() + cpu_seconds_of_children()
    return ended + cpu_seconds_of_all(descendants(os.getpid()))


def descendants(pid: int) -> list[int]:
    """List all running processes below a process."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                below = [int(word) for word in children.read_text().split()]
                found += below
                waiting += below
    return found


# ---- memory --------------------------------------------------------------------------------------


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of several processes: a page that they share counts once (PSS)."""
    return sum(_proc_field(pid, "smaps_rollup", "Pss:") for pid in pids)


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident memory that a process ever had, mapped files included."""
    return _proc_field(pid, "status", "VmHWM:")


def _proc_field(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


class MemoryWatch:
    """Watches the memory of processes and of all processes below them, in a thread.

    Attributes:
        start_bytes: their memory at the first snapshot (PSS).
        peak_bytes: the most memory of any snapshot.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.start_bytes = self.peak_bytes = 0

    def snapshot(self) -> None:
        """Take a snapshot now."""
        pids = {pid for root in self._pids for pid in (root, *descendants(root))}
        now_bytes = pss_bytes(pids)
        self.start_bytes = self.start_bytes or now_bytes
        self.peak_bytes = max(self.peak_bytes, now_bytes)

    def _run(self) -> None:
        while not self._is_over.wait(SNAPSHOT_SECONDS):
            self.snapshot()

    def __enter__(self) -> Self:
        self.snapshot()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
