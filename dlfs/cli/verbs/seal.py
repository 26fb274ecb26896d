"""``dlfs seal``: makes a dataset of the files below ``incoming``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.cli.options import JsonOption, Layout, LayoutOption, SeedOption
from dlfs.cli.output import human_rate, human_samples, note, note_left_out, print_json
from dlfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from dlfs.staging.protocol import SealStatus


def seal(
    mountpoint: Annotated[
        str, typer.Argument(metavar="DIR", help="Mount point of 'dlfs mount --incoming'.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The directory in DIR/incoming.")],
    layout: LayoutOption = Layout.shuffled,
    seed: SeedOption = 0,
    skip_links: Annotated[
        bool, typer.Option("--skip-links", help="Leave symbolic links out instead of refusing.")
    ] = False,
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="Make an empty dataset of a directory without files."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Seal DIR/incoming/NAME as the dataset DIR/NAME, which is read-only from then on."""
    from dlfs.mount.incoming_client import seal as run
    from dlfs.staging.protocol import SealOptions

    options = SealOptions(layout.value, seed, "skip" if skip_links else "error", allow_empty)
    with progress_bar(f"seal {name}") as bar:
        status = run(
            mountpoint,
            name,
            options,
            progress=lambda now: bar.update(
                now.bytes_done, now.bytes_total, human_samples(now.samples_done)
            ),
        )
    _report(name, status, json=json)


def _report(name: str, status: SealStatus, *, json: bool) -> None:
    if json:
        print_json(
            {
                "dataset": name,
                "version": status.version,
                "samples": status.samples_done,
                "bytes": status.bytes_done,
                "seconds": status.seconds,
                "skipped": dict(status.skipped),
                "empty_directories": status.empty_directories,
            },
            result=True,
        )
    note(
        f"sealed {name}@{status.version}: {human_samples(status.samples_done)}, "
        f"{human_rate(status.bytes_done, status.seconds)}"
    )
    note_left_out(status.skipped)
