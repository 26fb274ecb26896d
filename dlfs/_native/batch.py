"""Batches of samples that libdlfs read, as Python objects.

A ``NativeBatch`` pins the memory of its samples. Every view into that memory keeps the batch alive,
so the samples stay in place until the last view is gone.

Source: ``dlfs/reader.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_uint8, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.handle import owner_type, untrack
from dlfs._native.library import check, library


@dataclass(frozen=True, slots=True)
class NativeFailure:
    """A ``dlfs_failure``: why a sample of a batch could not be read."""

    position: int
    index: int
    code: int
    member: int
    offset_bytes: int
    crc_expected: int
    crc_got: int
    part_offset_bytes: int
    part_length_bytes: int


@functools.cache
def _owner_type() -> Callable[[], c_void_p]:
    return owner_type(library().dlfs_batch_release)


def batch_owner() -> c_void_p:
    """Return an empty owner for a ``dlfs_batch``."""
    owner = _owner_type()()
    untrack(owner)
    return owner


class NativeBatch:
    """A ``dlfs_batch``, released when the last view of its memory is gone.

    Attributes:
        memory: ctypes array over the whole memory of the batch, which it keeps pinned.
        offsets: ``int64[n]``, offset of each sample in the memory, in bytes.
        lengths: ``int64[n]``, length of each sample in bytes; -1 for samples that failed.
        indices: ``uint64[n]``, index of each sample in the dataset.
        failures: the samples that failed, and why.
        lost_members: members that were lost when the batch was read, as bits.

    Threads: any.
    """

    def __init__(self, owner: c_void_p) -> None:
        self._owner = owner
        batch = abi.Batch.from_address(owner.value or 0)
        count = batch.count
        self.memory = (c_uint8 * batch.base_bytes).from_address(batch.base or 0)
        # A ctypes array over foreign memory owns nothing: the attribute keeps the batch alive.
        self.memory.owner = owner
        # The arrays follow one another in memory: one copy takes all of them.
        arrays = bytearray((c_uint8 * (3 * 8 * count)).from_address(batch.offsets))
        self.offsets = np.frombuffer(arrays, np.int64, count)
        self.lengths = np.frombuffer(arrays, np.int64, count, 8 * count)
        self.indices = np.frombuffer(arrays, np.uint64, count, 16 * count)
        self.failures = _failures(batch) if batch.failure_count else ()
        self.lost_members = batch.lost_members

    def gather(self, destination: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint64]) -> None:
        """Copy every sample that did not fail to its offset in ``destination``.

        Raises:
            LimitError: a sample would not fit.
        """
        code = library().dlfs_batch_gather(
            self._owner, destination.ctypes.data, destination.nbytes, offsets.ctypes.data
        )
        check(code, f"gather a batch into {destination.nbytes} bytes")


def failure_of(failure: abi.Failure) -> NativeFailure:
    """Convert a ``dlfs_failure``."""
    return NativeFailure(*(getattr(failure, name) for name, *_ in abi.Failure._fields_))


def _failures(batch: abi.Batch) -> tuple[NativeFailure, ...]:
    return tuple(failure_of(failure) for failure in batch.failures[: batch.failure_count])
