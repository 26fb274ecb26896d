"""Runs cases: lays the data out, lets the contestants take turns, keeps every run.

The machine is shared and its speed drifts, so that the contestants of a case run within the same
minute, round after round, and every second round in the opposite order. What a contestant lacks on
this machine is recorded with its reason.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import datasets
from bench.cases import Case, Floor
from bench.contestant import Contestant, Ground, Limits, Sample
from bench.datasets import SPECS, TARGET_KEYS, Scene
from bench.machine import Machine, Unavailable
from bench.progress import Allowance, Tell
from bench.targets import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line decides.

    Attributes:
        directory: on the disk under test; a folder is made in it.
        rounds: runs of each contestant.
        minutes: for all cases; those that come late make fewer rounds, one at least.
        quick: take the data sets' quick sizes.
        total_bytes: of every data set, instead of its own.
        files_max: plain files of a data set.
        corpus: folder of real files, or None.
        keep: leave the data for the next run.
        limits: of contestants.
        targets: a namespace behind a target, for the cases of initiators.
        core: of those initiators; None: the last that this process may use.
        perf: SPDK's own tool: a program in PATH, or its place.
    """

    directory: Path
    rounds: int = 3
    minutes: float | None = None
    quick: bool = False
    total_bytes: int | None = None
    files_max: int = 60_000
    corpus: Path | None = None
    keep: bool = False
    limits: Limits = field(default_factory=Limits)
    targets: Targets = field(default_factory=Targets)
    core: int | None = None
    perf: str = "spdk_nvme_perf"


@dataclass(slots=True)
class Result:
    """What became of a case.

    Attributes:
        case: which.
        dataset: what it raced over.
        samples: of each contestant, by round.
        missing: who could not run, and why.
    """

    case: Case
    dataset: dict[str, Any]
    samples: dict[Contestant, list[Sample]]
    missing: dict[Contestant, str]

    def verdicts(self) -> list[str]:
        """Of each floor: met, MISSED, not measured; or met by the other one that would do."""
        found = []
        for floor in self.case.floors:
            values = ratios(floor, self.samples)
            met = bool(values) and median(values) >= floor.at_least
            found.append("met" if met else "MISSED" if values else "not measured")
        words = [floor.either for floor in self.case.floors]
        met_words = {word for word, verdict in zip(words, found, strict=True) if verdict == "met"}
        return [
            "met by the other" if verdict != "met" and word and word in met_words else verdict
            for word, verdict in zip(words, found, strict=True)
        ]

    @property
    def rounds(self) -> int:
        """How many were made."""
        return max(map(len, self.samples.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with every run."""
        return {
            "case": self.case.name,
            "about": self.case.about,
            "dataset": self.dataset,
            "runs": {
                contestant.label: [sample.to_dict() for sample in samples]
                for contestant, samples in self.samples.items()
            },
            "missing": {who.label: why for who, why in self.missing.items()},
            "floors": [
                {
                    "text": floor.text,
                    "of": floor.of.label,
                    "against": [other.label for other in floor.against],
                    "at_least": floor.at_least,
                    "ratios": ratios(floor, self.samples),
                    "verdict": verdict,
                }
                for floor, verdict in zip(self.case.floors, self.verdicts(), strict=True)
            ],
        }


def ratios(floor: Floor, samples: dict[Contestant, list[Sample]]) -> list[float]:
    """A floor's ratio in each round; empty when somebody is missing."""
    if any(who not in samples for who in (floor.of, *floor.against)):
        return []
    other_metric = floor.against_metric or floor.metric
    found = []
    for number, sample in enumerate(samples[floor.of]):
        others = [other_metric(samples[who][number]) for who in floor.against]
        found.append(floor.metric(sample) / min(others, default=floor.base))
    return found


class Stage:
    """Where cases run: the folder on the disk under test, and the scenes made there so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = settings.directory / "dlfs-bench"
        self.folder.mkdir(parents=True, exist_ok=True)
        core = max(os.sched_getaffinity(0)) if settings.core is None else settings.core
        self.machine = Machine(self.folder, core=core, perf=settings.perf)
        self._scenes: dict[str, Scene] = {}
        self._allowance = Allowance(settings.minutes)

    def scene(self, key: str) -> Scene:
        """The scene of a data set, made on first use."""
        if key not in self._scenes:
            settings = self.settings
            spec = next(spec for spec in SPECS if spec.key == key)
            own_bytes = spec.quick_bytes if settings.quick else spec.total_bytes
            if key in TARGET_KEYS:  # the namespace holds one at a time
                for other in TARGET_KEYS:
                    self._scenes.pop(other, None)
                self._scenes[key] = settings.targets.make_scene(
                    spec,
                    self.folder / f"scene-{key}",
                    settings.total_bytes or own_bytes,
                    settings.limits.seed,
                )
                return self._scenes[key]
            self._scenes[key] = datasets.make_scene(
                spec,
                self.folder,
                total_bytes=settings.total_bytes or own_bytes,
                files_max=settings.files_max,
                seed=settings.limits.seed,
                corpus=settings.corpus,
            )
        return self._scenes[key]

    def run(self, case: Case, tell: Tell, due: float = 1.0) -> Result:
        """Run a case.

        Args:
            case: which.
            tell: told what is under way, and which share of the case is done.
            due: the share of the time for all cases that may be over when this one ends.

        Raises:
            WrongBytesError: a contestant read something else than the source has.
        """
        tell(f"{case.name}: laying out {case.dataset}", 0.0)
        scene = self.scene(case.dataset)
        samples: dict[Contestant, list[Sample]] = {who: [] for who in case.contestants}
        missing: dict[Contestant, str] = {}
        took = 0.0
        for number in range(self.settings.rounds):
            if number and not self._allowance.has_time_for(took, due):
                break
            begun = time.monotonic()
            order = case.contestants if number % 2 == 0 else tuple(reversed(case.contestants))
            for at, who in enumerate(order):
                if who in missing:
                    continue
                share = (number + at / len(order)) / self.settings.rounds
                tell(f"{case.name}: round {number + 1}: {who.label}", share)
                try:
                    ground = Ground(scene, self.machine, self.settings.limits, number)
                    samples[who].append(who.run(ground))
                except Unavailable as reason:
                    missing[who] = str(reason)
            took = time.monotonic() - begun
        for who in missing:
            del samples[who]
        return Result(case, scene.describe(), samples, missing)

    def close(self) -> None:
        """Remove the data, unless it is to be kept."""
        on_target = not self._scenes.keys().isdisjoint(TARGET_KEYS)
        self._scenes.clear()
        if self.settings.keep:
            return
        shutil.rmtree(self.folder)
        if on_target:
            self.settings.targets.wipe()


def checked_samples(results: Iterable[Result]) -> int:
    """Samples that were compared with their source."""
    return sum(
        run.checked for result in results for runs in result.samples.values() for run in runs
    )
