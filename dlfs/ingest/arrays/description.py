"""Records the type and shape of samples that are arrays, so that readers return arrays again.

A sample's bytes are the array's elements in row-major order. Its type and shape go into the columns
``dlfs:dtype`` and ``dlfs:shape``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlfs.reader.arrays import DTYPE_COLUMN, SHAPE_COLUMN, ArrayForm


def array_attributes(
    dtype: DTypeLike, shape: tuple[int, ...], count: int
) -> dict[str, NDArray[Any]]:
    """Return the attributes of samples that are arrays of one type and shape.

    Args:
        dtype: type of the elements: bool, numbers, times, or strings of a fixed length.
        shape: shape of each array.
        count: number of samples.

    Returns:
        Columns for ``SampleBlock.attributes`` or ``DatasetWriter.add_batch``.

    Raises:
        UsageError: no sample can have this type or shape.
    """
    dtype_text, shape_text = ArrayForm.of(dtype, shape).texts
    columns = {}
    for name, text in ((DTYPE_COLUMN, dtype_text), (SHAPE_COLUMN, shape_text)):
        columns[name] = np.empty(count, object)
        columns[name][:] = text
    return columns
