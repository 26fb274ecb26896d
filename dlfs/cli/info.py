"""``dlfs info``: a volume's geometry, members, superblocks, space and datasets."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlfs.cli.datasets import column_types, dataset_json, dataset_table
from dlfs.cli.options import JsonOption, VolumeArgument, open_volume
from dlfs.cli.output import (
    human_date,
    human_size,
    note,
    print_data,
    print_json,
    show_path,
    stdout_console,
    table,
)
from dlfs.errors import DlfsError

if TYPE_CHECKING:
    from rich.table import Table

    from dlfs import DatasetInfo, MemberInfo, Volume, VolumeInfo

_STATE_STYLES = {
    "damaged": "bold red",
    "stale": "yellow",
    "degraded": "bold yellow",
    "missing": "bold red",
}


def info(volume: VolumeArgument, json: JsonOption = False) -> None:
    """Show a volume: geometry, members, superblocks, space, datasets.

    A volume that can be read although members are missing is shown, and ends with 0.
    """
    with open_volume(volume) as opened:
        described, datasets = opened.info(), opened.datasets()
        columns = [_columns(opened, dataset) for dataset in datasets]
    if json:
        found = info_json(described)
        found["datasets"] = [
            dataset_json(dataset) | {"columns": kinds}
            for dataset, kinds in zip(datasets, columns, strict=True)
        ]
        print_json(found)
        return
    _print_volume(described)
    stdout_console().print()
    print_data(_member_table(described.members))
    stdout_console().print()
    if datasets:
        print_data(dataset_table(datasets))
    else:
        print("no datasets")
    for dataset, kinds in zip(datasets, columns, strict=True):
        if kinds:
            shown = ", ".join(f"{show_path(n.encode())}: {kind}" for n, kind in kinds.items())
            print(f"columns of {dataset.name}@{dataset.version}: {shown}")
    _warn(described.members)


def _columns(volume: Volume, info: DatasetInfo) -> dict[str, str]:
    """The columns of a dataset; it is only opened when it has any."""
    if not info.attribute_bytes:
        return {}
    try:
        with volume.dataset(info.name, info.version) as dataset:
            return column_types(dataset)
    except (DlfsError, OSError) as error:
        note(str(error))  # all else is shown all the same; verify tells the whole
        return {}


def info_json(described: VolumeInfo) -> dict[str, Any]:
    """A volume as JSON, without its datasets."""
    return asdict(described)


def _print_volume(described: VolumeInfo) -> None:
    used = described.capacity_bytes - described.free_bytes
    share = used / described.capacity_bytes
    free, capacity = human_size(described.free_bytes), human_size(described.capacity_bytes)
    rows = {
        "volume": f"{described.uuid}",
        "label": show_path(described.label.encode()) or "-",
        "created": human_date(described.created),
        "generation": f"{described.generation:,}",
        "space": f"{free} free of {capacity} ({share:.1%} used)",
        "chunk": f"{human_size(described.chunk_bytes)}, in blocks of "
        f"{human_size(described.block_bytes)}",
        "copies": f"{described.replicas} of each chunk",
    }
    for name, value in rows.items():
        stdout_console().print(f"[bold]{name:>10}[/]  ", end="")
        stdout_console().print(value, markup=False, soft_wrap=True)


def _member_table(members: tuple[MemberInfo, ...]) -> Table:
    from rich.text import Text

    columns = ("member", "size", "state", "superblock A", "superblock B", "at the tail")
    made = table(*columns, right=("member", "size"))
    made.add_column("device", overflow="fold")
    for member in members:
        states = [
            Text(
                f"{copy.state} ({copy.generation})" if copy.generation else copy.state,
                style=_STATE_STYLES.get(copy.state, ""),
            )
            for copy in member.superblocks
        ]
        states += [Text("-")] * (len(columns) - 3 - len(states))
        size = human_size(member.size_bytes) if member.size_bytes else "-"
        state = Text(member.state, style=_STATE_STYLES.get(member.state, ""))
        made.add_row(str(member.number), size, state, *states, Text(member.uri))
    return made


def _warn(members: tuple[MemberInfo, ...]) -> None:
    for member in members:
        if member.reason is not None:
            note(f"member {member.number} ({member.uuid}) is {member.state}: {member.reason}")
        for copy in member.superblocks:
            if copy.problem is not None:
                note(f"damaged superblock: {copy.problem}")
