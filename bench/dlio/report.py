"""Tables of DLIO's figures side by side: on the terminal, as Markdown, and every run as JSON.

Medians over the rounds; what DLFS has over ext4 is taken within each round, and the median of those
counts. Differences of utilisation are percentage points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import page
from bench.dlio.workloads import WAYS, Workload

COLUMNS = (
    "way",
    "epoch",
    "AU %",
    "from - to",
    "over ext4",
    "samples/s",
    "over ext4",
    "first batch s",
)
SAME_POINTS = 1.0
"""Points of utilisation that runs of the same thing differ by, and more."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Race:
    """What became of a workload.

    Attributes:
        workload: which.
        files: that were trained on.
        data_bytes: of all files that DLIO made.
        runs: of each way, by round.
    """

    workload: Workload
    files: int
    data_bytes: int
    runs: dict[str, list[Figures]]

    def epochs(self, way: str, number: int, figure: str) -> list[float]:
        """A figure of one epoch, by round."""
        return [run["epochs"][number][figure] for run in self.runs[way]]

    def points_over_plain(self, way: str, number: int) -> float:
        """By how many points utilisation is above ext4's in the same round."""
        ours, plain = (self.epochs(who, number, "utilisation") for who in (way, WAYS[0]))
        return median(one - other for one, other in zip(ours, plain, strict=True))

    def verdict(self, way: str) -> str:
        """Of the cold epoch: ``higher``, ``the same`` or ``lower`` than ext4."""
        points = self.points_over_plain(way, 0)
        if abs(points) < SAME_POINTS:
            return "the same"
        return "higher" if points > 0 else "lower"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with every run."""
        return {
            "workload": self.workload.name,
            "about": self.workload.about,
            "files": self.files,
            "data_bytes": self.data_bytes,
            "batch_size": self.workload.batch_size,
            "computation_seconds": self.workload.computation_seconds,
            "runs": self.runs,
            "verdicts": {way: self.verdict(way) for way in WAYS[1:]},
        }


def title_of(race: Race) -> str:
    """What was trained on, and what the accelerator would take."""
    load = race.workload
    samples = race.files * load.samples_per_file
    return (
        f"{load.name}: {samples:,} samples in {race.files:,} files, {race.data_bytes / 2**20:,.0f} "
        f"MiB; batches of {load.batch_size}, {load.computation_seconds * 1e3:g} ms each: "
        f"{load.offered():,.0f} samples/s at AU 100 %"
    )


def rows_of(race: Race) -> list[tuple[str, ...]]:
    """A row for each way and epoch."""
    rows = []
    for way in WAYS:
        for number in range(len(race.runs[way][0]["epochs"])):
            used = race.epochs(way, number, "utilisation")
            rates, plain = (race.epochs(who, number, "rate") for who in (way, WAYS[0]))
            ratio = median(one / other for one, other in zip(rates, plain, strict=True))
            first = median(race.epochs(way, number, "first_seconds"))
            cold = number == 0 and race.runs[way][0]["cold"]
            rows.append(
                (
                    way,
                    f"{number + 1}, cold" if cold else f"{number + 1}",
                    f"{median(used):.1f}",
                    f"{min(used):.1f} - {max(used):.1f}",
                    "" if way == WAYS[0] else f"{race.points_over_plain(way, number):+.1f}",
                    f"{median(rates):,.4g}",
                    "" if way == WAYS[0] else f"{ratio:.2f}",
                    f"{first:.2f}",
                )
            )
    return rows


def show(console: Console, race: Race) -> None:
    """One workload's table."""
    table = Table(*COLUMNS, title=title_of(race), title_justify="left")
    for row in rows_of(race):
        table.add_row(*row)
    console.print(table)


def markdown(facts: Figures, races: Sequence[Race]) -> str:
    """The whole report."""
    lines = ["# DLIO, side by side", ""]
    lines += [*page.head(facts), ""]
    for race in races:
        lines += [f"## {title_of(race)}", "", *page.table(COLUMNS, rows_of(race)), ""]
        told = [f"{way}: {race.verdict(way)}" for way in WAYS[1:]]
        lines += [f"Utilisation against ext4, cold: {', '.join(told)}.", ""]
    return "\n".join(lines)


def write(folder: Path, facts: Figures, arguments: Figures, races: Sequence[Race]) -> Path:
    """Write a run as JSON, with every figure, and as Markdown; returns the JSON's path."""
    more = {"arguments": arguments, "workloads": [race.to_dict() for race in races]}
    return page.write(folder, "dlio", facts, markdown(facts, races), more)
