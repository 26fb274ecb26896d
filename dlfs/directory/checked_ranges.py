"""The ranges of a data space that one checksum each covers, for verification and repair.

A sample of at most a chunk is one range. A larger one is a range in each of its chunks: its parts.
So every range lies in one chunk, and a pass over the space needs no memory for whole samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.directory.frozen import FrozenDirectory
from dlfs.format.location import pack_locations, unpack_locations


@dataclass(frozen=True, slots=True)
class CheckedRanges:
    """Ranges of a data space in rising order of addresses; those without bytes are left out.

    Attributes:
        locations: address, length and CRC32C of each range, ``LOCATION[n]``.
        addresses: address of each range, ``int64[n]``.
        lengths: length of each range in bytes, ``int64[n]``.
        crcs: CRC32C of each range, ``uint32[n]``.
        samples: index of the sample that each range is of, ``int64[n]``.
    """

    locations: NDArray[Any]
    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    samples: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.samples)


def checked_ranges(
    directory: FrozenDirectory, *, start: int = 0, end: int | None = None
) -> CheckedRanges:
    """List the checked ranges of the samples that lie in a part of the data space.

    Args:
        directory: sample directory of the dataset.
        start: samples that begin before this address are left out.
        end: samples that end after this address are left out; None: the end of the data space.
    """
    order = directory.order().astype(np.int64)
    addresses, lengths, crcs = unpack_locations(directory.locations[order])
    starts, sizes = addresses.astype(np.int64), lengths.astype(np.int64)
    last = directory.data_bytes if end is None else end
    inside = (sizes > 0) & (starts >= start) & (starts + sizes <= last)
    samples, starts, sizes, crcs = order[inside], starts[inside], sizes[inside], crcs[inside]
    counts = -(-sizes // directory.chunk_bytes)
    if np.any(counts > 1):
        samples, starts, sizes, crcs = _split(directory, samples, starts, sizes, crcs, counts)
    return CheckedRanges(pack_locations(starts, sizes, crcs), starts, sizes, crcs, samples)


def _split(
    directory: FrozenDirectory,
    samples: NDArray[np.int64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    crcs: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """Split samples, of which some are larger than a chunk, into ``counts`` parts each."""
    chunk_bytes = directory.chunk_bytes
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(row)) - first[row]) * chunk_bytes
    addresses = starts[row] + offsets
    lengths = np.minimum(sizes[row] - offsets, chunk_bytes)
    large = counts[row] > 1
    found = crcs[row]
    found[large] = directory.parts[addresses[large] // chunk_bytes]
    return samples[row], addresses, lengths, found
