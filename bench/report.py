"""Reports: tables on the terminal, a page of Markdown, and all of it as JSON.

Each benchmark makes one `Report` of the facts of its run, its tables and its plain values. The page
and the JSON file have the same name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench.comparison import MET, MISSED
from dlfs.base.units import GIB

SCHEMA = 1
"""Version of the JSON files."""


def number_text(value: float) -> str:
    """Format a number: without decimals from 10 on, else with two."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title.

    Attributes:
        title: heading; empty: none.
        columns: heads of the columns.
        rows: cells of each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Return the lines of Markdown, with the title as a heading of the second level."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = [f"| {' | '.join(_cell(text) for text in line)} |" for line in lines]
        return [f"## {self.title}", "", *cells] if self.title else cells

    def show(self, console: Console) -> None:
        """Print the table; numbers are aligned to the right."""
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for number, column in enumerate(self.columns):
            is_number = 0 < number < 5 and column != "floor"
            table.add_column(column, justify="right" if is_number else "left")
        for row in self.rows:
            table.add_row(*row, style={MISSED: "red", MET: "green"}.get(row[-1]))
        console.print(table)


def _cell(text: str) -> str:
    plain = " ".join(text.replace("|", "\\|").split())
    return f"**{plain}**" if plain == MISSED else plain


def section_of(page: Path, heading: str) -> list[str]:
    """Return the lines of a page from the heading that begins like this to the next heading."""
    lines: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"## {heading}") or (lines and not line.startswith("## ")):
            lines.append(line)
        elif lines:
            break
    return lines


@dataclass(slots=True)
class Report:
    """The results of one run of a benchmark.

    Attributes:
        kind: name of the benchmark; file names begin with it.
        title: heading of the page.
        facts: facts of the machine, as `bench.machine.describe` returns them.
        data: plain values for the JSON file.
        lines: lines of Markdown below the facts.
    """

    kind: str
    title: str
    facts: Mapping[str, Any]
    data: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)

    def add(self, *parts: Table | str) -> None:
        """Add tables and lines of text, each followed by an empty line."""
        for part in parts:
            self.lines += [*([part] if isinstance(part, str) else part.markdown()), ""]

    def markdown(self) -> str:
        """Return the whole page."""
        return "\n".join([f"# {self.title}", "", *facts_list(self.facts), "", *self.lines, ""])

    def write(self, folder: Path) -> Path:
        """Write the page and the JSON file into a folder, and return the JSON file's path."""
        folder.mkdir(parents=True, exist_ok=True)
        date = str(self.facts["date"]).replace(":", "").replace("+0000", "Z")
        path = folder / f"{self.kind}-{date}.json"
        whole = {"schema": SCHEMA, "machine": self.facts, **self.data}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")
        return path


def facts_list(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts that results depend on as a Markdown list: run, machine, disk, versions."""
    known: defaultdict[str, Any] = defaultdict(str, facts)
    memory_gib, disk_gib = (int(known[key] or 0) / GIB for key in ("memory_bytes", "device_bytes"))
    before, after = (known[key] for key in ("load_average", "load_average_after"))
    loads = f"{before or 0:.2f}" + (f" before, {after:.2f} after" if after else "")
    versions = ", ".join(f"{name} {version}" for name, version in dict(known["versions"]).items())
    return [
        f"- run: {known['date']}, commit {known['commit']}, `{known['command']}`",
        f"- machine: {known['cores']} cores, {known['cpu']}; {memory_gib:.1f} GiB of memory; Linux "
        f"{known['kernel']}; load average {loads}" + ("" if known["root"] else "; not as root"),
        f"- disk: {known['directory']}, {known['file_system']} on "
        f"{' '.join([known['device'], known['device_model']]).strip()}, {disk_gib:.0f} GiB, "
        f"scheduler {known['device_scheduler']}",
        f"- versions: {versions}",
    ]
