"""What adapters of other projects' packages share: their import, and the sizes they agree on."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bench.machine import Unavailable
from dlfs.units import MIB

SHARD_BYTES = 64 * MIB
"""Of one shard, file or chunk, where the format has such: the default of MDS and of LitData."""

SLOWLY_WRITTEN_MAX = 50_000
"""Samples for formats whose writers take a tenth of a millisecond and more for each."""

WRITE_BYTES = 16 * MIB
"""Of samples that a converter holds at a time."""


def needed(module: str, distribution: str = "") -> Any:
    """Import a package that an adapter needs.

    Args:
        module: its name in an import.
        distribution: its name for pip, where that is another one.

    Raises:
        Unavailable: it is not installed, or does not import; says why.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = distribution or module.partition(".")[0]
        raise Unavailable(f"{name}: {error}: make bench installs it") from error


def workers() -> int:
    """Worker processes of a data loader: one a core, as PyTorch itself suggests."""
    return len(os.sched_getaffinity(0))
