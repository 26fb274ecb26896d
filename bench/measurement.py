"""Contenders of the cases, and the measurement that one run of a contender yields.

A contender reads samples in one way: DLFS through one of its interfaces, or a competitor. It does
its set-up first and starts its own clock, so that set-up is never timed. CPU time is that of this
process with all its threads. A contender that works in other processes adds their CPU time.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.datasets import Scene, Source
from bench.errors import WrongBytesError
from bench.machine import Machine
from bench.resources import Stopwatch

CHECKED = 16
"""Most samples of a run that are remembered and compared with the source."""
REMEMBER_EVERY = 16
"""Interval, in batches, at which a sample is remembered."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run.

    Attributes:
        seconds: time after which a contender with a steady pace stops. Whole epochs ignore it.
        mount_files: most files that a program reads through a mount.
        paths: paths of the synthetic sample directory.
        datasets: datasets of a volume with many.
        clients: most processes that read from one service.
        seed: seed of every order.
    """

    seconds: float = 1.5
    mount_files: int = 10_000
    paths: int = 1_000_000
    datasets: int = 9_999
    clients: int = 8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that a contender is given for one run: data, machine, limits, round number."""

    scene: Scene
    machine: Machine
    limits: Limits
    round: int


@dataclass(slots=True)
class Measurement:
    """The result of one run.

    Attributes:
        samples: number of samples read or looked up.
        bytes: bytes of these samples.
        seconds: elapsed time.
        cpu_seconds: CPU time of all threads and processes that worked.
        checked: number of samples whose bytes were compared with the source.
        notes: further plain values for the report.
    """

    samples: int
    bytes: int
    seconds: float
    cpu_seconds: float
    checked: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """One way to read samples. A frozen dataclass whose fields are its parameters."""

    @property
    def label(self) -> str:
        """Name shown in tables; unique within a case."""
        ...

    def run(self, environment: Environment) -> Measurement:
        """Measure once.

        Raises:
            Unavailable: the machine lacks something.
            WrongBytesError: bytes that were read differ from the source.
        """
        ...


@dataclass
class Tally:
    """Counts the batches of a run, and remembers a few of their samples, to compare them later."""

    samples: int = 0
    bytes: int = 0
    batches: int = 0
    remembered: dict[int, builtins.bytes] = field(default_factory=dict)

    def add(
        self,
        indices: Sequence[int] | NDArray[np.integer],
        size_bytes: int,
        data: Callable[[int], builtins.bytes],
    ) -> None:
        """Count a batch of some bytes; ``data`` returns the sample at a position of the batch."""
        if self.batches % REMEMBER_EVERY == 0 and len(self.remembered) < CHECKED:
            position = self.batches * 37 % len(indices)
            self.remembered[int(indices[position])] = data(position)
        self.samples += len(indices)
        self.bytes += size_bytes
        self.batches += 1

    def add_batch(self, batch: dlfs.Batch) -> None:
        """Count a batch of DLFS."""
        self.add(batch.indices, int(batch.lengths.sum()), batch.tobytes)

    def result(self, source: Source, watch: Stopwatch, **notes: object) -> Measurement:
        """Compare the remembered samples with the source, and return the measurement."""
        checked = check_bytes(source, self.remembered)
        return Measurement(
            self.samples, self.bytes, watch.seconds, watch.cpu_seconds, checked, dict(notes)
        )


def check_bytes(source: Source, found: Mapping[int, bytes]) -> int:
    """Compare samples, given by index, with the source; return their number or raise."""
    for index, data in found.items():
        if data != source.data(index):
            raise WrongBytesError(f"sample {index} has {len(data)} bytes that are not its own")
    return len(found)
