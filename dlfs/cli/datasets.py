"""Shows datasets in tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dlfs.base.wording import dtype_name
from dlfs.cli.output import Table, human_count, human_date, human_samples, human_size

if TYPE_CHECKING:
    from dlfs import Dataset, DatasetInfo, UnfinishedInfo
    from dlfs.format.bad_records import BadReport


def column_types(dataset: Dataset) -> dict[str, str]:
    """Return the columns of a dataset by name: a numpy type, ``float32[4]``, or ``string``."""
    return {name: dtype_name(dtype) for name, dtype in dataset.columns.items()}


def describe(info: DatasetInfo) -> str:
    """Return name, version and size of a dataset for a message."""
    size = human_size(info.sample_bytes)
    return f"{info.name}@{info.version} ({human_samples(info.sample_count)}, {size})"


def describe_bad(bad: BadReport) -> str:
    """Return the number of bad records, in all and by kind of error, for a message."""
    kinds = ", ".join(f"{human_count(count)} x {kind}" for kind, count in bad.reasons.items())
    return f"{human_count(bad.count)} ({kinds})"


def dataset_table(infos: Iterable[DatasetInfo]) -> Table:
    """Return a table of datasets."""
    columns = ("dataset", "samples", "bytes", "on device", "layout", "created")
    made = Table(
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


def unfinished_table(infos: Iterable[UnfinishedInfo]) -> Table:
    """Return a table of imports that are not finished."""
    infos = list(infos)
    granted = ("granted",) if any(info.granted_bytes for info in infos) else ()
    counts = ("samples", "bytes", "on device", *granted, "second pass")
    columns = ("unfinished import", *counts, "begun", "source")
    made = Table(*columns, right=counts, drop=("on device", "begun", *granted))
    for info in infos:
        made.add_row(
            info.name,
            human_count(info.sample_count),
            human_size(info.sample_bytes),
            human_size(info.stored_bytes),
            *([human_size(info.granted_bytes)] if granted else []),
            "-" if info.packed_again is None else human_count(info.packed_again),
            human_date(info.created),
            str(info.origin.get("source", "-")),
        )
    return made
