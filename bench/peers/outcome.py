"""The outcome of a race: every run, every conversion, and the peers that could not run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GLOBAL_GIVEN = "global, as given"
GLOBAL_OWN = "global, its own"


@dataclass(frozen=True, slots=True)
class Converted:
    """The conversion of a data set into a peer's format, until the data was on the disk.

    `stored_bytes` are the bytes that it takes there.
    """

    peer: str
    dataset: str
    seconds: float
    cpu_seconds: float
    stored_bytes: int
    samples: int
    sample_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one peer, or of a limit of the machine.

    Attributes:
        peer: name of the peer or of the limit.
        dataset: key of the data set.
        order: ``GLOBAL_GIVEN``, ``GLOBAL_OWN``, or the peer's description of its own order.
        warm: True if everything was in memory.
        processes: number of processes that read at once.
        group: number of the group of peers that ran in turn.
        round: number of the round in its group.
        samples: samples read in the timed part.
        bytes: bytes of these samples.
        seconds: duration of the timed part.
        cpu_seconds: CPU time of all processes in the timed part.
        first_batch_seconds: time from the start signal to the first batch, opening included; cold
            runs only.
        start_pss_bytes: memory of all processes before the start signal.
        peak_pss_bytes: most memory of all processes, mapped files included.
        peak_rss_bytes: most memory of the largest reading process.
        checked: number of samples that were compared with the source.
        limit: True for a limit of the machine.
    """

    peer: str
    dataset: str
    order: str
    warm: bool
    processes: int
    group: int
    round: int
    samples: int
    bytes: int
    seconds: float
    cpu_seconds: float
    first_batch_seconds: float | None = None
    start_pss_bytes: int = 0
    peak_pss_bytes: int = 0
    peak_rss_bytes: int = 0
    checked: int = 0
    limit: bool = False

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def bandwidth(self) -> float:
        """Bytes of samples per second."""
        return self.bytes / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of a sample in microseconds."""
        return 1e6 * self.cpu_seconds / self.samples

    @property
    def is_global(self) -> bool:
        """True if every order of the samples was equally likely."""
        return self.order in (GLOBAL_GIVEN, GLOBAL_OWN)


@dataclass(slots=True)
class Outcome:
    """All results of a race.

    Attributes:
        runs: all runs.
        converted: all conversions.
        missing: peers that did not run: ``(peer, data set, manner or "", reason)``.
        datasets: parameters and sizes of the data sets, by key.
        versions: versions of the peers' packages.
    """

    runs: list[Run] = field(default_factory=list)
    converted: list[Converted] = field(default_factory=list)
    missing: list[tuple[str, str, str, str]] = field(default_factory=list)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
