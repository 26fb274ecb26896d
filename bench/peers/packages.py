"""Shared code of the adapters of other projects' packages: their import, and common sizes."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bench.errors import Unavailable
from dlfs.base.units import MIB

INDEX, DATA = "index", "data"
"""Names of the fields of a sample, where the format names them."""

SHARD_BYTES = 64 * MIB
"""Size of a shard, file or chunk, where the format has such: the default of MDS and LitData."""

SLOWLY_WRITTEN_MAX = 50_000
"""Most samples for formats whose writers take 0.1 ms or more for each."""


def needed(module: str, distribution: str = "") -> Any:
    """Import a module that an adapter needs, of a distribution with that name or another one."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = distribution or module.partition(".")[0]
        raise Unavailable(f"{name}: {error}: make bench installs it") from error


def workers() -> int:
    """Return the number of worker processes of a data loader: one a core, as PyTorch suggests."""
    return len(os.sched_getaffinity(0))


def collate(samples: list[dict[str, Any]]) -> tuple[list[int], list[bytes]]:
    """Return the indices and the bytes of a batch of samples that have named fields."""
    return [int(sample[INDEX]) for sample in samples], [sample[DATA] for sample in samples]
