"""What a dataset says of its samples beside their bytes: columns of attributes, by index.

Two of these columns say what arrays the samples are, and they can be read as such.

Threads: any at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.arguments import OnError
from dlfs.attributes import AttributeTable
from dlfs.reader.batch import Batch

if TYPE_CHECKING:
    import pyarrow


class ColumnAccess(ABC):
    """The columns of what has an ``AttributeTable``: a base of ``Dataset``."""

    @property
    @abstractmethod
    def attributes(self) -> AttributeTable:
        """The columns as they are stored."""

    @abstractmethod
    def read(self, indices: ArrayLike, *, on_error: OnError = "raise") -> Batch:
        """Read samples as one batch."""

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """The columns of attributes: the dtype that ``column`` gives, by name."""
        return self.attributes.dtypes

    def column(self, name: str, indices: ArrayLike | None = None) -> NDArray[Any]:
        """A column of attributes: a value for each sample.

        Args:
            name: of the column.
            indices: of the samples wanted; all in index order by default.

        Returns:
            ``dtype[n]``, read-only: numbers and bools without a copy when all are wanted; strings
            as an ``object`` array of ``str``.

        Raises:
            NotFoundError: there is no such column.
            UsageError: an index is out of range.
            FormatError: the column is damaged (ChecksumError).
            StaleError: the dataset was removed.
            DeviceError: it cannot be read.
        """
        return self.attributes.column(name, indices)

    def attributes_to_arrow(self) -> pyarrow.Table:
        """All columns as an Arrow table, in index order, without a copy of what is not bool.

        Raises:
            UsageError: pyarrow is not installed.
            DlfsError: as ``column``.
        """
        return self.attributes.to_arrow()

    # ---- arrays ----------------------------------------------------------------------------------

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[True] = True) -> NDArray[Any]: ...

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[False]) -> list[NDArray[Any]]: ...

    def read_arrays(
        self, indices: ArrayLike, *, stack: bool = True
    ) -> NDArray[Any] | list[NDArray[Any]]:
        """Read samples as the arrays that they are; see ``Batch.arrays``.

        Args:
            indices: integers 0..N-1, one dimension.
            stack: into one array: all must be of one type and shape. Else a list.

        Returns:
            ``dtype[n, *shape]``, or with ``stack=False`` a list of read-only views.

        Raises:
            UsageError: a sample is no array, its length is not that of its type and shape, or they
                differ and are to be stacked; the message names it.
            DlfsError: as ``read`` and ``column``.
        """
        batch = self.read(indices)
        return batch.arrays() if stack else batch.arrays(stack=False)

    def array(self, index: int) -> NDArray[Any]:
        """Read one sample as the array that it is, read-only.

        Args:
            index: of the sample; negative ones count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: it is no integer; or as ``read_arrays``.
            DlfsError: as ``read_arrays``.
        """
        return self.read([self._position(index)]).arrays(stack=False)[0]

    @abstractmethod
    def _position(self, index: object) -> int:
        """The index of a sample, 0..N-1, of one that may count from the end."""
