"""Shows a progress bar on stderr, with rate and time left; only on a terminal, and not with -q."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlfs.cli.output import (
    Table,
    human_samples,
    human_seconds,
    human_size,
    is_quiet,
    note,
    share_bar,
    stderr_console,
    terminal_columns,
)

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID

    from dlfs.ingest.progress import Progress, WorkerProgress

WORKERS_SHOWN_MAX = 16
"""Most workers that are shown below a bar."""


@dataclass
class Bar:
    """A bar that counts bytes. Without a terminal it does nothing."""

    _progress: RichProgress | None
    _task: TaskID | None
    _title: str = ""
    _workers: Sequence[WorkerProgress] = ()
    _slow: set[tuple[str, int | None]] = field(default_factory=set)

    def update(self, done_bytes: int, total_bytes: int | None = None, detail: str = "") -> None:
        """Move the bar.

        Args:
            done_bytes: bytes done so far.
            total_bytes: total bytes, if it is known or has changed.
            detail: a few words at the right, such as a number of samples.
        """
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=done_bytes, total=total_bytes, detail=detail)

    def show(self, progress: Progress) -> None:
        """Show the progress of an import or an export."""
        detail = human_samples(progress.samples_done)
        self._show_workers(progress.workers)
        if progress.second_pass and self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self._title}, second pass")
        if progress.samples_sealed:
            detail = f"sealed {human_samples(progress.samples_sealed)}"
        self.update(progress.bytes_done, progress.bytes_total, detail)

    def _show_workers(self, workers: Sequence[WorkerProgress]) -> None:
        """Show a row for each worker below the bar; without a terminal, log those that are slow."""
        self._workers = workers
        for worker in workers:
            if worker.is_straggler and (worker.name, worker.part) not in self._slow:
                self._slow.add((worker.name, worker.part))
                note(f"{self._title}: {describe_straggler(worker)}")

    def workers(self) -> list[Table]:
        """Return a table of the workers; none without any."""
        return [worker_table(self._workers[:WORKERS_SHOWN_MAX])] if self._workers else []


def worker_table(workers: Sequence[WorkerProgress]) -> Table:
    """Return a table with a row for each worker of an import."""
    titles = ("worker", "part", "of part", "rate", "done", "")
    rows = Table(*titles, right=titles[1:5], drop=("done", "of part"))
    for worker in workers:
        share = worker.part_bytes / worker.part_total if worker.part_total else 0.0
        rows.add_row(
            worker.name,
            "" if worker.part is None else f"{worker.part:,}",
            "" if worker.part is None else f"{min(1.0, share):.0%}",
            "" if worker.part is None else f"{human_size(int(worker.bytes_per_second))}/s",
            human_size(worker.bytes_done),
            "slow" if worker.is_straggler else "",
        )
    return rows


def describe_straggler(worker: WorkerProgress) -> str:
    """Return the text for a worker that is much slower than the others."""
    rate = human_size(int(worker.bytes_per_second))
    return f"worker {worker.name} is slow: part {worker.part} at {rate}/s"


def _row(task: Task) -> Table:
    """Return one line that fits the terminal: title, bar, bytes, rate, time left and detail."""
    titles = ("title", "bar", "bytes", "rate", "time", "detail")
    row = Table(*titles, right=titles[1:5], drop=("bar", "detail"), header=False)
    done, total = int(task.completed), None if task.total is None else int(task.total)
    speed, left = task.speed, task.time_remaining
    row.add_row(
        task.description,
        "" if total is None else share_bar(done / total if total else 1.0),
        human_size(done) + ("" if total is None else f" of {human_size(total)}"),
        f"{human_size(speed)}/s" if speed else "",
        "" if left is None else human_seconds(left),
        str(task.fields["detail"]),
    )
    return row


@contextmanager
def progress_bar(title: str) -> Iterator[Bar]:
    """Show a bar while the block runs."""
    console = stderr_console()
    if is_quiet() or terminal_columns(console.file) is None:
        yield Bar(None, None, title)
        return
    from rich.progress import Progress

    class Lines(Progress):
        """A progress display whose lines are tables, which cut no number and no name."""

        def get_renderables(self) -> Iterable[Table]:
            return [*map(_row, self.tasks), *(bar.workers() if bar is not None else ())]

    # Other output stands above the bar, unless it goes to a file.
    shared = terminal_columns(sys.stdout) is not None
    bar: Bar | None = None
    with Lines(console=console, transient=True, redirect_stdout=shared) as progress:
        bar = Bar(progress, progress.add_task(title, total=None, detail=""), title)
        yield bar
