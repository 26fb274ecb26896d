"""The report of the cases: a table for each case, and one of all floors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench import comparison
from bench.cases.runner import Result
from bench.cases.table import bandwidth, rate
from bench.comparison import MET
from bench.report import Report, Table, number_text
from dlfs.base.units import MIB

COLUMNS = ("contender", "samples/s", "from - to", "MiB/s", "CPU us/sample", "notes")
FLOOR_COLUMNS = ("case", "floor", *comparison.COLUMNS)


def _note(notes: Mapping[str, Any]) -> str:
    """Return the note for the table: device reads, a plan, or a checkpoint's times."""
    if "load_seconds" in notes:
        load, stall = notes["load_seconds"], notes["stall_seconds"]
        return f"load {load:.2f} s, stall {1000 * stall:.0f} ms"
    if notes.get("reads"):
        return f"{notes['reads']} reads of the device"
    return str(notes.get("plan", ""))


def case_table(result: Result) -> Table:
    """Return a case's table: medians over the rounds, a row for each contender."""
    rows: list[tuple[str, ...]] = []
    for label, runs in result.runs.items():
        rates = [rate(run) for run in runs]
        mib = median(bandwidth(run) for run in runs) / MIB
        cpu_us = median(run.cpu_seconds / max(1, run.samples) for run in runs) * 1e6
        rows.append(
            (
                label,
                number_text(median(rates)),
                f"{number_text(min(rates))} - {number_text(max(rates))}",
                number_text(mib) if mib else "",
                f"{cpu_us:.2f}",
                _note(runs[-1].notes),
            )
        )
    rows += [(label, "-", reason, "", "", "") for label, reason in result.missing.items()]
    data = result.dataset
    size_mib, stored_mib = data["sample_bytes"] / MIB, data["stored_bytes"] / MIB
    title = (
        f"{result.case.name}: {result.case.about} "
        f"({data['samples']:,} samples, {size_mib:,.0f} MiB in {stored_mib:,.0f} MiB of chunks, "
        f"{data['files']:,} plain files; {result.rounds} rounds)"
    )
    return Table(title, COLUMNS, rows)


def floor_table(results: Sequence[Result], name: str = "Floors") -> Table:
    """Return the table of all floors: the median of the rounds' ratios, and the verdict.

    Those that are not met come first, and the title has the number of each verdict.
    """
    rows = [
        (result.case.name, f"{floor.of.label}: {floor.text}", *found.cells()[:-1], verdict)
        for result in results
        for floor, found, verdict in result.comparisons()
    ]
    rows.sort(key=lambda row: row[-1].startswith(MET))
    counts = Counter(sorted(row[-1] for row in rows))
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return Table(f"{name}: {text or 'none'}", FLOOR_COLUMNS, rows)


def make_report(
    facts: Mapping[str, Any], arguments: Mapping[str, Any], results: Sequence[Result]
) -> Report:
    """Return the report of a run: facts, floors, and a table for each case."""
    data = {"arguments": arguments, "cases": [result.to_dict() for result in results]}
    report = Report("cases", "DLFS, plain files and the limits of the machine", facts, data)
    checked = sum(run.checked for one in results for runs in one.runs.values() for run in runs)
    report.add(f"- samples compared with their source: {checked:,}")
    report.add(floor_table(results), *map(case_table, results))
    return report
