"""``dlfs verify``: reads a whole volume and checks all of its checksums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from dlfs.cli.exits import ExitCode
from dlfs.cli.options import DevicesArgument, JsonOption, OptionalDatasetArgument, open_devices
from dlfs.cli.output import (
    human_count,
    human_rate,
    note,
    print_json_stream,
    print_text,
)
from dlfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from dlfs.cli.progress import Bar
    from dlfs.volume.verification import Finding


class _Checked:
    """Counts the problems found and the bytes read."""

    def __init__(self, bar: Bar) -> None:
        self.problem_count = 0
        self.size_bytes = 0
        self._begin = time.monotonic()
        self._bar = bar

    @property
    def seconds(self) -> float:
        """Time since the start, in seconds."""
        return time.monotonic() - self._begin

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Take the progress of the verification."""
        self.size_bytes = done_bytes
        self._bar.update(done_bytes, total_bytes, f"{human_count(self.problem_count)} bad")

    def count(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        """Count findings and pass them on."""
        for finding in findings:
            self.problem_count += 1
            yield finding


_WHY = "this reads the devices themselves"


def verify(
    volume: DevicesArgument, dataset: OptionalDatasetArgument = None, json: JsonOption = False
) -> None:
    """Check superblocks, catalog, directories and every sample; report all damage.

    Examples:
        dlfs verify photos.img
        dlfs verify photos.img photos@2 --json
    """
    with open_devices(volume, "verify", why=_WHY) as opened, progress_bar("verify") as bar:
        checked = _Checked(bar)
        findings = checked.count(opened.verify(dataset, progress=checked.progress))
        if json:
            head = {"volume": opened.uri, "uuid": opened.uuid}
            print_json_stream(head, "problems", map(asdict, findings), tail=lambda: _tail(checked))
        else:
            for finding in findings:
                print_text(str(finding).replace("\n", " "))
    count = human_count(checked.problem_count)
    verdict = f"{count} bad" if checked.problem_count else "all good"
    note(f"verified {volume}: {human_rate(checked.size_bytes, checked.seconds)}: {verdict}")
    if checked.problem_count:
        raise typer.Exit(ExitCode.DAMAGE)


def _tail(checked: _Checked) -> dict[str, Any]:
    return {
        "ok": checked.problem_count == 0,
        "problem_count": checked.problem_count,
        "checked_bytes": checked.size_bytes,
        "seconds": checked.seconds,
    }
