"""Makes Blosc refuse chunks that are shorter than their header says.

The package numcodecs decompresses such a chunk, also one in a shard, into what lies behind it in
memory. Source: the header of a chunk in the Blosc format; bytes 12..15 are the chunk's size.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

_HEADER_BYTES = 16


@functools.cache
def check_sizes() -> None:
    """Let ``numcodecs.Blosc`` compare the size of each chunk with the chunk's header.

    Blosc of every version of Zarr's codecs, and of shards, ends in this class.
    """
    blosc: Any = importlib.import_module("numcodecs.blosc")
    decode = blosc.Blosc.decode

    def checked(codec: Any, buf: Any, out: Any = None) -> Any:
        data = np.frombuffer(buf, np.uint8)
        size = int.from_bytes(data[12:_HEADER_BYTES].tobytes(), "little")
        if len(data) < _HEADER_BYTES or len(data) < size:
            raise EOFError(f"{len(data)} bytes of a chunk that is {size} bytes of Blosc's")
        return decode(codec, buf, out)

    blosc.Blosc.decode = checked
