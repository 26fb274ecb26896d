"""What sources of arrays say of their samples, so that they are read as arrays again.

A sample's bytes are an array's elements in row-major order; its type and shape go into the columns
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
    """The attributes of samples that are arrays of one type and shape.

    Args:
        dtype: of the elements: bool, numbers, times, or strings of a fixed length.
        shape: of each array.
        count: of samples.

    Returns:
        For ``SampleBlock.attributes``, or ``DatasetWriter.add_batch``.

    Raises:
        UsageError: there are no such arrays.
    """
    dtype_text, shape_text = ArrayForm.of(dtype, shape).texts
    columns = {}
    for name, text in ((DTYPE_COLUMN, dtype_text), (SHAPE_COLUMN, shape_text)):
        columns[name] = np.empty(count, object)
        columns[name][:] = text
    return columns
