"""The digests of a dataset version, by which copies of it are known (FORMAT.md, section 4.5).

The **content digest** covers what a reader gets of the samples by index: paths, lengths, CRC32Cs,
directories without samples, and attributes. It does not depend on the volume. The **packing
digest** covers how the samples are packed, as far as the order of an epoch depends on it: the
storage order, and the chunk that each sample starts in.

Both are made of the encoded segments, when a version is sealed and when it is verified. Bytes of
samples count by their CRC32Cs, so the digests find other data and damage, but not an attacker.

Memory: blocks of ``BLOCK_SAMPLES``. Time: 26 ns a sample with a path of 28 bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlfs.format.attributes import AttributeHead
from dlfs.format.constants import LOCATION_BYTES

DIGEST_BYTES = 16
BLOCK_SAMPLES = 1 << 16
"""Samples that are hashed at a time; the content digest depends on it."""
_ADDRESS_BITS = 56
_COUNTS = struct.Struct("<QQQ")
_INDEX_BYTES_AT, _NAMES_BYTES_AT, _CHUNK_BYTES_AT = 56, 72, 172
_SAMPLES_AT, _DATA_BYTES_AT, _LOCATIONS_AT, _ORDER_AT, _EMPTY_AT = 32, 40, 112, 120, 192


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a version, or of a view of several, in hexadecimal.

    Attributes:
        content: digest of paths, lengths, CRC32Cs, directories without samples, and attributes.
        packing: digest of the storage order and of the chunk of each sample.
    """

    content: str = bytes(DIGEST_BYTES).hex()
    packing: str = bytes(DIGEST_BYTES).hex()

    @classmethod
    def combine(cls, parts: Sequence[Digests], description: str) -> Digests:
        """Return the digests of what is made of several versions, or of one.

        Args:
            parts: digests of the versions.
            description: what is made of them.
        """
        return cls(
            _digest(f"{[part.content for part in parts]} {description}".encode()),
            _digest(f"{[part.packing for part in parts]}".encode()),
        )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def make_digests(
    entries: NDArray[np.uint8], names: NDArray[np.uint8], head: AttributeHead | None
) -> Digests:
    """Return the digests of a version.

    Args:
        entries: entries part of the directory segment, which is well-formed.
        names: names part of the directory segment.
        head: head of the attribute segment; None without one.
    """
    count, empty_count = _number(entries, _SAMPLES_AT), _number(entries, _EMPTY_AT)
    chunk_bytes = _number(entries, _CHUNK_BYTES_AT, "<I")
    chunk_count = _number(entries, _DATA_BYTES_AT) // chunk_bytes
    columns = () if head is None else head.columns
    content = hashlib.blake2b(digest_size=DIGEST_BYTES)
    content.update(_COUNTS.pack(count, empty_count, len(columns)))
    content.update(names[: _number(entries, _NAMES_BYTES_AT)].data)
    packing = hashlib.blake2b(digest_size=DIGEST_BYTES)
    packing.update(_COUNTS.pack(count, chunk_count, 0))
    start = _number(entries, _LOCATIONS_AT)
    locations = entries[start : start + LOCATION_BYTES * count].view("<u8").reshape(count, 2)
    address_mask = np.uint64((1 << _ADDRESS_BITS) - 1)
    for first in range(0, count, BLOCK_SAMPLES):
        sums_and_lengths, places = locations[first : first + BLOCK_SAMPLES].T
        content.update(np.ascontiguousarray(sums_and_lengths).data)
        content.update((places >> np.uint64(_ADDRESS_BITS)).astype(np.uint8).data)
        packing.update(((places & address_mask) // np.uint64(chunk_bytes)).data)
    start = _number(entries, _ORDER_AT)
    index_bytes = _number(entries, _INDEX_BYTES_AT, "<I")
    packing.update(entries[start : start + index_bytes * count].data)
    if head is not None:
        for _, described in sorted(head.described()):
            content.update(described)
    return Digests(content.hexdigest(), packing.hexdigest())


def _number(entries: NDArray[np.uint8], offset: int, form: str = "<Q") -> int:
    (number,) = struct.unpack_from(form, entries.data, offset)
    return int(number)
