"""``dlfs stall``: shows where the time of an epoch is spent."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
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
from dlfs.cli.stall_picture import MOMENTS_MAX, Moment, Picture, check_plot, draw

if TYPE_CHECKING:
    import dlfs
    from dlfs import Dataset
    from dlfs.service.statistics import Activity, MemberActivity


_ACTIVITIES = {
    "device": "waits for the device",
    "checking": "computes checksums",
    "planning": "finds and sorts samples",
    "rest": "waits until the consumer takes more",
}
"""Activities of the reading threads for users, by the names of their phases."""


@dataclass(frozen=True)
class _Run:
    """Measurements of one run."""

    seconds: float
    waited_seconds: float
    batches: int
    seen: Activity
    members: list[MemberActivity]
    history: tuple[Moment, ...] = ()

    @property
    def waited_share(self) -> float:
        return self.waited_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def consumer_shares(self) -> dict[str, float]:
        """Share of each activity in the consumer's time, 0..1."""
        share = self.waited_share
        return {"waits for batches": share, "works on them": 1 - share}

    @property
    def reading_shares(self) -> dict[str, float]:
        """Share of each activity in the reading threads' time, 0..1; empty if they spent none."""
        return {_ACTIVITIES[name]: share for name, share in self.seen.phase_shares.items()}


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
    from dlfs.service.statistics import verdict

    if plot is not None:
        check_plot(plot)
    with open_dataset(volume, dataset, memory_bytes=parse_size(memory)) as opened:
        order = None if shuffle == "none" else shuffle
        run = _measure(opened, batch, seconds, step_ms / 1000, order)
        title = f"{opened.name}@{opened.version}"
    verdict_text = verdict(run.seen, run.waited_share)
    if plot is not None:
        heading = f"{show_text(title)}: {_describe(run)}"
        shares = run.consumer_shares, run.reading_shares
        draw(Picture(heading, verdict_text, *shares, run.history), plot)
    if json:
        print_json(_as_json(title, run, verdict_text))
    else:
        _print(title, run, verdict_text)


def _measure(
    dataset: Dataset, batch_size: int, seconds: float, step_s: float, shuffle: dlfs.Shuffle | None
) -> _Run:
    """Take batches, epoch after epoch, until the time is over."""
    from dlfs.service.statistics import activity, member_activity

    before, members_before = dataset.stats(), dataset.member_stats()
    waited, batches, epoch, done_bytes = 0.0, 0, 0, 0
    start = now = time.monotonic()
    history = [Moment(0.0, 0, 0)]
    with progress_bar("stall") as bar:
        while now < start + seconds and len(dataset):
            with dataset.batches(batch_size, epoch=epoch, shuffle=shuffle, world_size=1) as stream:
                while now < start + seconds:
                    batch = next(stream, None)
                    waited += time.monotonic() - now
                    if batch is None:
                        break
                    done_bytes += int(batch.lengths.sum())
                    batch.release()
                    time.sleep(step_s)
                    batches += 1
                    bar.update(done_bytes)
                    now = time.monotonic()
                    if now - start >= history[-1].seconds + seconds / MOMENTS_MAX:
                        history.append(Moment(now - start, done_bytes, epoch))
            epoch += 1
            now = time.monotonic()
    spent = now - start
    members = [
        member_activity(old, new, spent)
        for old, new in zip(members_before, dataset.member_stats(), strict=True)
    ]
    seen = activity(before, dataset.stats(), spent)
    return _Run(spent, waited, batches, seen, members, tuple(history))


def _as_json(title: str, run: _Run, verdict_text: str) -> dict[str, Any]:
    return {
        "dataset": title,
        "seconds": run.seconds,
        "batches": run.batches,
        "waited_seconds": run.waited_seconds,
        **{name: value for name, value in asdict(run.seen).items() if name != "seconds"},
        "members": [asdict(member) for member in run.members],
        "verdict": verdict_text,
    }


def _describe(run: _Run) -> str:
    """Return what a run read, in one phrase."""
    seen = run.seen
    return (
        f"{human_count(seen.samples)} samples in {human_seconds(run.seconds)}, "
        f"{human_count(round(seen.rate(seen.samples)))}/s, "
        f"{human_size(seen.rate(seen.sample_bytes))}/s"
    )


def _print(title: str, run: _Run, verdict_text: str) -> None:
    seen = run.seen
    print_text(
        f"{show_text(title)}: {_describe(run)}; "
        f"{seen.hit_share:.0%} were in memory, the others came {seen.coalescing:.1f} a request"
    )
    rows = Table("thread", "activity", "share", "", right=("share",), drop=("",))
    for what, share in run.consumer_shares.items():
        rows.add_row("consumer", what, f"{share:.0%}", share_bar(share))
    for what, share in run.reading_shares.items():
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
