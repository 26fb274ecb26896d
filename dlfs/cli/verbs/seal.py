"""``dlfs seal``: makes a dataset of the files below ``incoming``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from dlfs.base.arguments import Layout
from dlfs.cli.options import JsonOption, SeedOption
from dlfs.cli.output import human_rate, human_samples, note, note_left_out, print_json
from dlfs.cli.progress import progress_bar
from dlfs.cli.staging import TargetArgument, connect_incoming, is_service

if TYPE_CHECKING:
    from dlfs.staging.protocol import SealStatus


def seal(
    target: TargetArgument,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    layout: Annotated[Layout, typer.Option(metavar="|".join(get_args(Layout)))] = "shuffled",
    seed: SeedOption = 0,
    skip_links: Annotated[bool, typer.Option("--skip-links")] = False,
    allow_empty: Annotated[bool, typer.Option("--allow-empty")] = False,
    json: JsonOption = False,
) -> None:
    """Seal DIR/incoming/NAME as the dataset DIR/NAME, which is read-only from then on.

    Args:
        name: The directory in the staging area.
        layout: Pack in an order drawn from the seed, or in path order.
        skip_links: Leave symbolic links out instead of refusing.
        allow_empty: Make an empty dataset of a directory without files.

    Examples:
        dlfs seal mnt pets
        dlfs seal mnt pets --layout path --skip-links
    """
    from dlfs.format.names import dataset_name_bytes
    from dlfs.mount.incoming_client import await_dataset
    from dlfs.staging import client
    from dlfs.staging.protocol import SealOptions

    raw = dataset_name_bytes(name)
    options = SealOptions(layout, seed, "skip" if skip_links else "error", allow_empty)
    with progress_bar(f"seal {name}") as bar:
        status = client.seal(
            connect_incoming(target, f"seal {name!r}"),
            raw,
            options,
            lambda now: bar.update(
                now.bytes_done, now.bytes_total, human_samples(now.samples_done)
            ),
        )
    if not is_service(target):
        await_dataset(target, raw, status.version)
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
