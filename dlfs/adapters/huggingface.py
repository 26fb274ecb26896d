"""A dataset as an ``IterableDataset`` of Hugging Face ``datasets``, streamed as Arrow tables.

``stream`` reads ahead, and hands tables of about 16 MiB to ``datasets``::

    rows = stream(dataset, columns=["path", "image", "label"], shuffle="global", seed=7, epoch=0)
    for row in rows.cast_column("image", datasets.Image()).map(augment):
        ...

The bytes of the samples are copied once, to Arrow's ``large_binary``, because ``datasets`` does not
process binary views yet. A map-style ``datasets.Dataset`` that fits in memory is made of
``dlfs.adapters.arrow.tables`` without a copy.

The stream has shards, which are parts of the epoch's order. Worker processes of a ``DataLoader``
and the ranks of ``datasets.distributed.split_dataset_by_node`` each take some of them. Its
``state_dict`` resumes after the last row, as for any ``IterableDataset``: at most one shard is read
again. Another epoch is another stream, with another ``epoch``.

Needs the packages of the extra ``huggingface``. Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from dlfs import Dataset, DatasetView
from dlfs.adapters.arrow import Part, TableFormat, TableKeywords, divide, order_of
from dlfs.base.extras import load_package

if TYPE_CHECKING:
    import datasets
    import pyarrow

SHARDS = 64
"""Shards of a stream by default; a common multiple of most numbers of workers and ranks."""


def stream(
    dataset: Dataset | DatasetView,
    *,
    columns: Sequence[str] | None = None,
    shards: int = SHARDS,
    **order: Unpack[TableKeywords],
) -> datasets.IterableDataset:
    """Return the samples of an epoch as a stream of rows.

    Args:
        dataset: dataset to read from, or a view; it must stay open while rows are read.
        columns: names of the columns, as ``dlfs.adapters.arrow`` describes them; by default all.
        shards: number of shards; fewer if there are fewer samples.
        order: samples and their order, as for ``dlfs.adapters.arrow.tables``.

    Raises:
        UsageError: ``datasets`` is not installed, an argument is out of range, or there is no such
            column.
    """
    package = load_package("datasets", extra="huggingface", what="stream rows")
    module = load_package("datasets.iterable_dataset", extra="huggingface", what="stream rows")
    table_format = TableFormat.of(dataset, columns, is_copied=True)
    parts = divide(table_format, order_of(stream, order), shards)
    features = package.Features.from_arrow_schema(table_format.schema())
    info = package.DatasetInfo(features=features)
    source = module.ArrowExamplesIterable(_tables, {"parts": parts})
    return package.IterableDataset(source, info=info)


def _tables(parts: list[Part]) -> Iterator[tuple[Any, pyarrow.Table]]:
    """Yield the tables of some parts with their keys, as ``datasets`` takes them."""
    for part in parts:
        for number, table in enumerate(part.tables()):
            yield (part.first, number), table
