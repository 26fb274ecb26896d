"""Fixtures: a volume, and a driver with a holder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from tests.kubernetes.driving import PUBLISHES, Plant, server_user
from tests.nvmet.test_composing import node  # noqa: F401 - the fixture: a storage node
from tests.support.volumes import new_volume, write_dataset

SAMPLES = {"cat/0.txt": b"first", "dog/1.txt": b"second"}


@pytest.fixture(scope="package")
def user() -> str:
    return server_user()


@pytest.fixture(scope="package")
def plant(user: str) -> Iterator[Plant]:
    """A driver that many tests use."""
    plant = Plant(user, "--volumes-max", str(PUBLISHES))
    yield plant
    plant.close()


@pytest.fixture(scope="package")
def volume(plant: Plant) -> Path:
    """A volume with the dataset ``animals``, which every user may read."""
    path = new_volume(plant.folder / "volume.img", size_bytes=16 * MIB)
    write_dataset(path, "animals", SAMPLES)
    path.chmod(0o644)
    with dlfs.open(path) as opened:
        assert [dataset.name for dataset in opened.datasets()]
    return path


@pytest.fixture
def target(plant: Plant, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A target path of its own for each test; nothing is left of it."""
    path = plant.targets / "target"
    yield path
    plant.unpublish(path)
    assert plant.left() == []
