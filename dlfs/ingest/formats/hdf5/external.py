"""Reads the raw data of an HDF5 dataset in external files.

The library looks for such a file in the working directory, and takes zeros for what a short one
lacks. Here the files are those that ``parts`` found in the folder of the HDF5 file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.formats.hdf5.parts import Segment


def read_external(segments: Sequence[Segment], first_byte: int, out: npt.NDArray[Any]) -> None:
    """Read rows of a dataset; elements that no file has wholly keep their values.

    Args:
        segments: parts of the dataset in files.
        first_byte: number of the first byte of the rows in the dataset.
        out: the rows.
    """
    flat = out.reshape(-1)
    filled = flat.copy()
    target = flat.view(np.uint8)
    there = np.zeros(target.size, np.bool_)
    for segment in segments:
        low = max(segment.start, first_byte)
        high = min(segment.start + segment.there_bytes, first_byte + target.size)
        if low >= high or segment.file is None:
            continue
        part = slice(low - first_byte, high - first_byte)
        with open(segment.file, "rb") as file:
            data = os.pread(file.fileno(), high - low, segment.offset + low - segment.start)
        if len(data) != high - low:
            raise EOFError(f"expected {high - low} bytes of {segment.name!r}, got {len(data)}")
        target[part] = np.frombuffer(data, np.uint8)
        there[part] = True
    lacks = ~there.reshape(-1, out.dtype.itemsize).all(axis=1)
    flat[lacks] = filled[lacks]
