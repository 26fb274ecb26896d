"""A dataset as a Dask bag or a Dask dataframe, partitioned by ranges of samples.

``bag`` has an element for each sample; ``decode`` makes it of the index and the bytes. The
partitions are ranges of the storage order, so that each is read sequentially::

    sizes = bag(dataset, npartitions=16, decode=measure)
    print(sizes.mean().compute())

``dataframe`` has a row for each sample, by index, with known divisions: ``frame.loc[100:200]``
reads only the partitions that have these rows. If ``columns`` are attributes, no sample is read::

    frame = dataframe(dataset, columns=["label", "light"])
    print(frame.groupby("label").light.mean().compute())

A partition is pickled without its samples; the process that computes it opens the dataset there.

Needs the packages of the extra ``dask``. Threads: Dask's, any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlfs import Dataset, DatasetView
from dlfs.adapters.arrow import INDEX, Part, TableFormat, divide
from dlfs.adapters.grain import as_bytes
from dlfs.base.extras import load_package
from dlfs.epoch.options import EpochOptions

if TYPE_CHECKING:
    import dask.bag
    import dask.dataframe
    import pandas
    from numpy.typing import ArrayLike

PARTITIONS = 32
"""Partitions by default."""


def bag(
    dataset: Dataset | DatasetView,
    npartitions: int = PARTITIONS,
    *,
    decode: Callable[[int, memoryview], Any] = as_bytes,
    where: ArrayLike | None = None,
) -> dask.bag.Bag:
    """Return the samples as a bag.

    Args:
        dataset: dataset to read from, or a view.
        npartitions: number of partitions; fewer if there are fewer samples.
        decode: makes an element of the index and the bytes of a sample, which it must not keep.
        where: samples to take, as ``bool[n_samples]`` or indices.

    Raises:
        UsageError: Dask is not installed, or an argument is out of range.
    """
    package = load_package("dask.bag", extra="dask", what="make a Dask bag")
    delayed = load_package("dask", extra="dask", what="make a Dask bag").delayed
    whole = TableFormat(dataset, ())
    parts = divide(whole, EpochOptions(where=where, shuffle=None).with_copies(), npartitions)
    read = delayed(_elements, pure=False)
    empty = Part(whole, EpochOptions(where=[], shuffle=None), 0, 0)
    return package.from_delayed([read(part, decode) for part in parts or [empty]])


def _elements(part: Part, decode: Callable[[int, memoryview], Any]) -> list[Any]:
    """Read the elements of a partition."""
    made: list[Any] = []
    for batch in part.batches():
        with batch:
            made += map(decode, batch.indices.tolist(), batch)
    return made


def dataframe(
    dataset: Dataset | DatasetView,
    npartitions: int = PARTITIONS,
    *,
    columns: Sequence[str] | None = None,
) -> dask.dataframe.DataFrame:
    """Return the samples as a dataframe, whose index is the index of the sample.

    Args:
        dataset: dataset to read from, or a view.
        npartitions: number of partitions; fewer if there are fewer samples.
        columns: names of the columns, as ``dlfs.adapters.arrow`` describes them; by default all.

    Raises:
        UsageError: Dask is not installed, an argument is out of range, or there is no such column.
    """
    package = load_package("dask.dataframe", extra="dask", what="make a Dask dataframe")
    table_format = TableFormat.of(dataset, columns, is_copied=True)
    order = np.arange(len(dataset), dtype=np.uint64)
    parts = divide(table_format, EpochOptions(order=order), npartitions)
    empty = _frame(Part(table_format, EpochOptions(order=order[:0]), 0, 0))
    if not parts:
        return package.from_pandas(empty, npartitions=1)
    firsts = np.cumsum([0, *(part.count for part in parts)]).tolist()
    divisions = (*firsts[:-1], len(dataset) - 1)
    return package.from_map(_frame, parts, meta=empty, divisions=divisions)


def _frame(part: Part) -> pandas.DataFrame:
    """Read the rows of a partition."""
    pyarrow = load_package("pyarrow", extra="dask", what="make a Dask dataframe")
    table_format, indices = part.format, part.indices()
    found = list(part.tables())
    table = pyarrow.concat_tables(found) if found else table_format.schema().empty_table()
    frame = table.to_pandas(types_mapper=_pandas_type)
    frame.index = indices.astype(np.int64)
    frame.index.name = INDEX
    return frame


def _pandas_type(kind: Any) -> Any:
    """Return the pandas type of bytes and lists; None for pandas' own choice.

    As Python objects, they would become strings in a Dask dataframe.
    """
    import pandas
    import pyarrow

    if pyarrow.types.is_large_binary(kind) or pyarrow.types.is_nested(kind):
        return pandas.ArrowDtype(kind)
    return None
