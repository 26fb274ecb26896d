"""What a contestant is, how it is timed, and what one run of it leaves.

CPU time is that of the process with all its threads; a contestant that works in another process
adds that one's. Setting up is never timed: each contestant starts its clock itself.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from bench.datasets import Scene
from bench.machine import Machine, Unavailable

CHECKED = 16
"""Samples of each run whose bytes are compared with the source."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take.

    Attributes:
        seconds: after so long a steady contestant stops early; whole epochs run to their end.
        mount_files: files read through a mount.
        paths: of the synthetic sample directory.
        seed: of every order.
    """

    seconds: float = 1.5
    mount_files: int = 10_000
    paths: int = 1_000_000
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a contestant runs."""

    scene: Scene
    machine: Machine
    limits: Limits
    round: int


@dataclass(slots=True)
class Sample:
    """One run: what was read in what time.

    Attributes:
        samples: read, or looked up.
        bytes: of them.
        seconds: on the clock.
        cpu_seconds: of all threads and processes at work.
        checked: samples whose bytes were compared with the source.
        notes: what else there is to say, as plain values.
    """

    samples: int
    bytes: int
    seconds: float
    cpu_seconds: float
    checked: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Contestant(Protocol):
    """Something that reads samples. A frozen dataclass: what it is, is its fields."""

    @property
    def label(self) -> str:
        """What the table calls it."""
        ...

    def run(self, ground: Ground) -> Sample:
        """Run once.

        Raises:
            Unavailable: the machine lacks something.
            WrongBytesError: it read something else than the source has.
        """
        ...


class WrongBytesError(Exception):
    """A contestant gave other bytes than the source has."""


@dataclass(slots=True)
class Watch:
    """A stopwatch of time and CPU time."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Watch]:
    """Time the body, with the CPU time of this process's threads."""
    watch = Watch()
    cpu, start = _cpu_seconds(), time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - start
    watch.cpu_seconds = _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds_of(pid: int) -> float:
    """CPU time of another process so far, in ticks of 10 ms as the kernel counts them."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_bytes(scene: Scene, found: Mapping[int, bytes] | Iterable[tuple[int, bytes]]) -> int:
    """Compare samples with the source; how many there were.

    Raises:
        WrongBytesError: one differs.
    """
    count = 0
    for index, data in dict(found).items():
        if data != scene.source.data(index):
            raise WrongBytesError(f"sample {index} of {scene.spec.key}: {len(data)} other bytes")
        count += 1
    return count


def drop_caches_for(machine: Machine, cold: bool) -> None:
    """Make the kernel forget what it cached, when that is wanted.

    Raises:
        Unavailable: it cannot be done here.
    """
    if cold and not machine.drop_caches() and not machine.pretend_cold:
        raise Unavailable("cold files: dropping the kernel's caches needs root")
