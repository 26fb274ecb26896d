"""The keyed permutation behind every shuffle, computed on NumPy arrays.

A permutation of any size takes constant memory, and the value at each position can be computed by
itself. The same (size, seed, stream) gives the same order in all releases.

Threads: any at once; a permutation never changes.
"""

from __future__ import annotations

import struct
from ctypes import byref
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dlfs._native import abi
from dlfs._native.library import check, library
from dlfs.errors import UsageError

SIZE_MAX = 1 << 62
"""Largest size of a permutation."""

_U64_END = 1 << 64
_PACKING = b"dlfs.packing"
_ARRIVING = b"dlfs.arriving"


class Permutation:
    """A bijection on 0..size-1.

    Args:
        size: 1..2^62.
        seed: 0..2^64-1.
        stream: 0..2^64-1; streams of one seed, such as epochs, are independent of each other.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(self, size: int, seed: int, stream: int = 0) -> None:
        what = f"make a permutation of {size} by seed {seed}, stream {stream}"
        if not (0 < size <= SIZE_MAX and 0 <= seed < _U64_END and 0 <= stream < _U64_END):
            raise UsageError(f"{what}: out of range")
        self._state = abi.Permutation()
        check(library().dlfs_permutation_init(byref(self._state), size, seed, stream), what)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def map(
        self, first: int = 0, count: int | None = None, *, stride: int = 1
    ) -> NDArray[np.uint64]:
        """Compute the images of positions first, first + stride, ...

        Args:
            first: first position.
            count: number of positions; None for all from ``first`` to the end.
            stride: distance from one position to the next, at least 1.

        Returns:
            ``uint64[count]``.

        Raises:
            UsageError: a position is out of range.
        """
        if count is None:
            count = max(0, -(-(self.size - first) // stride)) if stride > 0 else 0
        what = f"permute {count} positions from {first} by {stride} of {self.size}"
        if first < 0 or stride < 1 or count < 0:
            raise UsageError(f"{what}: out of range")
        if count > 0 and first + (count - 1) * stride >= self.size:
            raise UsageError(f"{what}: out of range")
        out = np.empty(count, np.uint64)
        if count > 0:
            code = library().dlfs_permutation_map(
                byref(self._state), first, min(stride, _U64_END - 1), count, out.ctypes.data
            )
            check(code, what)
        return out


def packing_permutation(size: int, seed: int, stage: int = 0) -> Permutation:
    """Return the order in which a writer packs the samples of one stage.

    Seed and stage are hashed to a key of 128 bits, which no epoch has. An epoch with the key of the
    packing order would read the device from begin to end and shuffle nothing, and small numbers
    such as seed 0 and epoch 0 are the defaults of both.

    Args:
        size: number of samples, 1..2^62.
        seed: seed of the writer, 0..2^64-1.
        stage: number of the writer's stage, 0..2^64-1.

    Raises:
        UsageError: the size is out of range.
    """
    key = blake2b(struct.pack("<QQ", seed, stage), digest_size=16, person=_PACKING).digest()
    return Permutation(size, *struct.unpack("<QQ", key))


def arriving_permutation(size: int, seed: int, epoch: int, window: int) -> Permutation:
    """Return the order of the samples of one window of an epoch that an import begins.

    Args:
        size: number of samples, 1..2^62.
        seed: seed of the epoch's order, 0..2^64-1.
        epoch: number of the epoch, 0..2^64-1.
        window: number of the window, 0..2^64-1.

    Raises:
        UsageError: the size is out of range.
    """
    numbers = struct.pack("<QQQ", seed, epoch, window)
    key = blake2b(numbers, digest_size=16, person=_ARRIVING).digest()
    return Permutation(size, *struct.unpack("<QQ", key))
