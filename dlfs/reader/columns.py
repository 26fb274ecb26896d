"""Access to the columns of a dataset: attributes of its samples, by index.

The columns ``dlfs:dtype`` and ``dlfs:shape`` describe samples that are arrays, which can be read as
such. ``dlfs:fields`` and the columns of each field describe samples with fields.

Threads: any at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes import AttributeTable
from dlfs.base.arguments import OnError
from dlfs.directory import check_indices
from dlfs.fields import find_fields, measure_field
from dlfs.fields.batch_fields import name_types, pick_fields
from dlfs.reader.batch import Batch
from dlfs.reader.following import follow

if TYPE_CHECKING:
    import pyarrow


class ColumnAccess(ABC):
    """Base class of ``Dataset`` with the methods for columns, fields and arrays."""

    name: str
    """Name of the dataset."""

    @property
    @abstractmethod
    def attributes(self) -> AttributeTable:
        """Columns of attributes as stored."""

    @abstractmethod
    def read(
        self,
        indices: ArrayLike,
        *,
        on_error: OnError = "raise",
        fields: Sequence[str] | None = None,
    ) -> Batch:
        """Read samples as one batch."""

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: thumbnails of some samples, and the columns."""
        from dlfs.notebook import show_dataset

        return show_dataset(self, lambda: self.attributes)

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column of attributes, by name, as ``column`` returns it."""
        return self.attributes.dtypes

    def column(self, name: str, indices: ArrayLike | None = None) -> NDArray[Any]:
        """Return a column of attributes: one value for each sample.

        Args:
            name: name of the column.
            indices: indices of the samples; by default all in index order.

        Returns:
            ``dtype[n]``, read-only. A whole column of numbers or bools is not copied. Strings are
            an ``object`` array of ``str``.

        Raises:
            NotFoundError: there is no such column.
            UsageError: an index is out of range.
            FormatError: the column is damaged (ChecksumError).
            StaleError: the dataset was removed.
            DeviceError: it cannot be read.
        """
        return follow(lambda: self.attributes, lambda table: table.column(name, indices))

    def attributes_to_arrow(self) -> pyarrow.Table:
        """Return all columns as an Arrow table, in index order; only bools are copied.

        Raises:
            UsageError: pyarrow is not installed.
            DlfsError: as ``column``.
        """
        return follow(lambda: self.attributes, lambda table: table.to_arrow())

    # ---- fields ----------------------------------------------------------------------------------

    @property
    def fields(self) -> dict[str, str]:
        """Type of each field of the samples by name, as ``Volume.writer`` takes them; or empty.

        All samples have the same fields. A batch checks this for its samples.

        Raises:
            FormatError: the column of the fields is malformed.
            DlfsError: as ``column``.
        """
        none = np.empty(0, np.uint64)
        found = follow(lambda: self.attributes, lambda table: find_fields(table, none, self.name))
        return name_types(found)

    def field_lengths(self, name: str, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the length of a field of some samples in bytes, ``int64[n_samples]``.

        Raises:
            UsageError: there is no such field, or an index is out of range.
            FormatError: the columns of the fields are malformed.
            DlfsError: as ``column``.
        """

        def measure(table: AttributeTable) -> NDArray[np.int64]:
            fields = find_fields(table, np.empty(0, np.uint64), self.name)
            pick_fields(fields, (name,), self.name)
            action = f"read fields of dataset {self.name!r}"
            chosen = check_indices(indices, len(table), option="indices", action=action)
            return measure_field(table, name, fields[name], chosen, self.name)[0]

        return follow(lambda: self.attributes, measure)

    def sample(self, index: int) -> dict[str, Any]:
        """Read the fields of one sample: ``memoryview``, ``str`` or read-only array by name.

        Args:
            index: index of the sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer, or the samples have no fields.
            FormatError: the columns of the fields, or a text, are malformed.
            DlfsError: as ``read`` and ``column``.
        """
        return self.read([self._position(index)]).sample(0)

    # ---- arrays ----------------------------------------------------------------------------------

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[True] = True) -> NDArray[Any]: ...

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[False]) -> list[NDArray[Any]]: ...

    def read_arrays(
        self, indices: ArrayLike, *, stack: bool = True
    ) -> NDArray[Any] | list[NDArray[Any]]:
        """Read samples as the arrays that they contain; see ``Batch.arrays``.

        Args:
            indices: integers 0..N-1, one dimension.
            stack: True to copy them to one array, which requires one dtype and shape; False for a
                list.

        Returns:
            ``dtype[n, *shape]``, or with ``stack=False`` a list of read-only views.

        Raises:
            UsageError: a sample is no array or has a wrong length, or the forms differ and are to
                be stacked; the message names the sample.
            DlfsError: as ``read`` and ``column``.
        """
        batch = self.read(indices)
        return batch.arrays() if stack else batch.arrays(stack=False)

    def array(self, index: int) -> NDArray[Any]:
        """Read one sample as the array that it contains, read-only.

        Args:
            index: index of the sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer; or as ``read_arrays``.
            DlfsError: as ``read_arrays``.
        """
        return self.read([self._position(index)]).arrays(stack=False)[0]

    @abstractmethod
    def _position(self, index: object) -> int:
        """Return the index 0..N-1 for an index that may count from the end."""
