"""The race as tables in Markdown and on the terminal, and all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.peers.outcome import Converted, Outcome, Run
from bench.peers.registry import all_peers
from bench.peers.verdicts import Verdict, verdicts
from bench.report import count_text, markdown_table, rich_table
from dlfs.units import MIB

SCHEMA = 1
COLUMNS = (
    "peer",
    "order",
    "samples/s cold",
    "warm",
    "MiB/s cold",
    "warm",
    "CPU us/sample cold",
    "warm",
    "two processes: samples/s cold",
    "warm",
    "first batch ms, cold",
    "memory MiB cold",
    "warm",
)
CONVERSION_COLUMNS = ("peer", "samples", "seconds", "MiB/s", "CPU s", "MiB on disk", "of the data")
VERDICT_COLUMNS = ("data", "", "DLFS", "beside", "at least", "measured", "from - to", "")


def _median(runs: Sequence[Run], value: Callable[[Run], float | None]) -> str:
    values = [found for found in map(value, runs) if found is not None]
    return count_text(median(values)) if values else ""


def _pick(runs: Sequence[Run], *, warm: bool, processes: int) -> list[Run]:
    return [run for run in runs if (run.warm, run.processes) == (warm, processes)]


def rows_of(runs: Iterable[Run], dataset: str) -> list[tuple[str, ...]]:
    """One row a peer and order: medians over all rounds."""
    ways: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.dataset == dataset:
            ways.setdefault((run.peer, "" if run.limit else run.order), []).append(run)
    ordered = sorted(ways.items(), key=lambda way: way[1][0].limit)  # the limits last
    rows = []
    for (peer, order), found in ordered:
        cold, warm = (_pick(found, warm=state, processes=1) for state in (False, True))
        two = [_pick(found, warm=state, processes=2) for state in (False, True)]
        rows.append(
            (
                peer,
                order,
                *(_median(runs, lambda run: run.rate) for runs in (cold, warm)),
                *(
                    _median(runs, lambda run: run.bytes / run.seconds / MIB)
                    for runs in (cold, warm)
                ),
                *(_median(runs, _cpu_us) for runs in (cold, warm)),
                *(_median(runs, lambda run: run.rate) for runs in two),
                _median(cold, _first_batch_ms),
                *(_median(runs, _memory_mib) for runs in (cold, warm)),
            )
        )
    return rows


def _cpu_us(run: Run) -> float:
    return 1e6 * run.cpu_seconds / run.samples


def _first_batch_ms(run: Run) -> float | None:
    return None if run.first_batch_seconds is None else 1e3 * run.first_batch_seconds


def _memory_mib(run: Run) -> float | None:
    return run.peak_pss_bytes / MIB or None


def conversion_rows(converted: Iterable[Converted], dataset: str) -> list[tuple[str, ...]]:
    """One row a peer that has data of its own."""
    once = {one.peer: one for one in converted if one.dataset == dataset}
    return [
        (
            one.peer,
            f"{one.samples:,}",
            count_text(one.seconds),
            count_text(one.sample_bytes / MIB / one.seconds),
            count_text(one.cpu_seconds),
            count_text(one.stored_bytes / MIB),
            f"{one.stored_bytes / max(1, one.sample_bytes):.2f}",
        )
        for one in once.values()
    ]


def verdict_rows(found: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """One row a comparison."""
    return [
        (
            one.dataset,
            one.state,
            one.ours,
            one.peer,
            f"{one.at_least:g}" if one.at_least else "",
            f"{one.measured:.2f}",
            f"{min(one.ratios):.2f} - {max(one.ratios):.2f}",
            one.text,
        )
        for one in found
    ]


def title_of(outcome: Outcome, key: str) -> str:
    """A data set."""
    data = outcome.datasets[key]
    size = data["sample_bytes"] / MIB
    return f"{key}: {data['about']} ({data['samples']:,} samples, {size:,.0f} MiB)"


def markdown(facts: dict[str, Any], arguments: dict[str, Any], outcome: Outcome) -> str:
    """All tables, under the facts they depend on."""
    lines = ["# DLFS beside its peers", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += [f"- packages: {outcome.versions}", f"- arguments: {arguments}"]
    lines += [f"- samples compared: {sum(run.checked for run in outcome.runs):,}", ""]
    lines += ["## Floors", "", *markdown_table(VERDICT_COLUMNS, _verdicts(outcome)), ""]
    for key in outcome.datasets:
        lines += [f"## {title_of(outcome, key)}", ""]
        lines += [*markdown_table(COLUMNS, rows_of(outcome.runs, key)), ""]
        lines += ["Conversion:", ""]
        lines += [*markdown_table(CONVERSION_COLUMNS, conversion_rows(outcome.converted, key)), ""]
    if outcome.missing:
        lines += [
            "## Not run",
            "",
            *markdown_table(("peer", "data", "how", "why"), outcome.missing),
            "",
        ]
    lines += ["## How each is used", ""]
    ran = {run.peer for run in outcome.runs}
    lines += [f"- **{name}**: {peer.about}" for name, peer in all_peers().items() if name in ran]
    return "\n".join([*lines, ""])


def _verdicts(outcome: Outcome) -> list[tuple[str, ...]]:
    return verdict_rows(verdicts(outcome))


def show(console: Console, outcome: Outcome) -> None:
    """The tables on the terminal."""
    for key in outcome.datasets:
        console.print(rich_table(title_of(outcome, key), COLUMNS, rows_of(outcome.runs, key)))
    console.print(
        rich_table("Floors of DESIGN.md, section 10", VERDICT_COLUMNS, _verdicts(outcome))
    )
    for peer, key, how, why in outcome.missing:
        console.print(f"not run: {peer}, {key} {how}: {why}", markup=False, highlight=False)


# ---- files ---------------------------------------------------------------------------------------


def write(folder: Path, facts: dict[str, Any], arguments: dict[str, Any], outcome: Outcome) -> Path:
    """Write a race as JSON, with every run, and as Markdown; returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = facts["date"].replace(":", "").replace("+0000", "Z")
    path = folder / f"peers-{stem}.json"
    whole = {"schema": SCHEMA, "machine": facts, "arguments": arguments, **outcome.to_dict()}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(facts, arguments, outcome), encoding="utf-8")
    return path


def read(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any], Outcome]:
    """Races that were written, as one: facts and arguments of the first, everybody's runs."""
    wholes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    joined = Outcome()
    for whole in wholes:
        joined.add(Outcome.from_dict(whole))
    return wholes[0]["machine"], wholes[0]["arguments"], joined
