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
        missing: why there is no recording; empty if there is one.
    """

    case: str
    about: str
    sampled: Recording | None
    missing: str = ""


def cpu_us(recording: Recording) -> float:
    """Return the CPU time of a sample in all processes, in microseconds."""
    return 1e6 * recording.done.cpu_seconds / max(1, recording.done.samples)


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


def group_table(recording: Recording) -> Table:
    """Return the table of groups: share and CPU time of a sample."""
    us = cpu_us(recording)
    rows = [
        [*key, f"{share:.1%}", f"{share * us:.3f}"]
        for key, share in by_group(recording).items()
        if share >= SHARE_MIN
    ]
    rows.append(["all", "", "100%", f"{us:.3f}"])
    return Table("", ("process", "what for", "share", "us a sample"), rows)


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
    head = f"## {profile.case}: {profile.about}"
    recording = profile.sampled
    if recording is None:
        return [head, f"Missing: {profile.missing}."]
    done = recording.done
    text = (
        f"{done.samples:,} samples in {done.seconds:.1f} s, {cpu_us(recording):.3f} us "
        f"of CPU time each (sampled by {recording.event})."
    )
    return [head, text, group_table(recording), function_table(recording)]


def to_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile with every place as plain values."""
    values: dict[str, Any] = {"case": profile.case, "missing": profile.missing}
    if profile.sampled is not None:
        recording = profile.sampled
        values["sampled"] = {
            "event": recording.event,
            "samples": recording.done.samples,
            "cpu_us": cpu_us(recording),
            "places": [
                [process, group_of(place), place.object, place.file, place.function, share]
                for (process, place), share in shares(recording).items()
            ],
        }
    return values


def make_report(facts: Mapping[str, Any], profiles: Sequence[Profile]) -> Report:
    """Return the report of all cases that were recorded."""
    report = Report("profile", "Profiles", facts, {"cases": [to_dict(one) for one in profiles]})
    for profile in profiles:
        report.add(*sections(profile))
    return report
