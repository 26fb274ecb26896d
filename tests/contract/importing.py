"""Records that the tests of imported fields write."""

from __future__ import annotations

import struct

from dlfs.ingest.formats.tfrecord.source import masked_crc32c


def frame(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]
