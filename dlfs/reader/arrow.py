"""Makes an Arrow array of a batch without copying its samples.

Samples lie in a batch in the order of the device, with gaps between them. The Arrow type for that
is the binary view: an array of 16-byte views, each with the length, the first four bytes and the
location of one sample. A location is the number of a data buffer and an offset of 31 bits in it.
The buffers are windows of 1 GiB of the batch's memory. Samples of up to 12 bytes are copied into
their views, as the type requires.

Source: Arrow Columnar Format 1.4, "Variable-size Binary View Layout".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.base.extras import load_package
from dlfs.errors import LimitError

if TYPE_CHECKING:
    import pyarrow

VIEW = np.dtype(
    [("length", "<i4"), ("prefix", "u1", 4), ("buffer", "<i4"), ("offset", "<i4")], align=True
)
INLINE_BYTES_MAX = 12
WINDOW_BYTES = 1 << 30
LENGTH_BYTES_MAX = (1 << 31) - 1


def binary_views(
    memory: memoryview, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> pyarrow.Array[Any]:
    """Make an Arrow array of samples that stay in their memory.

    Args:
        memory: memory of the samples; the array keeps it alive.
        offsets: offset of each sample in the memory, ``int64[n]``.
        lengths: length of each sample in bytes, ``int64[n]``; negative for null.

    Returns:
        ``binary_view[n]``.

    Raises:
        UsageError: pyarrow is not installed.
        LimitError: a sample is longer than 2 GiB - 1.
    """
    pyarrow = load_package("pyarrow", extra="arrow", what="make an Arrow array")
    longest = int(lengths.max(initial=0))
    if longest > LENGTH_BYTES_MAX:
        raise LimitError(
            f"make an Arrow array: expected samples of at most {LENGTH_BYTES_MAX} bytes, "
            f"got one of {longest}"
        )
    whole = pyarrow.py_buffer(memory)
    windows = [whole.slice(first) for first in range(0, max(1, len(memory)), WINDOW_BYTES)]
    views = pyarrow.py_buffer(_views(memory, offsets, lengths))
    valid = lengths >= 0
    bitmap = None if valid.all() else pyarrow.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pyarrow.binary_view()
    return pyarrow.Array.from_buffers(kind, len(lengths), [bitmap, views, *windows])


def _views(
    memory: memoryview, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Return the views of some samples, ``VIEW[n]``."""
    views = np.zeros(len(lengths), VIEW)
    views["length"] = np.maximum(lengths, 0)
    far = lengths > INLINE_BYTES_MAX
    views["buffer"][far] = offsets[far] // WINDOW_BYTES
    views["offset"][far] = offsets[far] % WINDOW_BYTES
    data = np.frombuffer(memory, np.uint8)
    raw = views.view(np.uint8).reshape(len(views), VIEW.itemsize)
    starts = offsets[far, None] + np.arange(4)
    raw[far, 4:8] = data[starts]
    for row in np.flatnonzero((lengths > 0) & ~far).tolist():
        first, count = int(offsets[row]), int(lengths[row])
        raw[row, 4 : 4 + count] = data[first : first + count]
    return views
