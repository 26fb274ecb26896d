"""What a dataset says of its samples beside their bytes: columns of attributes, by index.

Threads: any at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes import AttributeTable

if TYPE_CHECKING:
    import pyarrow


class ColumnAccess(ABC):
    """The columns of what has an ``AttributeTable``: a base of ``Dataset``."""

    @property
    @abstractmethod
    def attributes(self) -> AttributeTable:
        """The columns as they are stored."""

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
