"""A progress bar on stderr with rate and time left; silent where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlfs.cli.output import human_samples, human_size, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, Task, TaskID

    from dlfs.ingest.progress import Progress


@dataclass
class Bar:
    """A bar that counts bytes. Without a terminal it does nothing."""

    _progress: RichProgress | None
    _task: TaskID | None

    def update(self, done_bytes: int, total_bytes: int | None = None, detail: str = "") -> None:
        """Move the bar.

        Args:
            done_bytes: done so far.
            total_bytes: of all, when it is known (again).
            detail: a few words to the right, such as a count of samples.
        """
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=done_bytes, total=total_bytes, detail=detail)

    def show(self, progress: Progress) -> None:
        """Show the progress of an import or an export."""
        detail = human_samples(progress.samples_done)
        self.update(progress.bytes_done, progress.bytes_total, detail)


def _rate_column() -> ProgressColumn:
    """Bytes a second in units of 1,024, as everywhere; rich's own column has units of 1,000."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{human_size(speed)}/s" if speed else "", style="progress.data.speed")

    return RateColumn()


@contextmanager
def progress_bar(title: str) -> Iterator[Bar]:
    """Show a bar while the block runs."""
    console = stderr_console()
    if not console.is_terminal:
        yield Bar(None, None)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        _rate_column(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[detail]}", style="dim"),
        console=console,
        transient=True,
    ) as progress:
        yield Bar(progress, progress.add_task(title, total=None, detail=""))
