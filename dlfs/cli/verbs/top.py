"""``dlfs top``: shows the activity of a node service, live."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlfs.base.units import format_count
from dlfs.cli.options import JsonOption
from dlfs.cli.output import (
    Table,
    human_count,
    human_seconds,
    human_size,
    print_data,
    print_json,
    stdout_console,
)
from dlfs.cli.verbs.stall import member_table

if TYPE_CHECKING:
    from dlfs.cli.screen import Screen
    from dlfs.service.statistics import MemberActivity

Snapshot = Mapping[str, Any]
"""Snapshot of a service's statistics; see ``ServerState.snapshot``."""

_DATASETS = ("dataset", "datasets")
_MEMBERS = ("member", "members")
_PROCESSES = ("process", "processes")


def top(
    service: Annotated[str, typer.Argument(metavar="SERVICE")],
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1)] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Show the activity of a service: datasets, members and clients, with rates and latencies.

    A low terminal shows the busiest rows and counts the others. If stdout is no terminal, one
    snapshot is printed; --json prints the service's statistics.

    Args:
        service: unix:PATH, as dlfs serve prints it.
        interval: Seconds between two snapshots.
        count: Number of snapshots, then end; 0: until Ctrl-C.

    Examples:
        dlfs top unix:/run/dlfs/photos.sock
        dlfs top unix:dlfs.sock --count 1 --json
    """
    from dlfs.service.client import get_statistics

    before, then = get_statistics(service), time.monotonic()
    if json:
        print_json(before)
        return
    if not stdout_console().is_terminal:
        for _ in range(count or 1):
            time.sleep(interval)
            after, now = get_statistics(service), time.monotonic()
            print_data(screen(before, after, now - then))
            before, then = after, now
        return
    _live(service, before, then, interval, count)


def _live(service: str, before: Snapshot, then: float, interval: float, count: int) -> None:
    from rich.live import Live

    from dlfs.service.client import get_statistics

    shown = 0
    console = stdout_console()
    first = screen(before, before, 0.0, rows=console.height)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while shown < count or not count:
            time.sleep(interval)
            after, now = get_statistics(service), time.monotonic()
            seen = screen(before, after, now - then, rows=console.height)
            live.update(seen, refresh=True)
            before, then = after, now
            shown += 1


def screen(before: Snapshot, after: Snapshot, seconds: float, *, rows: int | None = None) -> Screen:
    """Make the screen for the activity between two snapshots.

    Args:
        before: a snapshot of the service.
        after: a later one.
        seconds: time between them, in seconds.
        rows: height of the terminal, in lines; None shows everything.
    """
    from dlfs.cli.screen import Screen, Section
    from dlfs.service.statistics import by_process

    earlier, clients = by_process(before["clients"]), by_process(after["clients"])
    memory = after["memory"]
    held_bytes = memory["held_bytes"]
    labels = ", ".join(volume["label"] or volume["uuid"] for volume in after["volumes"])
    head = (
        f"dlfs {after['version']} serving {labels}: process {after['pid']}, "
        f"up {human_seconds(after['uptime_s'])}, {format_count(len(clients), *_PROCESSES)}, "
        f"cache {human_size(held_bytes)} of {human_size(memory['memory_bytes'])}"
    )
    known = {dataset["uuid"]: dataset for dataset in before["datasets"]}
    busy = [
        _rate(known.get(each["uuid"], each)["reader"], each["reader"], "samples", seconds)
        for each in after["datasets"]
    ]
    sections = [Section(_DATASETS, _datasets(known, after, seconds), busy)]
    for dataset in after["datasets"]:
        members = _members(known.get(dataset["uuid"], {}), dataset, seconds)
        weights = [math.inf if member.lost else member.reads for member in members]
        title = f"{dataset['dataset']}@{dataset['version']}"
        sections.append(Section(_MEMBERS, member_table(members), weights, title, rank=2))
    if clients:
        busy = [
            _rate(earlier.get(key, client), client, "samples", seconds)
            for key, client in clients.items()
        ]
        sections.append(Section(_PROCESSES, _clients(earlier, clients, seconds), busy, rank=1))
    return Screen(head, sections, rows=rows)


def _datasets(known: Mapping[str, Mapping[str, Any]], after: Snapshot, seconds: float) -> Table:
    from dlfs.service.statistics import activity

    titles = (
        "dataset", "clients", "cache", "samples/s", "MiB/s", "in memory", "a request",
        "reads/s", "errors", "device", "checking", "planning", "rest",
    )  # fmt: skip
    drop = ("a request", "planning", "checking", "rest", "cache", "reads/s", "device", "clients")
    rows = Table(*titles, right=titles[1:], drop=(*drop, "in memory"))
    for dataset in after["datasets"]:
        earlier = known.get(dataset["uuid"], {}).get("reader", dataset["reader"])
        seen = activity(earlier, dataset["reader"], seconds)
        shares = seen.phase_shares
        rows.add_row(
            f"{dataset['dataset']}@{dataset['version']}",
            human_count(dataset["users"]),
            human_size(dataset["cache_bytes"]),
            human_count(round(seen.rate(seen.samples))),
            f"{seen.rate(seen.sample_bytes) / 2**20:.1f}",
            f"{seen.hit_share:.0%}",
            f"{seen.coalescing:.1f}",
            human_count(round(seen.rate(seen.requests))),
            human_count(dataset["reader"]["checksum_errors"] + dataset["reader"]["read_errors"]),
            *(f"{shares.get(name, 0):.0%}" for name in titles[-4:]),
        )
    return rows


def _members(
    earlier: Mapping[str, Any], dataset: Mapping[str, Any], seconds: float
) -> list[MemberActivity]:
    from dlfs.service.statistics import member_activity

    old = {member["uri"]: member for member in earlier.get("members", [])}
    return [
        member_activity(old.get(member["uri"], member), member, seconds)
        for member in dataset["members"]
    ]


def _clients(
    before: Mapping[tuple[int, str], Mapping[str, Any]],
    after: Mapping[tuple[int, str], Mapping[str, Any]],
    seconds: float,
) -> Table:
    titles = ("process", "user", "datasets", "callers", "samples/s", "MiB/s", "holds", "refused")
    rows = Table(*titles, right=titles[3:], drop=("callers", "user", "refused"))
    for key, client in after.items():
        earlier = before.get(key, client)
        rows.add_row(
            str(client["pid"]),
            client["socket"] or str(client["uid"]),
            ", ".join(client["datasets"]),
            human_count(client["channels"]),
            human_count(round(_rate(earlier, client, "samples", seconds))),
            f"{_rate(earlier, client, 'sample_bytes', seconds) / 2**20:.1f}",
            human_size(client.get("pinned_bytes", 0)),
            human_count(client.get("refusals", 0)),
        )
    return rows


def _rate(before: Mapping[str, Any], after: Mapping[str, Any], name: str, seconds: float) -> float:
    """Return the growth of a counter a second; 0 if no time has passed."""
    grown = after.get(name, 0) - before.get(name, 0)
    return max(0.0, float(grown)) / seconds if seconds > 0 else 0.0
