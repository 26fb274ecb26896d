"""``dlfs stall``: shows where the time of an epoch is spent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dlfs.cli.options import DatasetArgument, JsonOption, VolumeArgument, open_dataset, parse_size
from dlfs.cli.output import (
    Table,
    human_count,
    human_seconds,
    human_size,
    print_data,
    print_json,
    print_text,
    share_bar,
    show_text,
)
from dlfs.cli.progress import progress_bar
from dlfs.cli.stall_picture import Picture, check_plot, draw

if TYPE_CHECKING:
    from dlfs.diagnosis.consuming import Run
    from dlfs.service.statistics import MemberActivity


_ACTIVITIES = {
    "device": "waits for the device",
    "checking": "computes checksums",
    "planning": "finds and sorts samples",
    "rest": "waits until the consumer takes more",
}
"""Activities of the reading threads for users, by the names of their phases."""


def _consumer_shares(run: Run) -> dict[str, float]:
    """Return the share of each activity in the consumer's time, 0..1."""
    return {"waits for batches": run.waited_share, "works on them": 1 - run.waited_share}


def _reading_shares(run: Run) -> dict[str, float]:
    """Return the share of each activity in the reading threads' time; empty if they spent none."""
    return {_ACTIVITIES[name]: share for name, share in run.seen.phase_shares.items()}


def stall(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    batch: Annotated[int, typer.Option(min=1)] = 256,
    seconds: Annotated[float, typer.Option(min=0.1)] = 10.0,
    step_ms: Annotated[float, typer.Option(min=0)] = 0.0,
    shuffle: Annotated[
        Literal["global", "chunk", "none"], typer.Option(metavar="global|chunk|none")
    ] = "global",
    memory: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    json: JsonOption = False,
) -> None:
    """Read epochs as training would; show where time goes: device, processor or consumer.

    Args:
        batch: Samples in a batch.
        seconds: Seconds to read.
        step_ms: Time that training takes for a batch, in ms; stall sleeps.
        shuffle: Order of the epoch.
        memory: Sample memory [$DLFS_MEMORY, or 1GiB, at most an 8th of what the process may use].
        plot: Draw the result as FILE: .png, .svg or .pdf.

    Examples:
        dlfs stall photos.img photos
        dlfs stall photos.img photos --batch 64 --step-ms 50
        dlfs stall photos.img photos --plot stall.png
    """
    from dlfs.diagnosis.consuming import consume
    from dlfs.service.statistics import verdict

    if plot is not None:
        check_plot(plot)
    with open_dataset(volume, dataset, memory_bytes=parse_size(memory)) as opened:
        order = None if shuffle == "none" else shuffle
        step_s = step_ms / 1000
        with progress_bar("stall") as bar:
            run = consume(opened, batch, seconds, shuffle=order, step_s=step_s, notify=bar.update)
        title = f"{opened.name}@{opened.version}"
    verdict_text = verdict(run.seen, run.waited_share)
    if plot is not None:
        heading = f"{show_text(title)}: {_describe(run)}"
        shares = _consumer_shares(run), _reading_shares(run)
        draw(Picture(heading, verdict_text, *shares, run.history), plot)
    if json:
        print_json(_as_json(title, run, verdict_text))
    else:
        _print(title, run, verdict_text)


def _as_json(title: str, run: Run, verdict_text: str) -> dict[str, Any]:
    return {
        "dataset": title,
        "seconds": run.seconds,
        "batches": run.batches,
        "waited_seconds": run.waited_seconds,
        **{name: value for name, value in asdict(run.seen).items() if name != "seconds"},
        "members": [asdict(member) for member in run.members],
        "verdict": verdict_text,
    }


def _describe(run: Run) -> str:
    """Return what a run read, in one phrase."""
    seen = run.seen
    return (
        f"{human_count(seen.samples)} samples in {human_seconds(run.seconds)}, "
        f"{human_count(round(seen.rate(seen.samples)))}/s, "
        f"{human_size(seen.rate(seen.sample_bytes))}/s"
    )


def _print(title: str, run: Run, verdict_text: str) -> None:
    seen = run.seen
    print_text(
        f"{show_text(title)}: {_describe(run)}; "
        f"{seen.hit_share:.0%} were in memory, the others came {seen.coalescing:.1f} a request"
    )
    rows = Table("thread", "activity", "share", "", right=("share",), drop=("",))
    for what, share in _consumer_shares(run).items():
        rows.add_row("consumer", what, f"{share:.0%}", share_bar(share))
    for what, share in _reading_shares(run).items():
        rows.add_row("reading", what, f"{share:.0%}", share_bar(share))
    print()
    print_data(rows)
    print()
    if seen.requests:
        print_data(member_table(run.members))
        print()
    print_text(verdict_text)


def member_table(members: list[MemberActivity]) -> Table:
    """Return a table of the members' activity."""
    titles = ("member", "reads/s", "MiB/s", "in flight", "queues", "median us", "99% us", "errors")
    rows = Table(*titles, right=titles[1:], drop=("queues", "in flight", "median us"))
    for member in members:
        rows.add_row(
            member.uri + (" (lost)" if member.lost else ""),
            human_count(round(member.reads)),
            f"{member.read_bytes / 2**20:.1f}",
            f"{member.depth:.1f}",
            f"{member.queue_pairs}/{member.queue_pairs_max}",
            f"{member.median_us:.0f}",
            f"{member.p99_us:.0f}",
            human_count(member.errors),
        )
    return rows
