"""Undoes a filter of a plug-in, such as Zstandard, and gives what it made of a chunk.

The library gives this to the next filter, but does not compare its size with the chunk's. So a
dataset in a file in memory has the filter, and one before it that copies its input.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from dlfs._native.filter_probe import FILTER, FilterProbe, filter_probe
from dlfs.ingest.formats.hdf5.streams import BITSHUFFLE

if TYPE_CHECKING:
    import h5py


_BITSHUFFLE_OWN = 3
"""Values that bitshuffle puts before those of the caller when a dataset is made."""

MORE_BYTES = 1 << 16
"""Bytes by which other filters may lengthen a chunk, beside its size."""


class Plugin:
    """One filter of one dataset.

    Args:
        dataset: the dataset.
        number: number of the filter in the order of writing.
        item_bytes: size of an element in the file, in bytes.
    """

    def __init__(self, dataset: h5py.Dataset, number: int, item_bytes: int) -> None:
        import h5py

        self._probe = _registered_probe()
        code, flags, values, name = dataset.id.get_create_plist().get_filter(number)
        self._name = f"{code} ({name.decode(errors='replace')})"
        self._origin = (0,) * len(dataset.chunks)
        self._room = np.empty(math.prod(dataset.chunks) * item_bytes, np.uint8)
        self._kind = dataset.id.get_type()
        if dataset.dtype.hasobject:  # the elements are references, which would be followed
            self._kind = h5py.h5t.create(h5py.h5t.OPAQUE, item_bytes)
        self._file = h5py.File("chunk", "w", driver="core", backing_store=False)
        try:
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plan.set_chunk(dataset.chunks)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            plan.set_filter(FILTER, 0)
            plan.set_filter(code, flags, values[_BITSHUFFLE_OWN if code == BITSHUFFLE else 0 :])
            space = h5py.h5s.create_simple(dataset.chunks)
            self._chunk = h5py.h5d.create(self._file.id, b"x", self._kind, space, plan)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the dataset in memory."""
        del self._chunk
        self._file.close()

    def undo(self, data: bytes) -> bytes:
        """Return what the filter makes of the stored bytes of a chunk.

        Raises:
            ValueError: the filter fails, or gives a size that is none.
        """
        import h5py

        self._probe.reset()
        self._probe.size_max = 2 * len(self._room) + MORE_BYTES
        reason = ""
        self._chunk.write_direct_chunk(self._origin, data)
        try:
            self._chunk.read(h5py.h5s.ALL, h5py.h5s.ALL, self._room, self._kind)
        except OSError as error:  # always: the probe fails
            reason = " ".join(str(error).split())
        probe = self._probe
        if len(probe.data) == probe.size_bytes:
            return probe.data
        if probe.size_bytes >= 0:
            reason = f"it says that the chunk has {probe.size_bytes} bytes"
        raise ValueError(f"the HDF5 filter {self._name} failed: {reason}")


@functools.cache
def _registered_probe() -> FilterProbe:
    import h5py

    probe = filter_probe()
    h5py.h5z.register_filter(probe.address)
    return probe
