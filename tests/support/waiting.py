"""Waiting until a condition holds, instead of for a time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

SECONDS_MAX = 100


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; fail after a time that no machine needs."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX} s for {what}"
        select.select([], [], [], 0.005)
