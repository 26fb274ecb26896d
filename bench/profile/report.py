"""The report of profiles: costs of a sample by purpose and by function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.profile.costs import Place
from bench.profile.groups import group_of
from bench.profile.recorders import Recording
from bench.report import Report, Table

FUNCTIONS_SHOWN = 15
SHARE_MIN = 0.003
"""Share of all costs below which a group is not shown."""


@dataclass
class Profile:
    """The recordings of one case.

    Attributes:
        case: name of the case.
        about: description of the case.
        sampled: recording of perf.
        counted: recording of callgrind, of the reading process in user space.
        missing: tools that could not record, and why.
    """

    case: str
    about: str
    sampled: Recording | None
    counted: Recording | None
    missing: list[str]


def cpu_us(recording: Recording) -> float:
    """Return the CPU time of a sample in all processes, in microseconds."""
    return 1e6 * recording.done.cpu_seconds / max(1, recording.done.samples)


def instructions_of(recording: Recording) -> float:
    """Return the instructions of a sample."""
    return sum(recording.costs.values()) / max(1, recording.done.samples)


def shares(recording: Recording) -> dict[tuple[str, Place], float]:
    """Return the share of all costs of each place, by process and place."""
    total = sum(recording.costs.values())
    found: Counter[tuple[str, Place]] = Counter()
    for place, cost in recording.costs.items():
        found[recording.processes.get(place.process, "other"), place] += cost
    return {key: cost / total for key, cost in found.items()}


def by_group(recording: Recording) -> dict[tuple[str, str], float]:
    """Return the share of all costs of each group, by process and group."""
    found: Counter[tuple[str, str]] = Counter()
    for (process, place), share in shares(recording).items():
        found[process, group_of(place)] += share  # type: ignore[assignment]
    return dict(found.most_common())


def group_table(profile: Profile) -> Table:
    """Return the table of groups: time and instructions of a sample."""
    time = by_group(profile.sampled) if profile.sampled else {}
    work = by_group(profile.counted) if profile.counted else {}
    us = cpu_us(profile.sampled) if profile.sampled else 0.0
    instructions = instructions_of(profile.counted) if profile.counted else 0.0
    rows = []
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
    columns = ("process", "what for", "share", "us a sample", "instructions a sample")
    return Table("", columns, rows)


def function_table(recording: Recording) -> Table:
    """Return the table of the functions with the largest costs."""
    found: Counter[tuple[str, str, str]] = Counter()
    for (process, place), share in shares(recording).items():
        function = f"`{place.function} ({place.file or place.object})`"
        found[process, function, group_of(place)] += share  # type: ignore[assignment]
    rows = [(*key, f"{share:.1%}") for key, share in found.most_common(FUNCTIONS_SHOWN)]
    return Table("", ("process", "function", "what for", "share"), rows)


def sections(profile: Profile) -> list[Table | str]:
    """Return the parts of the report for one case."""
    parts: list[Table | str] = [f"## {profile.case}: {profile.about}"]
    if profile.sampled is not None:
        done = profile.sampled.done
        parts.append(
            f"{done.samples:,} samples in {done.seconds:.1f} s, {cpu_us(profile.sampled):.3f} us "
            f"of CPU time each (sampled by {profile.sampled.event})."
        )
    parts += [f"Missing: {reason}." for reason in profile.missing]
    recording = profile.sampled or profile.counted
    if recording is not None:
        parts += [group_table(profile), function_table(recording)]
    return parts


def to_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile with every place as plain values."""
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


def make_report(facts: Mapping[str, Any], profiles: Sequence[Profile]) -> Report:
    """Return the report of all cases that were recorded."""
    report = Report("profile", "Profiles", facts, {"cases": [to_dict(one) for one in profiles]})
    for profile in profiles:
        report.add(*sections(profile))
    return report
