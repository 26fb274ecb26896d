"""``dlfs stat``: shows the location and the properties of samples without reading them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlfs.cli.datasets import column_types
from dlfs.cli.options import (
    DatasetArgument,
    IndexOption,
    JsonOption,
    PathsArgument,
    VolumeArgument,
    open_dataset,
    sample_indices,
)
from dlfs.cli.output import (
    human_count,
    human_date,
    human_size,
    json_path,
    print_fields,
    print_json,
    print_json_stream,
    show_path,
    show_text,
)

if TYPE_CHECKING:
    from dlfs import Dataset
    from dlfs.store.info import SampleInfo


def stat(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    paths: PathsArgument = None,
    index: IndexOption = None,
    json: JsonOption = False,
) -> None:
    """Show a sample's index, size, checksum, location and attributes, or describe the dataset.

    Examples:
        dlfs stat photos.img photos
        dlfs stat photos.img photos dog/0001.jpg
        dlfs stat photos.img photos@1 --index -1 --json
    """
    with open_dataset(volume, dataset) as found:
        if not paths and not index:
            _show_dataset(found, json=json)
            return
        infos = [found.stat(i) for i in sample_indices(found, paths or [], index or [])]
        values = _attributes(found, infos)
        if json:
            head = {"dataset": found.name, "version": found.version}
            print_json_stream(head, "samples", map(_json, infos, values))
            return
        for info, attributes in zip(infos, values, strict=True):
            _print_sample(info, attributes)


def _attributes(dataset: Dataset, infos: list[SampleInfo]) -> list[dict[str, Any]]:
    """Return the value of each column for each sample."""
    chosen = [info.index for info in infos]
    columns = {name: dataset.column(name, chosen).tolist() for name in dataset.columns}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(infos))]


def _json(info: SampleInfo, attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": json_path(info.path),
        "index": info.index,
        "length_bytes": info.length_bytes,
        "crc32c": f"{info.crc32c:08x}",
        "member": info.member,
        "offset_bytes": info.offset_bytes,
        "attributes": {name: _plain(value) for name, value in attributes.items()},
    }


def _plain(value: object) -> object:
    """Return a value in its JSON form, which has no NaN and no infinities."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_sample(info: SampleInfo, attributes: dict[str, Any]) -> None:
    fields = {
        "path": show_path(info.path),
        "index": human_count(info.index),
        "size": f"{info.length_bytes:,} bytes",
        "crc32c": f"{info.crc32c:08x}",
        "member": info.member,
        "offset": f"{info.offset_bytes:,} bytes",
    }
    shown = [f"{show_text(name)} = {show_text(str(value))}" for name, value in attributes.items()]
    print_fields(fields | _listed("attributes", shown))


def _listed(name: str, values: list[str]) -> dict[str, str]:
    """Return a field with a line for each value; no field if there are none."""
    return {name: "\n".join(values)} if values else {}


def _show_dataset(dataset: Dataset, *, json: bool) -> None:
    info = dataset.info
    columns = column_types(dataset)
    if json:
        print_json(asdict(info) | {"columns": columns})
        return
    fields = {
        "dataset": f"{show_text(info.name)}@{info.version}",
        "uuid": info.uuid,
        "content": info.content_digest,
        "packing": info.packing_digest,
        "created": human_date(info.created),
        "samples": human_count(info.sample_count),
        "bytes": f"{info.sample_bytes:,} ({human_size(info.sample_bytes)})",
        "stored": f"{info.stored_bytes:,} ({human_size(info.stored_bytes)})",
        "layout": f"{info.layout}, seed {info.seed}" if info.layout == "shuffled" else info.layout,
    }
    shown = [f"{show_text(name)}: {kind}" for name, kind in columns.items()]
    print_fields(fields | _listed("columns", shown))
