"""The race as tables in Markdown and on the terminal, and all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench import page
from bench.peers.outcome import Converted, Outcome, Run
from bench.peers.registry import all_peers
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
from bench.report import count_text, rich_table
from dlfs.units import MIB

COLUMNS = (
    "peer",
    "order",
    "samples/s, cold",
    "warm",
    "MiB/s, cold",
    "warm",
    "CPU us/sample, cold",
    "warm",
    "two processes, samples/s, cold",
    "warm",
    "first batch ms, cold",
    "memory MiB, cold",
    "warm",
)
CONVERSION_COLUMNS = (
    "peer",
    "samples",
    "seconds",
    "MiB/s",
    "CPU seconds",
    "MiB on disk",
    "times the samples' bytes",
)
VERDICT_COLUMNS = (
    "data",
    "",
    "DLFS",
    "beside",
    "at least, times",
    "measured, times",
    "from - to",
    "",
)

LABELS = {"512": "512 B", "4k": "4 KiB", "110k": "110 KiB"}
"""Of data sets, in the heads of columns."""


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
    rounds = 1 + max((run.round for run in outcome.runs if run.dataset == key), default=0)
    counts = f"{data['samples']:,} samples, {size:,.0f} MiB, {rounds} rounds"
    return f"{key}: {data['about']} ({counts})"


def summary(outcome: Outcome) -> list[str]:
    """A table of ratios: a row a peer, a column for each data set and state."""
    found = verdicts(outcome)
    columns = [
        (key, state) for key in outcome.datasets for state in STATES if _any(found, key, state)
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
    return [
        f"Samples/s of DLFS in global order over those of the peer's fastest way, the median of "
        f"the rounds' ratios. The floor is {FLOOR:g}; rows without a verdict have none. "
        "`*`: beside the peer's own shuffle, which is no global order. *Cold*: everybody may come "
        "to have all of the data in memory. *Little memory*: DLFS has a sixteenth.",
        "",
        *page.table(["peer", *heads], rows),
        *_why_missing(outcome),
    ]


def _any(found: Sequence[Verdict], key: str, state: str) -> bool:
    return any((one.dataset, one.state) == (key, state) for one in found)


def _ratio(verdict: Verdict | None) -> str:
    """A cell: the ratio, and whether the floor is met."""
    if verdict is None:
        return "-"
    text = f"{count_text(verdict.measured)}{'' if '(' not in verdict.peer else '*'} {verdict.text}"
    return f"**{text}**" if verdict.text == "MISSED" else text.strip()


def _why_missing(outcome: Outcome) -> list[str]:
    """Peers with a floor that did not run at all, and why."""
    ran = {family(run.peer) for run in outcome.runs}
    whys = {family(peer): why for peer, _, _, why in outcome.missing if family(peer) not in ran}
    return ["", *(f"- {name} did not run: {why}" for name, why in whys.items())] if whys else []


def markdown(facts: dict[str, Any], outcome: Outcome) -> str:
    """All tables, under the facts they depend on."""
    packages = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    lines = ["# DLFS beside its peers", "", *page.head(facts), f"- packages: {packages}"]
    lines += [f"- samples compared with their source: {sum(r.checked for r in outcome.runs):,}"]
    lines += ["", "## How many times as fast DLFS is", "", *summary(outcome), ""]
    for key in outcome.datasets:
        lines += [f"## {title_of(outcome, key)}", ""]
        lines += [*page.table(COLUMNS, rows_of(outcome.runs, key)), ""]
        lines += ["Conversion:", ""]
        lines += [*page.table(CONVERSION_COLUMNS, conversion_rows(outcome.converted, key)), ""]
    if outcome.missing:
        lines += [
            "## Not run",
            "",
            *page.table(("peer", "data", "how", "why"), outcome.missing),
            "",
        ]
    lines += ["## All comparisons", "", *page.table(VERDICT_COLUMNS, _verdicts(outcome)), ""]
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
    more = {"arguments": arguments, **outcome.to_dict()}
    return page.write(folder, "peers", facts, markdown(facts, outcome), more)


def read(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any], Outcome]:
    """Races that were written, as one: facts and arguments of the first, everybody's runs."""
    wholes = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    joined = Outcome()
    for whole in wholes:
        joined.add(Outcome.from_dict(whole))
    return wholes[0]["machine"], wholes[0]["arguments"], joined
