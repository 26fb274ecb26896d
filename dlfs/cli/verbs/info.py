"""``dlfs info``: shows a volume's geometry, members, superblocks, space and datasets.

For one dataset, it shows the versions, columns, and the records that its imports left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from dlfs.base.memory_limit import describe_memory, opened_memory_bytes
from dlfs.cli.datasets import column_types, dataset_table, describe_bad, unfinished_table
from dlfs.cli.options import JsonOption, OptionalDatasetArgument, VolumeArgument, open_volume
from dlfs.cli.output import (
    Table,
    human_date,
    human_size,
    note,
    print_data,
    print_fields,
    print_json,
    print_text,
    show_text,
)
from dlfs.errors import DlfsError

if TYPE_CHECKING:
    from dlfs import DatasetInfo, MemberInfo, Volume, VolumeInfo
    from dlfs.format.bad_records import BadReport

_STATE_STYLES = {
    "damaged": "bold red",
    "stale": "yellow",
    "degraded": "bold yellow",
    "missing": "bold red",
}


def info(
    volume: VolumeArgument, dataset: OptionalDatasetArgument = None, json: JsonOption = False
) -> None:
    """Show a volume: geometry, members, superblocks, space, datasets; or show one dataset.

    A volume that is readable although members are missing is shown, with exit code 0. Of a dataset,
    it shows the versions, the columns, and the bad records that its imports left out. Of an
    unfinished import, 'granted' is space to which its workers may be writing.

    Examples:
        dlfs info photos.img
        dlfs info photos.img photos
        dlfs info a.img,b.img --json
        dlfs info unix:/run/dlfs/photos.sock
    """
    if dataset is not None:
        _show_dataset(volume, dataset, json=json)
        return
    with open_volume(volume) as opened:
        described, datasets = opened.info(), opened.datasets()
        unfinished = opened.unfinished()
        columns = [_columns(opened, each) for each in datasets]
    if json:
        found = asdict(described) | {"default_memory_bytes": opened_memory_bytes()}
        found["datasets"] = [
            asdict(each) | {"columns": kinds} for each, kinds in zip(datasets, columns, strict=True)
        ]
        found["unfinished"] = [asdict(each) for each in unfinished]
        print_json(found)
        return
    _print_volume(described)
    print()
    print_data(_member_table(described.members))
    print()
    if datasets:
        print_data(dataset_table(datasets))
    else:
        print("no datasets")
    for each, kinds in zip(datasets, columns, strict=True):
        _print_columns(each, kinds)
        if each.bad_count:
            print()
            shown = f"{show_text(each.name)}@{each.version}"
            print_text(
                f"bad records left out of {shown}: {each.bad_count:,}; 'dlfs info VOLUME {shown}' "
                "lists them"
            )
    if unfinished:
        print()
        print_data(unfinished_table(unfinished))
    _warn(described)


def _show_dataset(uri: str, name: str, *, json: bool) -> None:
    """Show the versions of a dataset, and the columns and bad records of the newest of them."""
    with open_volume(uri) as opened:
        versions = opened.versions(name)
        with opened.dataset(versions[-1].name, versions[-1].version) as dataset:
            columns, bad = column_types(dataset), dataset.bad_records()
    if json:
        print_json(
            {
                "versions": [asdict(each) for each in versions],
                "columns": columns,
                "bad_records": asdict(bad),
            }
        )
        return
    print_data(dataset_table(versions))
    _print_columns(versions[-1], columns)
    shown = f"{show_text(versions[-1].name)}@{versions[-1].version}"
    print()
    print_text(f"content digest of {shown}: {versions[-1].content_digest}")
    print_text(f"packing digest of {shown}: {versions[-1].packing_digest}")
    if bad.count:
        print()
        print_text(f"bad records left out of {shown}: {describe_bad(bad)}")
        print_data(_bad_table(bad, versions[-1].version))
        if len(bad.records) < bad.count:
            print_text(f"{bad.count - len(bad.records):,} more are only counted")


def _bad_table(bad: BadReport, version: int) -> Table:
    made = Table("version", "file", "record", "reason", right=("version",), drop=("version",))
    for one in bad.records:
        made.add_row(str(one.version or version), one.source, one.record, one.reason)
    return made


def _print_columns(dataset: DatasetInfo, kinds: Mapping[str, str]) -> None:
    if kinds:
        print()
        shown = ", ".join(f"{show_text(name)}: {kind}" for name, kind in kinds.items())
        print_text(f"columns of {show_text(dataset.name)}@{dataset.version}: {shown}")


def _columns(volume: Volume, info: DatasetInfo) -> dict[str, str]:
    """Return the columns of a dataset; opens it only if it has any."""
    if not info.attribute_bytes:
        return {}
    try:
        with volume.dataset(info.name, info.version) as dataset:
            return column_types(dataset)
    except (DlfsError, OSError) as error:
        note(str(error))  # the rest is shown; verify reports all damage
        return {}


def _print_volume(described: VolumeInfo) -> None:
    used = described.capacity_bytes - described.free_bytes
    share = used / described.capacity_bytes
    free, capacity = human_size(described.free_bytes), human_size(described.capacity_bytes)
    fields = {
        "volume": described.uuid,
        "label": show_text(described.label) or "-",
        "created": human_date(described.created),
        "generation": f"{described.generation:,}",
        "space": f"{free} free of {capacity} ({share:.1%} used)",
        "chunk": f"{human_size(described.chunk_bytes)}, in blocks of "
        f"{human_size(described.block_bytes)}",
        "replicas": f"{described.replicas} of each chunk",
        "memory": f"for its samples, in a process: {describe_memory(opened_memory_bytes())}",
    }
    print_fields(fields)


def _member_table(members: tuple[MemberInfo, ...]) -> Table:
    from rich.text import Text

    copies = ("superblock A", "superblock B", "at the tail")
    limited = any(member.queue_pairs_max for member in members)
    queues = ("queues",) if limited else ()
    titles = ("member", "size", *queues, "state", *copies, "device")
    right = ("member", "size", *queues)
    made = Table(*titles, right=right, drop=(*reversed(copies), *queues))
    for member in members:
        states = [
            Text(
                f"{copy.state} ({copy.generation})" if copy.generation else copy.state,
                style=_STATE_STYLES.get(copy.state, ""),
            )
            for copy in member.superblocks
        ]
        states += [Text("-")] * (len(copies) - len(states))
        size = human_size(member.size_bytes) if member.size_bytes else "-"
        state = Text(member.state, style=_STATE_STYLES.get(member.state, ""))
        most = [str(member.queue_pairs_max or "-")] if limited else []
        made.add_row(str(member.number), size, *most, state, *states, member.uri)
    return made


def _warn(described: VolumeInfo) -> None:
    if described.unproven is not None:
        note(described.unproven)
    for member in described.members:
        if member.reason is not None:
            note(f"member {member.number} ({member.uuid}) is {member.state}: {member.reason}")
        for copy in member.superblocks:
            if copy.problem is not None:
                note(f"damaged superblock: {copy.problem}")
