"""Descriptors and threads of processes, which other threads may close or end at any time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_names(pid: int | str = "self") -> list[str]:
    """Return what the descriptors of a process refer to: a path for each open file, else a name."""
    names = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the listing is
            names.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def count_below(folder: Path) -> int:
    """Return how many descriptors of this process are of the folder or of something below it."""
    return sum(Path(name).is_relative_to(folder) for name in open_names())


def own_threads(pid: int | str = "self") -> list[str]:
    """Return the names of the threads of a process without io_uring's, which the kernel starts."""
    names = []
    for number in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            names.append(Path(f"/proc/{pid}/task/{number}/comm").read_text().strip())
    return [name for name in names if not name.startswith("iou-wrk-")]
