"""The memory that this process may use: the machine's, or less in a control group (v1 or v2).

Defaults of memory for samples are shares of it, so that they do not have a process killed in a
container whose limit is far below the machine's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from dlfs.base.control_groups import PROC, find_groups
from dlfs.base.units import GIB, format_bytes, parse_bytes
from dlfs.errors import UsageError

VOLUME_SHARE = 8
"""Divisor of the allowed memory for one volume in one process: a machine has several ranks."""
VOLUME_BYTES_MAX = GIB
"""Memory for samples by default where there is no lower limit, in bytes."""

SERVICE_SHARE = 4
"""Divisor of the allowed memory for all datasets of a service, which has nothing else."""
SERVICE_BYTES_MAX = 4 * GIB
"""Memory for samples of a service by default where there is no lower limit, in bytes."""

_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")


MEMORY_VARIABLE = "DLFS_MEMORY"
"""Environment variable with the memory for samples of a volume."""


@cache
def allowed_memory() -> tuple[int, str]:
    """Return the memory that this process may use, in bytes, and what limits it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [(limit, f"the limit of a control group, {path}") for limit, path in find_limits(PROC)]
    return min([(machine, "the machine's memory"), *found])


def allowed_bytes() -> int:
    """Return the memory that this process may use, in bytes, as of the first call."""
    return allowed_memory()[0]


def default_memory_bytes() -> int:
    """Return the memory for samples of a volume if none is given: a share of what is allowed."""
    return min(VOLUME_BYTES_MAX, allowed_bytes() // VOLUME_SHARE)


def opened_memory_bytes() -> int:
    """Return the memory for samples of a volume that a program opens: DLFS_MEMORY, or the default.

    Raises:
        UsageError: the variable is no size.
    """
    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return default_memory_bytes()
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"read the environment variable {MEMORY_VARIABLE}: {error}") from error


def default_service_bytes() -> int:
    """Return the memory for samples of a service if none is given: a share of what is allowed."""
    return min(SERVICE_BYTES_MAX, allowed_bytes() // SERVICE_SHARE)


def describe_memory(size_bytes: int) -> str:
    """Describe the memory for samples of a volume; the default with the limit that it is of."""
    return _describe(size_bytes, default_memory_bytes(), VOLUME_SHARE, VOLUME_BYTES_MAX)


def describe_service_memory(size_bytes: int) -> str:
    """Describe the memory for samples of a service; the default with the limit that it is of."""
    return _describe(size_bytes, default_service_bytes(), SERVICE_SHARE, SERVICE_BYTES_MAX)


def _describe(size_bytes: int, default_bytes: int, share: int, bytes_max: int) -> str:
    if size_bytes != default_bytes:
        return format_bytes(size_bytes)
    allowed, limit = allowed_memory()
    return (
        f"{format_bytes(size_bytes)}, by default 1/{share} of {format_bytes(allowed)} ({limit}), "
        f"at most {format_bytes(bytes_max)}"
    )


def find_limits(proc: Path, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the limits of a process's control groups and of those above them, in bytes.

    Args:
        proc: directory of the process in /proc.
        root: directory below which the control groups are mounted.
    """
    for directory in find_groups("memory", proc, root):
        for name in _FILES:
            with suppress(OSError, ValueError):  # "max", or a file of the other version
                path = directory / name
                yield int(path.read_text()), path
