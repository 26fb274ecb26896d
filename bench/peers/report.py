"""The report of a race: tables of runs, conversions and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console

from bench import comparison
from bench.comparison import MISSED
from bench.peers.outcome import Converted, Outcome, Run
from bench.peers.peer import all_peers
from bench.peers.verdicts import (
    CACHED_FLOOR,
    CACHED_PEER,
    FLOOR,
    FLOOR_PEERS,
    STATES,
    Verdict,
    family,
    verdicts,
)
from bench.report import Report, Table, number_text
from dlfs.base.units import MIB

VALUES: tuple[tuple[str, bool, int, Callable[[Run], float | None]], ...] = (
    ("samples/s, cold", False, 1, lambda run: run.rate),
    ("warm", True, 1, lambda run: run.rate),
    ("MiB/s, cold", False, 1, lambda run: run.bandwidth / MIB),
    ("warm", True, 1, lambda run: run.bandwidth / MIB),
    ("CPU us/sample, cold", False, 1, lambda run: run.cpu_us),
    ("warm", True, 1, lambda run: run.cpu_us),
    ("two processes, samples/s, cold", False, 2, lambda run: run.rate),
    ("warm", True, 2, lambda run: run.rate),
    ("first batch ms, cold", False, 1, lambda run: 1e3 * (run.first_batch_seconds or 0) or None),
    ("memory MiB, cold", False, 1, lambda run: run.peak_pss_bytes / MIB or None),
    ("warm", True, 1, lambda run: run.peak_pss_bytes / MIB or None),
)
"""Columns of the table of runs: head, state, processes, and value of a run; None: not measured."""

CONVERSION_COLUMNS = (
    "peer",
    "samples",
    "seconds",
    "MiB/s",
    "CPU seconds",
    "MiB on disk",
    "times the samples' bytes",
)
VERDICT_COLUMNS = ("data", "", "DLFS", "against", *comparison.COLUMNS)

LABELS = {"512": "512 B", "4k": "4 KiB", "110k": "110 KiB"}
"""Names of data sets in the heads of columns."""

SUMMARY = (
    "Samples/s of DLFS in global order over those of the peer's fastest way, the median of "
    f"the rounds' ratios. The floor is {FLOOR:g}; rows without a verdict have none. "
    "`*`: next to the peer's own shuffle, which is no global order. *Cold*: all readers may come "
    "to have all of the data in memory. *Little memory*: DLFS has a sixteenth."
)


# ---- tables --------------------------------------------------------------------------------------


def run_table(outcome: Outcome, key: str) -> Table:
    """Return the table of a data set: medians over all rounds, a row for each peer and order."""
    ways: dict[tuple[str, str], list[Run]] = {}
    for run in outcome.runs:
        if run.dataset == key:
            ways.setdefault((run.peer, "" if run.limit else run.order), []).append(run)
    rows = []
    for way, found in sorted(ways.items(), key=lambda way: way[1][0].limit):  # the limits last
        cells = list(way)
        for _, warm, processes, value in VALUES:
            runs = [run for run in found if (run.warm, run.processes) == (warm, processes)]
            values = [one for one in map(value, runs) if one is not None]
            cells.append(number_text(median(values)) if values else "")
        rows.append(cells)
    heads = [head for head, *_ in VALUES]
    return Table(_title_of(outcome, key), ("peer", "order", *heads), rows)


def _title_of(outcome: Outcome, key: str) -> str:
    data = outcome.datasets[key]
    size_mib = data["sample_bytes"] / MIB
    rounds = 1 + max((run.round for run in outcome.runs if run.dataset == key), default=0)
    counts = f"{data['samples']:,} samples, {size_mib:,.0f} MiB, {rounds} rounds"
    return f"{key}: {data['about']} ({counts})"


def conversion_table(converted: Iterable[Converted], dataset: str) -> Table:
    """Return the table of a data set's conversions, a row for each peer that converts."""
    once = {one.peer: one for one in converted if one.dataset == dataset}
    rows = [
        (
            one.peer,
            f"{one.samples:,}",
            number_text(one.seconds),
            number_text(one.sample_bytes / MIB / one.seconds),
            number_text(one.cpu_seconds),
            number_text(one.stored_bytes / MIB),
            f"{one.stored_bytes / max(1, one.sample_bytes):.2f}",
        )
        for one in once.values()
    ]
    return Table("", CONVERSION_COLUMNS, rows)


