"""Descriptors of this process. Those of objects of other tests may be closed at any time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def count_below(folder: Path) -> int:
    """Return how many descriptors of this process are of the folder or of something below it."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the listing is
            count += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return count
