"""The processors that this process may use: those of its affinity, or fewer by a control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dlfs.base.control_groups import PROC, find_groups


def allowed_processors(proc: Path = PROC, root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use, >= 1.

    A share of a processor that a control group allows besides counts as one.

    Args:
        proc: directory of the process in /proc.
        root: directory below which the control groups are mounted.
    """
    shares = [len(os.sched_getaffinity(0)), *_find_shares(proc, root)]
    return max(1, int(-(-min(shares) // 1)))


def _find_shares(proc: Path, root: Path) -> Iterator[float]:
    """Yield the processors that the process's control groups allow, by their quotas."""
    for group in find_groups("cpu", proc, root):
        with suppress(OSError, ValueError):  # "max", or a group of the other version
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with suppress(OSError, ValueError):
            quota_us = int((group / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:  # -1: no limit
                yield quota_us / int((group / "cpu.cfs_period_us").read_text())