def verdict_table(outcome: Outcome, title: str) -> Table:
    """Return the table of all comparisons."""
    rows = [(one.dataset, one.state, one.ours, one.peer, *one.cells()) for one in verdicts(outcome)]
    return Table(title, VERDICT_COLUMNS, rows)


def summary(outcome: Outcome) -> list[str]:
    """Return the lines of the summary: ratios, by peer, and by data set and state.

    Peers with a floor that did not run are named below it with their reasons.
    """
    found = verdicts(outcome)
    measured = {(one.dataset, one.state) for one in found}
    columns = [
        (key, state) for key in outcome.datasets for state in STATES if (key, state) in measured
    ]
    by_cell: dict[tuple[str, str, str, bool], Verdict] = {}
    for one in found:
        by_cell[family(one.peer), one.dataset, one.state, one.at_least == CACHED_FLOOR] = one
    names = [*FLOOR_PEERS, *dict.fromkeys(family(one.peer) for one in found if not one.at_least)]
    rows = [
        [name, *(_ratio(by_cell.get((name, *column, False))) for column in columns)]
        for name in names
    ]
    cached = [_ratio(by_cell.get((CACHED_PEER, *column, True))) for column in columns]
    rows.append([f"{CACHED_PEER}, cached reads: {CACHED_FLOOR:g} times", *cached])
    heads = [f"{LABELS.get(key, key)}, {state}" for key, state in columns]
    ran = {family(run.peer) for run in outcome.runs}
    reasons = {family(peer): why for peer, _, _, why in outcome.missing if family(peer) not in ran}
    absent = [f"- {name} did not run: {reason}" for name, reason in reasons.items()]
    return [
        SUMMARY,
        "",
        *Table("", ["peer", *heads], rows).markdown(),
        *([""] if absent else []),
        *absent,
    ]


def _ratio(verdict: Verdict | None) -> str:
    """Return a cell: the ratio, and whether the floor is met."""
    if verdict is None:
        return "-"
    mark = "*" if "(" in verdict.peer else ""
    text = f"{number_text(verdict.measured)}{mark} {verdict.verdict}"
    return f"**{text}**" if verdict.verdict == MISSED else text.strip()


def show(console: Console, outcome: Outcome) -> None:
    """Print the tables of the data sets and comparisons, and the peers that did not run."""
    for key in outcome.datasets:
        run_table(outcome, key).show(console)
    verdict_table(outcome, "Floors").show(console)
    for peer, key, manner, why in outcome.missing:
        console.print(f"not run: {peer}, {key} {manner}: {why}", markup=False, highlight=False)


# ---- files ---------------------------------------------------------------------------------------


def make_report(facts: Mapping[str, Any], arguments: Mapping[str, Any], outcome: Outcome) -> Report:
    """Return the report of a race: all tables, and the way in which each peer was used."""
    data = {"arguments": arguments, **asdict(outcome)}
    report = Report("peers", "DLFS next to its peers", facts, data)
    packages = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    report.lines.append(f"- packages: {packages}")
    report.add(f"- samples compared with their source: {sum(r.checked for r in outcome.runs):,}")
    report.add("## How many times as fast as its peers DLFS is", "\n".join(summary(outcome)))
    for key in outcome.datasets:
        report.add(run_table(outcome, key), "Conversion:")
        report.add(conversion_table(outcome.converted, key))
    if outcome.missing:
        report.add(Table("Not run", ("peer", "data", "how", "why"), outcome.missing))
    report.add(verdict_table(outcome, "All comparisons"), "## How each is used")
    ran = {run.peer for run in outcome.runs}
    used = [f"- **{name}**: {peer.about}" for name, peer in all_peers().items() if name in ran]
    report.add("\n".join(used))
    return report
