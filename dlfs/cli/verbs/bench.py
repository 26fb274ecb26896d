"""``dlfs bench``: measures the devices, the network, the API and the mount of a volume."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.cli.options import DevicesArgument, JsonOption, require_trio
from dlfs.cli.output import (
    Table,
    human_count,
    note,
    print_data,
    print_json,
    print_text,
    show_text,
)
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.diagnosis.bench import Report, Row


def bench(
    volume: DevicesArgument,
    dataset: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    seconds: Annotated[float, typer.Option(min=0.5)] = 60.0,
    mount: Annotated[bool, typer.Option("--mount")] = False,
    json: JsonOption = False,
) -> None:
    """Measure devices, network, API and mount of a volume, next to fio; say what binds.

    It only reads. Other programs that use the devices or the processors change what it finds.

    Args:
        dataset: Dataset to read; it may be left out if the volume has only one.
        seconds: Seconds for all measurements together.
        mount: Also mount the volume, on a new directory, and read files.

    Examples:
        dlfs bench photos.img
        dlfs bench photos.img --mount --seconds 20
        dlfs bench a.img,b.img --dataset photos --json
    """
    if mount:
        require_trio("bench --mount", "mount")
    if volume.startswith("unix:"):
        raise UsageError(f"measure {volume}: a service hides its devices; name the volume")
    from dlfs.diagnosis.bench import measure

    report = measure(volume, dataset, seconds=seconds, with_mount=mount, say=note)
    if json:
        print_json(asdict(report))
    else:
        _print(report)


def _print(report: Report) -> None:
    rows = Table(
        *("measured", "per second", "MiB/s", "us each", "compared", "in memory"),
        right=("per second", "MiB/s", "us each", "in memory"),
        drop=("in memory",),
    )
    for row in report.rows:
        rows.add_row(*_cells(row))
    print_text(f"{show_text(report.dataset)}:")
    print_data(rows)
    for text in report.notes:
        note(f"note: {text}")
    print()
    print_text(report.binds)


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a measurement; an empty one for what was not measured."""
    return (
        f"{row.step}: {row.what}",
        human_count(round(row.reads)) if row.reads else "",
        f"{row.read_bytes / 2**20:,.1f}" if row.read_bytes else "",
        f"{row.latency_s * 1e6:,.0f}" if row.latency_s else "",
        f"{row.share:.0%} of {row.of}" if row.of else "",
        f"{row.hit_share:.0%}" if row.step == "api" else "",
    )
