"""Profiles as tables: on the terminal, as Markdown, and as JSON with every place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import page
from bench.profile.costs import Place
from bench.profile.groups import group_of
from bench.profile.recorders import Recording

FUNCTIONS_SHOWN = 15
SHARE_MIN = 0.003
"""Of the whole: a group below it is not shown."""


@dataclass
class Profile:
    """One case, by what could record it.

    Attributes:
        case: which.
        about: what it does.
        sampled: perf's recording.
        counted: callgrind's, of the reading process in user space.
        missing: what could not record, and why.
    """

    case: str
    about: str
    sampled: Recording | None
    counted: Recording | None
    missing: list[str]


def cpu_us(recording: Recording) -> float:
    """CPU time of a sample of data, of all processes, in us."""
    return 1e6 * sum(recording.done.cpu_seconds.values()) / max(1, recording.done.samples)


def shares(recording: Recording) -> dict[tuple[str, Place], float]:
    """The share of each place in its process's costs; all together 1."""
    total = sum(recording.costs.values())
    found: Counter[tuple[str, Place]] = Counter()
    for place, cost in recording.costs.items():
        found[recording.processes.get(place.process, "other"), place] += cost
    return {key: cost / total for key, cost in found.items()}


def by_group(recording: Recording) -> dict[tuple[str, str], float]:
    """Shares by process and group."""
    found: Counter[tuple[str, str]] = Counter()
    for (process, place), share in shares(recording).items():
        found[process, group_of(place)] += share
    return dict(found.most_common())


def by_function(recording: Recording) -> dict[tuple[str, str, str], float]:
    """Shares by process, function with its file or object, and group."""
    found: Counter[tuple[str, str, str]] = Counter()
    for (process, place), share in shares(recording).items():
        found[process, f"{place.function} ({place.file or place.object})", group_of(place)] += share
    return dict(found.most_common(FUNCTIONS_SHOWN))


def group_rows(profile: Profile) -> list[list[str]]:
    """A head, and a row a group: its time and instructions for one sample."""
    time = by_group(profile.sampled) if profile.sampled else {}
    work = by_group(profile.counted) if profile.counted else {}
    us = cpu_us(profile.sampled) if profile.sampled else 0.0
    instructions = instructions_of(profile.counted) if profile.counted else 0.0
    rows = [["process", "what for", "share", "us a sample", "instructions a sample"]]
    groups = sorted({*time, *work}, key=lambda key: (-time.get(key, 0.0), -work.get(key, 0.0)))
    for key in groups:
        share, counted = time.get(key, 0.0), work.get(key)
        if max(share, counted or 0.0) < SHARE_MIN:
            continue
        rows.append(
            [
                *key,
                f"{share:.1%}" if time else "",
                f"{share * us:.3f}" if time else "",
                "" if counted is None else f"{counted * instructions:,.1f}",
            ]
        )
    counts = f"{instructions:,.1f}" if work else ""
    rows.append(["all", "", "100%" if time else "", f"{us:.3f}" if time else "", counts])
    return rows


def instructions_of(recording: Recording) -> float:
    """Instructions for one sample."""
    return sum(recording.costs.values()) / max(1, recording.done.samples)


def function_rows(recording: Recording) -> list[list[str]]:
    """A head, and a row for each of the functions that cost most."""
    rows = [["process", "function", "what for", "share"]]
    for (process, function, group), share in by_function(recording).items():
        rows.append([process, f"`{function}`", group, f"{share:.1%}"])
    return rows


def section(profile: Profile) -> list[str]:
    """A case, as Markdown."""
    lines = [f"## {profile.case}: {profile.about}", ""]
    if profile.sampled is not None:
        done = profile.sampled.done
        lines += [
            f"{done.samples:,} samples in {done.seconds:.1f} s, {cpu_us(profile.sampled):.3f} us "
            f"of CPU time each (sampled by {profile.sampled.event}).",
            "",
        ]
    lines += [f"Missing: {reason}." for reason in profile.missing] + [""] * bool(profile.missing)
    if profile.sampled is None and profile.counted is None:
        return lines
    lines += [*page.headed_table(group_rows(profile)), ""]
    recording = profile.sampled or profile.counted
    assert recording is not None
    return [*lines, *page.headed_table(function_rows(recording)), ""]


def markdown(facts: Mapping[str, Any], profiles: Sequence[Profile]) -> str:
    """All cases, under the facts they depend on."""
    lines = ["# Profiles", "", *page.head(facts), ""]
    for profile in profiles:
        lines += section(profile)
    return "\n".join(lines)


def to_dict(profile: Profile) -> dict[str, Any]:
    """As plain values, with every place."""
    recordings = {"sampled": profile.sampled, "counted": profile.counted}
    return {
        "case": profile.case,
        "missing": profile.missing,
        **{
            name: {
                "event": recording.event,
                "samples": recording.done.samples,
                "cpu_us": cpu_us(recording),
                "places": [
                    [process, group_of(place), place.object, place.file, place.function, share]
                    for (process, place), share in shares(recording).items()
                ],
            }
            for name, recording in recordings.items()
            if recording is not None
        },
    }


def write(facts: Mapping[str, Any], profiles: Sequence[Profile], folder: Path) -> Path:
    """Write JSON and Markdown; returns the JSON's path."""
    more = {"cases": [to_dict(profile) for profile in profiles]}
    return page.write(folder, "profile", facts, markdown(facts, profiles), more)
