"""``dlfs top``: shows the activity of a node service, and of imports by workers, live.

A service is asked over its socket. The coordinator of an import by workers answers over one of its
own, which is named after its volume (``dlfs.ingest.workers.publishing``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from dlfs.base.units import format_count
from dlfs.cli.options import JsonOption, open_volume
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
from dlfs.errors import DlfsError, NotFoundError

if TYPE_CHECKING:
    from dlfs.cli.screen import Screen, Section
    from dlfs.service.statistics import MemberActivity

Snapshot = Mapping[str, Any]
"""Snapshot of a service's statistics; see ``ServerState.snapshot``."""

_DATASETS = ("dataset", "datasets")
_MEMBERS = ("member", "members")
_PROCESSES = ("process", "processes")
_WORKERS = ("worker", "workers")


def top(
    target: Annotated[str, typer.Argument(metavar="SERVICE|VOLUME")],
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1)] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Show the activity of a service: datasets, members and clients, with rates and latencies.

    Of an import by workers that this host coordinates, into a volume or one of the service's, it
    shows the parts, and each worker with its rate; 'slow' is one that holds the others up. A low
    terminal shows the busiest rows and counts the others. If stdout is no terminal, one snapshot is
    printed; --json prints the statistics.

    Args:
        target: unix:PATH, as dlfs serve prints it; or a volume into which workers import.
        interval: Seconds between two snapshots.
        count: Number of snapshots, then end; 0: until Ctrl-C.

    Examples:
        dlfs top unix:/run/dlfs/photos.sock
        dlfs top unix:dlfs.sock --count 1 --json
        dlfs top photos.img
    """
    look = partial(_look_at_service, target) if target.startswith("unix:") else _importing(target)
    before, then = look(), time.monotonic()
    if json:
        print_json(before)
        return
    if not stdout_console().is_terminal:
        for _ in range(count or 1):
            time.sleep(interval)
            after, now = look(), time.monotonic()
            print_data(screen(before, after, now - then))
            before, then = after, now
        return
    _live(look, before, then, interval, count)


def _look_at_service(uri: str) -> Snapshot:
    """Return the statistics of a service, with the imports into its volumes."""
    from dlfs.ingest.workers.publishing import read_progress
    from dlfs.service.client import get_statistics

    found, imports = get_statistics(uri), []
    for volume in found["volumes"]:
        with suppress(DlfsError):  # another user's
            progress = read_progress(UUID(volume["uuid"]))
            imports += [] if progress is None else [{"volume": _label(volume), **progress}]
    return {**found, "imports": imports}


def _label(volume: Mapping[str, Any]) -> str:
    return str(volume["label"] or volume["uuid"])


def _importing(uri: str) -> Callable[[], Snapshot]:
    """Return a function that looks at the import by workers into a volume.

    The function raises NotFoundError if there is none, or when it has ended.
    """
    from dlfs.ingest.workers.publishing import read_progress

    with open_volume(uri) as volume:
        uuid, label = volume.uuid, volume.label or uri

    def look() -> Snapshot:
        progress = read_progress(uuid)
        if progress is None:
            raise NotFoundError(
                f"show the import into {uri}: expected one by workers that this host coordinates "
                "and that reads its source, got none; 'dlfs info' lists unfinished imports"
            )
        return {"imports": [{"volume": label, **progress}]}

    return look


def _live(
    look: Callable[[], Snapshot], before: Snapshot, then: float, interval: float, count: int
) -> None:
    from rich.live import Live

    shown = 0
    console = stdout_console()
    first = screen(before, before, 0.0, rows=console.height)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while shown < count or not count:
            time.sleep(interval)
            try:
                after, now = look(), time.monotonic()
            except NotFoundError:  # the import has ended
                return
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

    imports = [_import(each) for each in after.get("imports", ())]
    if "volumes" not in after:  # the import into a volume, without a service
        (only,) = imports
        return Screen(only.title, [replace(only, title="")], rows=rows)
    earlier, clients = by_process(before["clients"]), by_process(after["clients"])
    memory = after["memory"]
    held_bytes = memory["held_bytes"]
    labels = ", ".join(volume["label"] or volume["uuid"] for volume in after["volumes"])
    head = (
        f"dlfs {after['version']} serving {labels}: process {after['pid']}, "
        f"up {human_seconds(after['uptime_s'])}, {format_count(len(clients), *_PROCESSES)}, "
        f"cache {human_size(held_bytes)} of {human_size(memory['memory_bytes'])}"
    )
    known = {_key(dataset): dataset for dataset in before["datasets"]}
    busy = [
        _rate(known.get(_key(each), each)["reader"], each["reader"], "samples", seconds)
        for each in after["datasets"]
    ]
    sections = [Section(_DATASETS, _datasets(known, after, seconds), busy)]
    for dataset in after["datasets"]:
        members = _members(known.get(_key(dataset), {}), dataset, seconds)
        weights = [math.inf if member.lost else member.reads for member in members]
        title = _title(dataset)
        sections.append(Section(_MEMBERS, member_table(members), weights, title, rank=2))
    if clients:
        busy = [
            _rate(earlier.get(key, client), client, "samples", seconds)
            for key, client in clients.items()
        ]
        sections.append(Section(_PROCESSES, _clients(earlier, clients, seconds), busy, rank=1))
    return Screen(head, [*sections, *imports], rows=rows)


def _import(found: Mapping[str, Any]) -> Section:
    """Return the table of an import by workers, with what it has done in the title."""
    from dlfs.cli.progress import worker_table
    from dlfs.cli.screen import Section
    from dlfs.ingest.progress import WorkerProgress

    workers = [WorkerProgress(**each) for each in found["workers"]]
    speed = found["new_bytes"] / found["seconds"] if found["seconds"] > 0 else 0.0
    title = (
        f"import of {found['name']} into {found['volume']}: process {found['pid']}, up "
        f"{human_seconds(found['seconds'])}, {found['parts_done']:,} of "
        f"{format_count(found['parts'], 'part')}, {human_size(found['bytes'])} of "
        f"{human_size(found['bytes_total'])}, {human_size(int(speed))}/s"
    )
    busy = [math.inf if each.is_straggler else each.bytes_per_second for each in workers]
    return Section(_WORKERS, worker_table(workers), busy, title)


_Key = tuple[str, int]


def _key(dataset: Mapping[str, Any]) -> _Key:
    """Return what tells a dataset from the open steps of the import that has made it."""
    return dataset["uuid"], dataset["version"]


def _title(dataset: Mapping[str, Any]) -> str:
    name, version = dataset["dataset"], dataset["version"]
    return f"{name}@{version}" if version else f"{name} (import)"


def _datasets(known: Mapping[_Key, Mapping[str, Any]], after: Snapshot, seconds: float) -> Table:
    from dlfs.service.statistics import activity

    titles = (
        "dataset", "clients", "cache", "samples/s", "MiB/s", "in memory", "a request",
        "reads/s", "errors", "device", "checking", "planning", "rest",
    )  # fmt: skip
    drop = ("a request", "planning", "checking", "rest", "cache", "reads/s", "device", "clients")
    rows = Table(*titles, right=titles[1:], drop=(*drop, "in memory"))
    for dataset in after["datasets"]:
        earlier = known.get(_key(dataset), {}).get("reader", dataset["reader"])
        seen = activity(earlier, dataset["reader"], seconds)
        shares = seen.phase_shares
        rows.add_row(
            _title(dataset),
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
