"""Tables of results: on the terminal, as Markdown, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import page
from bench.cases import bandwidth, rate
from bench.runner import Result, checked_samples, ratios
from dlfs.units import MIB

COLUMNS = ("contestant", "samples/s", "from - to", "MiB/s", "CPU us/sample", "notes")
FLOOR_COLUMNS = ("case", "floor", "at least, times", "measured, times", "from - to", "")


def count_text(value: float) -> str:
    """A figure: in whole numbers, when it is not small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _notes(notes: dict[str, Any]) -> str:
    """What a reader of the table must know: the plan, and reads where none were due."""
    if notes.get("reads"):
        return f"{notes['reads']} reads of the device"
    return str(notes.get("plan", ""))


def rows_of(result: Result) -> list[tuple[str, ...]]:
    """One row a contestant: medians over the rounds."""
    rows: list[tuple[str, ...]] = []
    for who, runs in result.samples.items():
        rates = [rate(run) for run in runs]
        megabytes = median(bandwidth(run) for run in runs) / MIB
        cpu = median(run.cpu_seconds / max(1, run.samples) for run in runs) * 1e6
        rows.append(
            (
                who.label,
                count_text(median(rates)),
                f"{count_text(min(rates))} - {count_text(max(rates))}",
                count_text(megabytes) if megabytes else "",
                f"{cpu:.2f}",
                _notes(runs[-1].notes),
            )
        )
    rows += [(who.label, "-", why, "", "", "") for who, why in result.missing.items()]
    return rows


def floor_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row a floor: the median of the rounds' ratios, and whether it is met."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        for floor, verdict in zip(result.case.floors, result.verdicts(), strict=True):
            found = ratios(floor, result.samples)
            measured = f"{median(found):.2f}" if found else "-"
            spread = f"{min(found):.2f} - {max(found):.2f}" if found else ""
            text = f"{floor.of.label}: {floor.text}"
            rows.append(
                (result.case.name, text, f"{floor.at_least:.3g}", measured, spread, verdict)
            )
    return rows


def title_of(result: Result) -> str:
    """A case and its data."""
    data = result.dataset
    size, stored = data["sample_bytes"] / MIB, data["stored_bytes"] / MIB
    return (
        f"{result.case.name}: {result.case.about} "
        f"({data['samples']:,} samples, {size:,.0f} MiB in {stored:,.0f} MiB of chunks, "
        f"{data['files']:,} plain files; {result.rounds} rounds)"
    )


def print_case(console: Console, result: Result) -> None:
    """Show one case."""
    console.print(rich_table(title_of(result), COLUMNS, rows_of(result)))


def print_floors(console: Console, results: Sequence[Result]) -> None:
    """Show all floors."""
    console.print(rich_table("Floors of DESIGN.md, section 10", FLOOR_COLUMNS, floor_rows(results)))


def rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal; figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if 0 < number < 5 and column != "floor" else "left"
        )
    for row in rows:
        style = "red" if row[-1] == "MISSED" else "green" if row[-1] == "met" else None
        table.add_row(*row, style=style)
    return table


def markdown(facts: dict[str, Any], results: Sequence[Result]) -> str:
    """All tables, under the facts they depend on."""
    lines = ["# DLFS, plain files and the limits of the machine", "", *page.head(facts)]
    lines += [f"- samples compared with their source: {checked_samples(results):,}", ""]
    lines += ["## Floors", "", *page.table(FLOOR_COLUMNS, floor_rows(results)), ""]
    for result in results:
        lines += [f"## {title_of(result)}", "", *page.table(COLUMNS, rows_of(result)), ""]
    return "\n".join(lines)


def write(
    folder: Path, facts: dict[str, Any], arguments: dict[str, Any], results: Sequence[Result]
) -> Path:
    """Write a run as JSON, with every sample, and as Markdown; returns the JSON's path."""
    more = {"arguments": arguments, "cases": [result.to_dict() for result in results]}
    return page.write(folder, "cases", facts, markdown(facts, results), more)
