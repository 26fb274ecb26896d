"""Runs cases: lays out their data sets and measures their contenders in rounds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import datasets
from bench.cases.table import Case, Floor
from bench.comparison import MET, Comparison
from bench.datasets import OWN_KEYS, TARGET_KEYS, Scene, spec_of
from bench.field_samples import SOURCES, field_scene
from bench.machine import Machine
from bench.measurement import Contender, Environment, Limits, Measurement
from bench.progress import Stretch
from bench.rounds import run_rounds
from bench.targets import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run; the options of the command line describe them."""

    directory: Path
    rounds: int = 3
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
    """The result of a case.

    Attributes:
        case: the case.
        dataset: the scene's sizes and parameters.
        runs: measurements of each contender by its label, then by round.
        missing: why a contender could not run, for those that could not.
    """

    case: Case
    dataset: dict[str, Any]
    runs: dict[str, list[Measurement]]
    missing: dict[str, str]

    def comparisons(self) -> list[tuple[Floor, Comparison, str]]:
        """Return each floor with its comparison and its verdict."""
        found = [(floor, compare(floor, self.runs)) for floor in self.case.floors]
        met_groups = {floor.either for floor, one in found if one.verdict == MET} - {""}
        return [
            (floor, one, "met by the other")
            if one.verdict != MET and floor.either in met_groups
            else (floor, one, one.verdict)
            for floor, one in found
        ]

    @property
    def rounds(self) -> int:
        """Number of rounds that were made."""
        return max(map(len, self.runs.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the case, every run and the floors as plain values."""
        return {
            "case": self.case.name,
            "about": self.case.about,
            "dataset": self.dataset,
            "runs": {label: [asdict(run) for run in runs] for label, runs in self.runs.items()},
            "missing": self.missing,
            "floors": [
                {
                    "text": floor.text,
                    "of": floor.of.label,
                    "against": [other.label for other in floor.against],
                    "at_least": floor.at_least,
                    "ratios": list(comparison.ratios),
                    "verdict": verdict,
                }
                for floor, comparison, verdict in self.comparisons()
            ],
        }


def compare(floor: Floor, runs: Mapping[str, Sequence[Measurement]]) -> Comparison:
    """Compare a floor's contenders in each round; no ratios if one of them is missing."""
    if any(contender.label not in runs for contender in (floor.of, *floor.against)):
        return Comparison(ratios=(), at_least=floor.at_least)
    other_metric = floor.against_metric or floor.metric
    ratios = []
    for number, run in enumerate(runs[floor.of.label]):
        others = [other_metric(runs[contender.label][number]) for contender in floor.against]
        ratios.append(floor.metric(run) / min(others, default=floor.base))
    return Comparison(ratios=tuple(ratios), at_least=floor.at_least)


class Stage:
    """The folder on the disk under test, the scenes laid out in it, and the machine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = settings.directory / "dlfs-bench"
        self.folder.mkdir(parents=True, exist_ok=True)
        core = max(os.sched_getaffinity(0)) if settings.core is None else settings.core
        self.machine = Machine(self.folder, core=core, perf=settings.perf)
        self._scenes: dict[str, Scene] = {}

    def scene(self, key: str) -> Scene:
        """Return the scene of a data set, laid out on first use."""
        if key not in self._scenes:
            self._scenes[key] = self._make_scene(key)
        return self._scenes[key]

    def _make_scene(self, key: str) -> Scene:
        settings, spec = self.settings, spec_of(key)
        own_bytes = spec.quick_bytes if settings.quick else spec.total_bytes
        total_bytes, seed = settings.total_bytes or own_bytes, settings.limits.seed
        if key in TARGET_KEYS:  # the namespace holds one data set at a time
            for other in TARGET_KEYS:
                self._scenes.pop(other, None)
            folder = self.folder / f"scene-{key}"
            return settings.targets.make_scene(spec, folder, total_bytes, seed)
        if key in OWN_KEYS:
            return datasets.state_scene(spec, self.folder, total_bytes, seed)
        if key in SOURCES:
            return field_scene(spec, self.folder, total_bytes, seed)
        return datasets.make_scene(
            spec,
            self.folder,
            total_bytes=total_bytes,
            files_max=settings.files_max,
            seed=seed,
            corpus=settings.corpus,
        )

    def run(self, case: Case, stretch: Stretch) -> Result:
        """Run a case."""
        stretch.show(f"writing the data set {case.dataset}")
        scene = self.scene(case.dataset)

        def run_once(contender: Contender, number: int) -> Measurement:
            return contender.run(Environment(scene, self.machine, self.settings.limits, number))

        contenders = {contender.label: contender for contender in case.contenders}
        found = run_rounds(contenders, self.settings.rounds, run_once, stretch)
        return Result(case, scene.describe(), found.runs, found.missing)

    def close(self) -> None:
        """Remove the data, unless it is to be left for the next run."""
        on_target = not self._scenes.keys().isdisjoint(TARGET_KEYS)
        self._scenes.clear()
        if self.settings.keep:
            return
        shutil.rmtree(self.folder)
        if on_target:
            self.settings.targets.wipe()
