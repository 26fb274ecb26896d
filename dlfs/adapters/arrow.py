"""Samples as Arrow tables, for programs and frameworks that take tables.

``tables`` reads a dataset as a stream of ``pyarrow.Table`` objects, a row for each sample::

    for table in tables(dataset, columns=["path", "sample", "label"]):
        ...

The columns are ``index`` (int64) and ``path`` (string); ``sample`` (bytes), or the fields of the
samples; and the attributes. A field or attribute named ``index``, ``path`` or ``sample`` takes the
place of that column. Bytes are views of the memory into which they were read, which a table keeps.
Arrays are lists: ``<f4[?,3]`` is ``list<fixed_size_list<float>[3]>``.

``divide`` cuts the order of an epoch into parts that are read by different processes: the adapters
to Ray, Dask and Hugging Face datasets use it. A part is pickled without its samples. The process
that reads a part opens the dataset there, shares the sample directory with the other processes of
its machine, and reads ahead.

Needs pyarrow. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from dlfs import Batch, Dataset, DatasetView, Shuffle
from dlfs.attributes.arrow import arrow_type, column_to_arrow
from dlfs.base.arguments import check_integer
from dlfs.base.extras import load_package
from dlfs.base.units import MIB
from dlfs.base.wording import quote, show_value
from dlfs.epoch.options import EpochOptions, make_options
from dlfs.errors import UsageError
from dlfs.fields import FieldType

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import ArrayLike, NDArray

INDEX, PATH, SAMPLE = "index", "path", "sample"
"""Names of the columns that are no field and no attribute."""

TABLE_BYTES = 16 * MIB
"""Bytes of samples in a table, about; a table has at least one sample."""

TABLE_ROWS = 1 << 16
"""Rows of a table for which no sample is read."""

_RESERVED = "dlfs:"  # begins the names of columns that users do not see

ArrayMaker = Callable[[Any, Any], Any]
"""Makes an Arrow array of arrays, ``dtype[n, ...]`` or a list of n, of an Arrow type."""


class TableKeywords(TypedDict, total=False):
    """Keywords of the samples in tables and of their order, which is storage order by default."""

    where: ArrayLike | None
    shuffle: Shuffle | None
    seed: int
    epoch: int


@dataclass(frozen=True)
class TableFormat:
    """The columns of the tables that are made of batches.

    Attributes:
        dataset: dataset of the samples, or a view.
        names: names of the columns, in their order.
        is_copied: True to copy bytes to ``large_binary``, for programs without binary views.
    """

    dataset: Dataset | DatasetView
    names: tuple[str, ...]
    is_copied: bool = False

    @classmethod
    def of(
        cls,
        dataset: Dataset | DatasetView,
        columns: Sequence[str] | None,
        *,
        is_copied: bool = False,
    ) -> TableFormat:
        """Return the format with all columns, or with some.

        Raises:
            UsageError: there is no such column, or Arrow has no type for it.
        """
        fields = dataset.fields
        samples = list(fields) or [SAMPLE]
        attributes = [name for name in dataset.columns if not name.startswith(_RESERVED)]
        known = list(dict.fromkeys([INDEX, PATH, *samples, *attributes]))
        names = known if columns is None else list(columns)
        for name in names:
            if name not in known:
                raise UsageError(
                    f"read tables of dataset {quote(dataset.name)}: expected columns out of "
                    f"{known}, got {show_value(name)}"
                )
        made = cls(dataset, tuple(names), is_copied)
        made.schema()  # raises for a type that Arrow does not have
        return made

    @property
    def fields(self) -> list[str]:
        """Names of the columns that are fields of the samples."""
        known = self.dataset.fields
        return [name for name in self.names if name in known]

    @property
    def has_samples(self) -> bool:
        """True if samples are read; False if the columns come from the directory alone."""
        fields = self.dataset.fields
        return any(self._is_sample(name, fields) for name in self.names)

    def _is_sample(self, name: str, fields: dict[str, str]) -> bool:
        if fields:
            return name in fields
        return name == SAMPLE and name not in self.dataset.columns

    def schema(self) -> pyarrow.Schema:
        """Return the types of the columns.

        Raises:
            UsageError: pyarrow is not installed, or Arrow has no type for a column.
        """
        pyarrow = load()
        fields = self.dataset.fields
        return pyarrow.schema([(name, self._type(pyarrow, name, fields)) for name in self.names])

    def _type(self, pyarrow: Any, name: str, fields: dict[str, str]) -> Any:
        attributes = self.dataset.columns
        if self._is_sample(name, fields):
            kind = fields.get(name, "bytes")
            if kind == "bytes":
                return pyarrow.large_binary() if self.is_copied else pyarrow.binary_view()
            return pyarrow.string() if kind == "text" else self._array_type(pyarrow, name, kind)
        if name in attributes:
            return arrow_type(pyarrow, attributes[name])
        return pyarrow.int64() if name == INDEX else pyarrow.string()

    def _array_type(self, pyarrow: Any, name: str, kind: str) -> Any:
        """Return the Arrow type of a field such as ``<f4[?,3]``: nested lists."""
        form = FieldType.parse(kind)
        try:
            made = pyarrow.from_numpy_dtype(form.dtype.newbyteorder("="))
        except (TypeError, NotImplementedError, pyarrow.ArrowException) as error:
            raise UsageError(
                f"read tables of dataset {quote(self.dataset.name)}: expected fields of types that "
                f"Arrow has, got {quote(name)} of type {kind}; leave it out of columns"
            ) from error
        for length in reversed(form.shape):
            made = pyarrow.list_(made) if length is None else pyarrow.list_(made, length)
        return made

    def make(
        self,
        indices: NDArray[np.uint64],
        batch: Batch | None = None,
        make_array: ArrayMaker | None = None,
    ) -> pyarrow.Table:
        """Make the table of some samples.

        Args:
            indices: indices of the samples.
            batch: batch of the samples; None if the columns are no part of samples.
            make_array: makes the columns of array fields; by default lists.

        Raises:
            UsageError: a path is not UTF-8, and the table has a column of paths.
            DlfsError: the columns cannot be read.
        """
        pyarrow, schema = load(), self.schema()
        fields = self.dataset.fields
        columns: dict[str, Any] = {}
        for name, kind in zip(schema.names, schema.types, strict=True):
            if batch is not None and self._is_sample(name, fields):
                given = batch[name] if fields else batch
                columns[name] = self._sample_column(given, kind, make_array or nest)
            elif name in self.dataset.columns:
                columns[name] = column_to_arrow(pyarrow, self.dataset.column(name, indices), kind)
            elif name == INDEX:
                columns[name] = pyarrow.array(indices.astype(np.int64))
            else:
                columns[name] = pyarrow.array(self._paths(indices), kind)
        return pyarrow.table(columns)

    def _sample_column(self, given: Any, kind: Any, make_array: ArrayMaker) -> Any:
        pyarrow = load()
        if isinstance(given, Batch):
            if not self.is_copied:
                return given.to_arrow()
            data, offsets = given.pack()
            buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
            return pyarrow.Array.from_buffers(kind, len(given), buffers)
        if pyarrow.types.is_string(kind):
            return pyarrow.array(given, kind)
        return make_array(given, kind)

    def _paths(self, indices: NDArray[np.uint64]) -> list[str]:
        paths = self.dataset.paths_of(indices)
        try:
            return [path.decode() for path in paths]
        except UnicodeDecodeError as error:
            raise UsageError(
                f"read tables of dataset {quote(self.dataset.name)}: expected paths in UTF-8, got "
                f"{quote(error.object)}; leave {PATH!r} out of columns"
            ) from error


@dataclass(frozen=True)
class Part:
    """A range of the order of an epoch, which one process reads.

    Attributes:
        format: columns of the tables.
        options: options of the epoch.
        first: first position, 0..samples.
        count: number of positions.
    """

    format: TableFormat
    options: EpochOptions
    first: int
    count: int

    def indices(self) -> NDArray[np.uint64]:
        """Return the indices of the samples in the order in which they are read."""
        return self.format.dataset.order_epoch(self.options).indices(self.first, self.count)

    def sample_bytes(self) -> int:
        """Return the sum of the lengths of the samples, in bytes; from the directory."""
        return int(self.format.dataset.lengths(self.indices()).sum())

    def tables(self, make_array: ArrayMaker | None = None) -> Iterator[pyarrow.Table]:
        """Read the samples ahead, and yield them by tables.

        Args:
            make_array: makes the columns of array fields; by default lists.

        Raises:
            DlfsError: a sample cannot be read.
        """
        if self.format.has_samples:
            for batch in self.batches():
                yield self.format.make(batch.indices, batch, make_array)
            return
        indices = self.indices()
        for first in range(0, len(indices), TABLE_ROWS):
            yield self.format.make(indices[first : first + TABLE_ROWS])

    def batches(self) -> Iterator[Batch]:
        """Read the samples ahead, and yield them by batches of about ``TABLE_BYTES``.

        Raises:
            DlfsError: a sample cannot be read.
        """
        if not self.count:
            return
        dataset, indices = self.format.dataset, self.indices()
        mean_bytes = max(1, int(dataset.lengths(indices).sum()) // len(indices))
        size = max(1, min(TABLE_BYTES // mean_bytes, len(indices)))
        fields = self.format.fields or None
        options = EpochOptions(batch_size=size, order=indices, fields=fields, rank=0, world_size=1)
        with dataset.start_epoch(options) as epoch:
            yield from epoch


def tables(
    dataset: Dataset | DatasetView,
    *,
    columns: Sequence[str] | None = None,
    **order: Unpack[TableKeywords],
) -> Iterator[pyarrow.Table]:
    """Read a dataset as tables of about 16 MiB, which are read ahead.

    Args:
        dataset: dataset to read from, or a view.
        columns: names of the columns; by default all.
        order: ``where``, ``shuffle``, ``seed`` and ``epoch``, as for ``Dataset.batches``; all
            samples in storage order by default.

    Raises:
        UsageError: an argument is out of range, there is no such column, or pyarrow is missing.
        DlfsError: a sample cannot be read.
    """
    parts = divide(TableFormat.of(dataset, columns), order_of(tables, order), 1)
    return chain.from_iterable(part.tables() for part in parts)


def divide(table_format: TableFormat, options: EpochOptions, count: int) -> list[Part]:
    """Divide the order of an epoch into parts of equal size, of which none is empty.

    Args:
        table_format: columns of the tables.
        options: order of the epoch, and its samples.
        count: number of parts, >= 1; there are fewer if there are fewer samples.

    Raises:
        UsageError: an option is out of range.
    """
    check_integer(count, 1, None, option="parts", action="divide an epoch")
    order = table_format.dataset.order_epoch(options)
    total = len(order)
    ends = [total * (number + 1) // count for number in range(count)]
    ranges = [
        (first, end - first)
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > first
    ]
    if not options.has_choice:
        return [Part(table_format, options, *one) for one in ranges]
    # A part carries the indices of its own samples, not those of all.
    plain = replace(options, where=None, weights=None, draws=None)
    return [
        Part(table_format, replace(plain, order=order.indices(*one)), 0, one[1]) for one in ranges
    ]


def order_of(function: Callable[..., Any], order: TableKeywords) -> EpochOptions:
    """Return the options of an epoch of which the adapters read parts.

    Args:
        function: class or function that was called.
        order: keywords of the call.

    Raises:
        UsageError: an argument is out of range.
    """
    return make_options(function, TableKeywords, {"shuffle": None, **order}).with_copies()


def nest(values: Any, kind: Any) -> Any:
    """Make an Arrow array of lists of the elements of arrays; one of fixed shape is not copied.

    Args:
        values: ``dtype[n, ...]``, or a list of n arrays.
        kind: nested list type.
    """
    pyarrow = load()
    arrays = values if isinstance(values, list) else [values]
    shapes = [array.shape for array in arrays]
    if not isinstance(values, list):
        shapes = [values.shape[1:]] * len(values)
    levels, inner = [], kind
    while pyarrow.types.is_list(inner) or pyarrow.types.is_fixed_size_list(inner):
        levels.append(inner)
        inner = inner.value_type
    flat = (
        [np.empty(0)]
        if not arrays
        else [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    )
    elements = np.concatenate(flat) if len(flat) != 1 else flat[0]
    made = pyarrow.array(as_native(elements), inner)
    dimensions = np.array(shapes, np.int64).reshape(len(shapes), len(levels))
    for level in reversed(range(len(levels))):
        repeats = np.prod(dimensions[:, :level], axis=1)
        lengths = np.repeat(dimensions[:, level], repeats)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if pyarrow.types.is_list(levels[level]):
            made = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), made)
        else:
            # ``from_arrays`` does not know how many lists of length 0 there are.
            one = pyarrow.list_(made.type, levels[level].list_size)
            made = pyarrow.Array.from_buffers(one, len(lengths), [None], children=[made])
    return made


def as_native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in this machine's byte order; a copy only if it has another."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def load() -> Any:
    """Import pyarrow.

    Raises:
        UsageError: it is not installed.
    """
    return load_package("pyarrow", extra="arrow", what="read tables")
