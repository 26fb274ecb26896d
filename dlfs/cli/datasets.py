"""Shows datasets in tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlfs.cli.output import Table, human_count, human_date, human_size, table

if TYPE_CHECKING:
    from dlfs import Dataset, DatasetInfo


def dataset_json(info: DatasetInfo) -> dict[str, Any]:
    """Return the JSON form of a dataset."""
    return asdict(info)


def column_types(dataset: Dataset) -> dict[str, str]:
    """Return the columns of a dataset by name: a numpy type, or ``string``."""
    return {
        name: "string" if dtype.kind == "O" else dtype.name
        for name, dtype in dataset.columns.items()
    }


def dataset_table(infos: Iterable[DatasetInfo]) -> Table:
    """Return a table of datasets."""
    columns = ("dataset", "samples", "bytes", "on device", "layout", "created")
    made = table(
        *columns,
        right=("samples", "bytes", "on device"),
        drop=("layout", "on device", "created"),
    )
    for info in infos:
        made.add_row(
            f"{info.name}@{info.version}",
            human_count(info.sample_count),
            human_size(info.sample_bytes),
            human_size(info.stored_bytes),
            info.layout,
            human_date(info.created),
        )
    return made
