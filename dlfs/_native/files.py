"""Reads many files, or many ranges of open files, at once into one buffer.

The caller describes a batch as an array of ``FILE_DTYPE``: the files, the ranges of the buffer for
them, and their expected lengths. One call reads all of them with several threads, without the GIL,
and sets the code of each file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlfs._native import abi
from dlfs._native.library import check, library
from dlfs.errors import UsageError

THREADS_MAX = abi.FILES_THREADS_MAX
CUT_SHORT = abi.E_TRUNCATED
"""Code of a range that ends after the end of its file."""

FILE_DTYPE = np.dtype(abi.File)
"""The structure ``dlfs_file``; dlfs/import.h describes its fields."""


def read_files(
    directory: int,
    paths: npt.NDArray[np.uint8],
    files: npt.NDArray[np.void],
    buffer: npt.NDArray[np.uint8],
    *,
    follow_links: bool,
    threads: int,
) -> int:
    """Read whole files, each of which must be as long and as old as expected.

    Args:
        directory: the descriptor that the paths are relative to.
        paths: ``uint8[n_bytes]``, NUL-terminated paths, each at its ``files["position"]``.
        files: ``FILE_DTYPE[n_files]``; ``code`` is written.
        buffer: ``uint8[n_bytes]``, which gets the files' bytes.
        follow_links: whether a path may end in a symbolic link.
        threads: 1 to ``THREADS_MAX``.

    Returns:
        How many files failed; their ``code`` is not 0. ``-ESTALE`` marks a file that changed.

    Raises:
        UsageError: an array is not of its type, a place lies outside the buffer, a path is not
            terminated, or the number of threads is out of range.

    Threads: any, each with its own arrays. Blocks without the GIL.
    """
    _check_arrays(files, buffer)
    _check_bytes(paths, "paths")
    code = library().dlfs_files_read(
        directory,
        paths.ctypes.data,
        paths.nbytes,
        files.ctypes.data,
        len(files),
        buffer.ctypes.data,
        buffer.nbytes,
        0 if follow_links else abi.FILES_NOFOLLOW,
        threads,
    )
    return check(code, f"read {len(files)} files")


def stat_files(
    directory: int,
    paths: npt.NDArray[np.uint8],
    files: npt.NDArray[np.void],
    *,
    follow_links: bool,
    threads: int,
) -> int:
    """Fill in the present lengths and times of files, for a later ``read_files``.

    Args:
        directory: the descriptor that the paths are relative to.
        paths: ``uint8[n_bytes]``, NUL-terminated paths, each at its ``files["position"]``.
        files: ``FILE_DTYPE[n_files]``; ``length_bytes``, ``modified_ns`` and ``code`` are written.
        follow_links: whether a path may end in a symbolic link.
        threads: 1 to ``THREADS_MAX``.

    Returns:
        How many files failed: ``-EACCES`` marks one that may not be read, ``-ESTALE`` one that is
        not a regular file.

    Raises:
        UsageError: as for ``read_files``.

    Threads: any, each with its own arrays. Blocks without the GIL.
    """
    _check_files(files)
    _check_bytes(paths, "paths")
    code = library().dlfs_files_stat(
        directory,
        paths.ctypes.data,
        paths.nbytes,
        files.ctypes.data,
        len(files),
        0 if follow_links else abi.FILES_NOFOLLOW,
        threads,
    )
    return check(code, f"look at {len(files)} files")


def read_ranges(
    ranges: npt.NDArray[np.void], buffer: npt.NDArray[np.uint8], *, threads: int
) -> int:
    """Read ranges of open files; ``position`` is an offset in ``descriptor``.

    Args:
        ranges: ``FILE_DTYPE[n_ranges]``; ``code`` is written.
        buffer: ``uint8[n_bytes]``, which gets the ranges' bytes.
        threads: 1 to ``THREADS_MAX``.

    Returns:
        How many ranges failed; their ``code`` is not 0.

    Raises:
        UsageError: as for ``read_files``.

    Threads: any, each with its own arrays. Blocks without the GIL.
    """
    _check_arrays(ranges, buffer)
    code = library().dlfs_ranges_read(
        ranges.ctypes.data, len(ranges), buffer.ctypes.data, buffer.nbytes, threads
    )
    return check(code, f"read {len(ranges)} ranges")


def _check_arrays(files: npt.NDArray[np.void], buffer: npt.NDArray[np.uint8]) -> None:
    _check_files(files)
    _check_bytes(buffer, "buffer")
    if not buffer.flags.writeable:
        raise UsageError("read files: expected a writable buffer, got a read-only one")


def _check_files(files: npt.NDArray[np.void]) -> None:
    if files.dtype != FILE_DTYPE or files.ndim != 1 or not files.flags.carray:
        raise UsageError(
            f"read files: expected a contiguous array of FILE_DTYPE, got {files.dtype}"
        )


def _check_bytes(array: npt.NDArray[np.uint8], name: str) -> None:
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise UsageError(f"read files: expected {name} as contiguous uint8, got {array.dtype}")
