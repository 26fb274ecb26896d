"""Ctrl-C at any moment: KeyboardInterrupt comes out, and nothing crashes, hangs or is left.

DLFS_INTERRUPTS sets the interruptions of each operation in each mode; by default they are a sample
of the points.
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

COUNT = int(os.environ.get("DLFS_INTERRUPTS", "5"))
MODES = "lines,signals,returns"
LOCAL = "format,open,read,epoch,views,columns,write,remove,rename,copy,files"
TORCH = "loader,workers,checkpoint"


def interrupt(modes: str, operations: str, folder: Path, seed: int) -> None:
    """Run the program that interrupts operations; fail with what it says was wrong.

    One process does all: it would take longer to start than to be interrupted.
    """
    command = [sys.executable, "-m", "tests.fault.interrupting", modes, operations]
    command += [str(folder), str(seed), str(COUNT)]
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


@pytest.mark.parametrize("operations", [LOCAL, pytest.param(TORCH, marks=pytest.mark.torch)])
def test_operations_are_interrupted(operations: str, tmp_path: Path, seed: int) -> None:
    interrupt(MODES, operations, tmp_path, seed)


def test_operations_are_interrupted_beside_threads_and_forks(tmp_path: Path, seed: int) -> None:
    interrupt("busy", "open,epoch,write", tmp_path, seed)


def test_a_client_of_a_service_is_interrupted(served: Path, seed: int) -> None:
    interrupt(MODES, "connect", served, seed)
