"""Waiting until a condition holds, instead of for a time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from dlfs._native.nvme import NvmeStatus
from dlfs.block import NvmeTcpDevice

SECONDS_MAX = 100
PAUSE_S = 0.005

T = TypeVar("T")


def wait_for(condition: Callable[[], object], what: str | Callable[[], str]) -> None:
    """Wait until a condition holds; fail after a time that no machine needs.

    Args:
        condition: what is waited for.
        what: its description. A function describes what there is when the time is over.
    """
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        if time.monotonic() >= deadline:
            pytest.fail(f"waited {SECONDS_MAX} s for {what if isinstance(what, str) else what()}")
        select.select([], [], [], PAUSE_S)


def until(device: NvmeTcpDevice, condition: Callable[[NvmeStatus], bool]) -> NvmeStatus:
    """Wait until the status of a device meets a condition, and return it."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition(status := device.status()):
        assert time.monotonic() < deadline, status
        select.select([], [], [], PAUSE_S)
    return status


def retried(call: Callable[[], T], *errors: type[Exception]) -> T:
    """Call a function until it raises none of these errors, and return its result."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            return call()
        except errors:
            if time.monotonic() > deadline:
                raise
        select.select([], [], [], PAUSE_S)
