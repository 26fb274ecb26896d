"""Reads ranges of many files, such as the members of plain archives, into one buffer.

Several threads in libdlfs read the ranges in their order on disk. Only some of the files are open
at a time. The reader compares each file with the state that the caller saw first, so that a file
which changes during the import is an error.

Threads: one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlfs._native.files import CUT_SHORT, FILE_DTYPE, read_ranges
from dlfs._native.handle import Descriptor
from dlfs._native.library import describe
from dlfs.errors import DeviceError, DlfsError, TruncatedError
from dlfs.ingest.source import (
    THREADS,
    Bytes,
    Int64Array,
    Uint64Array,
    check_unchanged,
    device_errors,
)

_OPEN_MAX = 256
"""Most files open at once; by default a process may open 1024."""


class RangeReader:
    """Reads ranges of some files.

    Args:
        files: paths of the files.

    Attributes:
        states: state of each file, from ``file_state``; the caller adds them.
        sizes: ``uint64[n_samples]``, bytes that each sample takes in a buffer; of the caller.
    """

    sizes: Uint64Array

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self.states: list[tuple[int, int]] = []

    def read_ranges(self, places: Int64Array, buffer: Bytes) -> list[tuple[int, int, DlfsError]]:
        """Read ranges into a buffer.

        Args:
            places: ``int64[4, n]``: number of the file of each range, its position in the file, its
                length, and its offset in the buffer, in bytes.
            buffer: ``uint8[n_bytes]``.

        Returns:
            The ranges that cannot be read: number of the file, offset in the buffer, and the error,
            TruncatedError if the file has become shorter, else DeviceError.

        Raises:
            DeviceError: a file cannot be opened.
        """
        places = places[:, np.lexsort((places[1], places[0]))]
        numbers = places[0]
        ranges = np.zeros(len(numbers), FILE_DTYPE)
        ranges["position"], ranges["length_bytes"], ranges["buffer_offset"] = places[1:]
        used = np.unique(numbers)
        failed: list[tuple[int, int, DlfsError]] = []
        for first in range(0, len(used), _OPEN_MAX):
            group = used[first : first + _OPEN_MAX]
            begin = int(np.searchsorted(numbers, group[0]))
            end = int(np.searchsorted(numbers, group[-1], side="right"))
            failed += self._read_group(group, numbers[begin:end], ranges[begin:end], buffer)
        return failed

    def check_unchanged(self) -> None:
        """Raise DeviceError if a file has changed since its first state."""
        for path, state in zip(self._files, self.states, strict=True):
            with device_errors(f"import {path}"):
                check_unchanged(f"import {path}", path, state)

    def _read_group(
        self, group: Int64Array, numbers: Int64Array, ranges: npt.NDArray[np.void], buffer: Bytes
    ) -> list[tuple[int, int, DlfsError]]:
        files: list[Descriptor] = []
        try:
            for number in group.tolist():
                with device_errors(f"import {self._files[number]}"):
                    files.append(Descriptor())
                    files[-1].fill(os.open, self._files[number], os.O_RDONLY | os.O_CLOEXEC)
            opened = np.array([file.value for file in files], np.int32)
            ranges["descriptor"] = opened[np.searchsorted(group, numbers)]
            if not read_ranges(ranges, buffer, threads=THREADS):
                return []
            return [
                (
                    int(numbers[i]),
                    int(ranges[i]["buffer_offset"]),
                    self._failure(numbers[i], ranges[i]),
                )
                for i in np.flatnonzero(ranges["code"]).tolist()
            ]
        finally:
            for file in files:
                file.close()

    def _failure(self, number: int, failed: np.void) -> DlfsError:
        code, position = int(failed["code"]), int(failed["position"])
        what = f"import {self._files[number]}: read {failed['length_bytes']} bytes at {position}"
        if code == CUT_SHORT:
            return TruncatedError(f"{what}: the file has become shorter")
        return DeviceError(f"{what}: {describe(code)}", -code)
