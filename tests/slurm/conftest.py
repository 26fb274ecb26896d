"""A Slurm cluster for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import SlurmLab


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """A cluster of two nodes."""
    with SlurmLab(nodes=2) as lab:
        yield lab
