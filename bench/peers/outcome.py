"""What a race leaves: every run, every conversion, and who could not run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

GLOBAL_GIVEN = "global, as given"
GLOBAL_OWN = "global, its own"


@dataclass(frozen=True, slots=True)
class Converted:
    """A peer's data, laid out.

    Attributes:
        peer: by name.
        dataset: key of its data set.
        seconds: that it took, until it was on the disk.
        cpu_seconds: of them.
        stored_bytes: on the disk.
        samples: that it has, of all.
        sample_bytes: of them.
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
    """One run of one peer, or of a limit.

    Attributes:
        peer: by name; the label of a limit.
        dataset: key of its data set.
        order: ``GLOBAL_GIVEN``, ``GLOBAL_OWN``, or the peer's own, as it calls it.
        warm: with everything in memory.
        processes: at once.
        group: of peers that ran together.
        round: of the group.
        samples: in the timed part.
        bytes: of them.
        seconds: of it.
        cpu_seconds: of all processes in it.
        first_batch_seconds: from the start, opening included; cold only.
        start_pss_bytes: memory of all processes before the start.
        peak_pss_bytes: the most, mapped files included.
        peak_rss_bytes: of the largest process that was started.
        checked: samples that were compared.
        limit: it is no peer but what the machine can do.
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
        """Samples a second."""
        return self.samples / self.seconds

    @property
    def is_global(self) -> bool:
        """Whether every order of the samples was as likely as any other."""
        return self.order in (GLOBAL_GIVEN, GLOBAL_OWN)


@dataclass(frozen=True, slots=True)
class Deep:
    """One run at one depth.

    Attributes:
        who: ran.
        dataset: key of its data set.
        depth: reads in flight.
        round: of the sweep.
        rate: samples a second.
    """

    who: str
    dataset: str
    depth: int
    round: int
    rate: float


@dataclass(slots=True)
class Outcome:
    """All that a race left.

    Attributes:
        runs: every one.
        converted: every conversion.
        missing: who did not run: ``(peer, data set, manner or "", reason)``.
        datasets: what was raced over, by key.
        versions: of the peers' packages.
        depths: the sweep over the reads in flight.
    """

    runs: list[Run] = field(default_factory=list)
    converted: list[Converted] = field(default_factory=list)
    missing: list[tuple[str, str, str, str]] = field(default_factory=list)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    depths: list[Deep] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, whole: dict[str, Any]) -> Outcome:
        """What ``to_dict`` made of one."""
        return cls(
            [Run(**run) for run in whole["runs"]],
            [Converted(**one) for one in whole["converted"]],
            [(peer, key, how, why) for peer, key, how, why in whole["missing"]],
            whole["datasets"],
            whole["versions"],
            [Deep(**one) for one in whole["depths"]],
        )

    def add(self, other: Outcome) -> None:
        """Take another race in; its groups stay apart from those that are here."""
        groups = max((run.group for run in self.runs), default=0)
        self.runs += [replace(run, group=run.group + groups) for run in other.runs]
        self.converted += other.converted
        self.missing += [one for one in other.missing if one not in self.missing]
        self.datasets |= other.datasets
        self.versions |= other.versions
        self.depths += other.depths
