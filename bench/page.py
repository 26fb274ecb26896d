"""What every part of the report leaves: a page of Markdown, and beside it all of it as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlfs.units import GIB

SCHEMA = 1


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(_cell(text) for text in cells)} |" for cells in lines]


def headed_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same of rows the first of which is the head."""
    return table(rows[0], rows[1:])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def head(facts: Mapping[str, Any]) -> list[str]:
    """What the figures of a page depend on, as a list: run, machine, disk, versions.

    Args:
        facts: of `bench.machine.describe`, and ``load_average_after``.
    """
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


def write(
    folder: Path, kind: str, facts: Mapping[str, Any], page: str, more: Mapping[str, Any]
) -> Path:
    """Write a run's page, and its JSON: the schema, the facts as ``machine``, and more.

    Args:
        folder: made where it is missing.
        kind: the files' names begin with it; the date follows.
        facts: of `bench.machine.describe`.
        page: Markdown.
        more: a mapping of plain values.

    Returns:
        The JSON's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    date = str(facts["date"]).replace(":", "").replace("+0000", "Z")
    path = folder / f"{kind}-{date}.json"
    whole = {"schema": SCHEMA, "machine": facts, **more}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    return path
