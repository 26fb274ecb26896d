"""Ctrl-C at any moment: KeyboardInterrupt comes out, and nothing crashes, hangs or is left.

DLFS_INTERRUPTS sets the interruptions of each test; by default they are a sample of the points.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.service.serving import Service

COUNT = int(os.environ.get("DLFS_INTERRUPTS", "12"))
MODES = ("lines", "returns", "signals")
LOCAL = [
    "format",
    "open",
    "read",
    "epoch",
    "views",
    "columns",
    "write",
    "remove",
    "rename",
    "copy",
    "files",
]
TORCH = ("loader", "workers", "checkpoint")
LOST = ("signals", "workers")
"""Not tried: lines of PyTorch that start worker processes lose Ctrl-C."""
CASES = [
    *((mode, name) for mode in MODES for name in LOCAL),
    *(
        pytest.param(mode, name, marks=pytest.mark.torch)
        for mode in MODES
        for name in TORCH
        if (mode, name) != LOST
    ),
]


def interrupt(mode: str, operation: str, folder: Path, seed: int, count: int = COUNT) -> None:
    """Run the program that interrupts an operation; fail with what it says was wrong."""
    command = [sys.executable, "-m", "tests.fault.interrupting", mode, operation]
    command += [str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture
def seed() -> int:
    """A seed, which a failed test prints; the same in all runs of CI."""
    made = 1 if "CI" in os.environ else random.randrange(1 << 32)
    print(f"seed {made}")
    return made


@pytest.fixture
def served(tmp_path: Path, seed: int) -> Iterator[Path]:
    """A folder with a volume that a service serves."""
    interrupt("prepare", "", tmp_path, seed)
    with closing(Service([str(tmp_path / "volume.img")], tmp_path / "s")) as service:
        service.wait_ready()
        yield tmp_path
        service.stop()


@pytest.mark.parametrize(("mode", "operation"), CASES)
def test_an_operation_is_interrupted(mode: str, operation: str, tmp_path: Path, seed: int) -> None:
    interrupt(mode, operation, tmp_path, seed)


@pytest.mark.parametrize("operation", ["open", "epoch", "write"])
def test_an_operation_is_interrupted_beside_threads_and_forks(
    operation: str, tmp_path: Path, seed: int
) -> None:
    interrupt("busy", operation, tmp_path, seed)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_of_a_service_is_interrupted(mode: str, served: Path, seed: int) -> None:
    interrupt(mode, "connect", served, seed)
