"""``dlfs du``: shows the space that datasets take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from dlfs.base.units import format_count
from dlfs.cli.options import JsonOption, OptionalDatasetArgument, VolumeArgument, open_volume
from dlfs.cli.output import (
    Table,
    human_count,
    human_size,
    print_data,
    print_json,
    print_text,
)

if TYPE_CHECKING:
    from dlfs import VolumeUsage


def du(
    volume: VolumeArgument, dataset: OptionalDatasetArgument = None, json: JsonOption = False
) -> None:
    """Show the space of each version of a dataset, or of all datasets.

    'bytes' are those of the samples; 'stored' are whole chunks, with directory and attributes; 'on
    media' counts every copy; 'freed' is free once that version alone is removed. A total counts
    chunks that versions share once. A removed dataset takes no space, even while it is read.

    Examples:
        dlfs du photos.img
        dlfs du photos.img photos --json
    """
    with open_volume(volume) as opened:
        usage = opened.usage(dataset)
    if json:
        print_json(asdict(usage))
        return
    print_data(_table(usage))
    capacity, free = human_size(usage.capacity_bytes), human_size(usage.free_bytes)
    unfinished = human_size(usage.unfinished_bytes)
    print_text(
        f"volume: {free} free of {capacity}, {human_size(usage.catalog_bytes)} of catalog, "
        + (f"{unfinished} of unfinished imports, " if usage.unfinished_bytes else "")
        + f"{format_count(usage.replicas, 'copy', 'copies')} of each chunk"
    )


def _table(usage: VolumeUsage) -> Table:
    numbers = ("samples", "bytes", "stored", "on media", "freed")
    made = Table("dataset", *numbers, right=numbers, drop=("freed", "on media"))
    for each in usage.versions:
        made.add_row(
            f"{each.name}@{each.version}",
            human_count(each.sample_count),
            human_size(each.sample_bytes),
            human_size(each.stored_bytes),
            human_size(each.media_bytes),
            human_size(each.freed_bytes),
        )
    made.add_row(
        "total",
        human_count(usage.sample_count),
        human_size(usage.sample_bytes),
        human_size(usage.stored_bytes),
        human_size(usage.media_bytes),
        "",
    )
    return made
