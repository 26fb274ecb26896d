"""The report of DLIO's results, side by side.

Tables have medians over the rounds. Differences between DLFS and ext4 are taken within each round,
and the median of those counts. Differences of utilisation are percentage points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.dlio.workloads import WAYS, Workload
from bench.report import Report, Table
from dlfs.base.units import MIB

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
"""Percentage points of utilisation below which two ways count as the same."""

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Race:
    """The results of a workload: DLIO's results for each way, by round."""

    workload: Workload
    files: int
    data_bytes: int
    runs: dict[str, list[Results]]

    def epochs(self, way: str, number: int, key: str) -> list[float]:
        """Return a value of one epoch, by round."""
        return [run["epochs"][number][key] for run in self.runs[way]]

    def over_ext4(self, way: str, number: int) -> tuple[float, float]:
        """Compare an epoch with ext4's of the same round, by the median over the rounds.

        Returns:
            Difference of utilisation in percentage points, and ratio of samples per second.
        """
        used, plain_used = (self.epochs(one, number, "utilisation") for one in (way, WAYS[0]))
        rates, plain_rates = (self.epochs(one, number, "rate") for one in (way, WAYS[0]))
        return (
            median(one - other for one, other in zip(used, plain_used, strict=True)),
            median(one / other for one, other in zip(rates, plain_rates, strict=True)),
        )

    def verdict(self, way: str) -> str:
        """Return ``higher``, ``the same`` or ``lower``: a way's cold utilisation against ext4's."""
        points, _ = self.over_ext4(way, 0)
        if abs(points) < SAME_POINTS:
            return "the same"
        return "higher" if points > 0 else "lower"

    def to_dict(self) -> dict[str, Any]:
        """Return the workload and every run as plain values."""
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


def race_table(race: Race) -> Table:
    """Return a workload's table: a row for each way and epoch."""
    rows = []
    for way in WAYS:
        for number in range(len(race.runs[way][0]["epochs"])):
            used = race.epochs(way, number, "utilisation")
            points, ratio = race.over_ext4(way, number)
            cold = number == 0 and race.runs[way][0]["cold"]
            rows.append(
                (
                    way,
                    f"{number + 1}, cold" if cold else f"{number + 1}",
                    f"{median(used):.1f}",
                    f"{min(used):.1f} - {max(used):.1f}",
                    "" if way == WAYS[0] else f"{points:+.1f}",
                    f"{median(race.epochs(way, number, 'rate')):,.4g}",
                    "" if way == WAYS[0] else f"{ratio:.2f}",
                    f"{median(race.epochs(way, number, 'first_seconds')):.2f}",
                )
            )
    load = race.workload
    samples = race.files * load.samples_per_file
    title = (
        f"{load.name}: {samples:,} samples in {race.files:,} files, {race.data_bytes / MIB:,.0f} "
        f"MiB; batches of {load.batch_size}, {load.computation_seconds * 1e3:g} ms each: "
        f"{load.batch_size / load.computation_seconds:,.0f} samples/s at AU 100 %"
    )
    return Table(title, COLUMNS, rows)


def make_report(
    facts: Mapping[str, Any], arguments: Mapping[str, Any], races: Sequence[Race]
) -> Report:
    """Return the report of all workloads that were run."""
    data = {"arguments": arguments, "workloads": [race.to_dict() for race in races]}
    report = Report("dlio", "DLIO, side by side", facts, data)
    for race in races:
        verdicts = ", ".join(f"{way}: {race.verdict(way)}" for way in WAYS[1:])
        report.add(race_table(race), f"Utilisation against ext4, cold: {verdicts}.")
    return report
