"""Datasets for PyTorch's adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import MIB
from tests.support.datasets import random_samples
from tests.support.volumes import new_volume, write_dataset

COUNT = 230
SHAPE = (2, 3)


@pytest.fixture(scope="session")
def torch_volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume of two datasets: samples of any length in class folders, and arrays of one shape."""
    path = new_volume(tmp_path_factory.mktemp("torch") / "volume.img", size_bytes=16 * MIB)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "bytes", random_samples(COUNT, low=1))
        with volume.writer("arrays") as writer:
            for number in range(COUNT):
                attributes = {
                    **describe(SHAPE),
                    "class": f"name{number % 3}",
                    "number": number % 5,
                    "weight": number / 2,
                }
                writer.add(b"%04d" % number, array(number).tobytes(), attributes=attributes)
        with volume.writer("mixed") as writer:
            for number in range(20):
                shape = SHAPE if number % 2 else SHAPE[::-1]
                data = array(number).tobytes()
                writer.add(b"%04d" % number, data, attributes=describe(shape))
    return path


def describe(shape: tuple[int, ...]) -> dict[str, str]:
    """Return the attributes that describe a sample's bytes as an array."""
    return {"dlfs:dtype": "<f4", "dlfs:shape": ",".join(map(str, shape))}


def array(number: int) -> np.ndarray:
    """Return the content of sample `number` of the dataset `arrays`."""
    return np.full(SHAPE, number, np.float32) + np.arange(6, dtype=np.float32).reshape(SHAPE) / 8


@pytest.fixture
def opened(torch_volume: Path) -> Iterator[Callable[..., dlfs.Dataset]]:
    """Opens a dataset of the volume, with options for `dlfs.open`."""
    made: list[dlfs.Dataset] = []

    def make(name: str, **options: int) -> dlfs.Dataset:
        options = {"memory_bytes": 4 * MIB, **options}
        with dlfs.open(str(torch_volume), **options) as volume:  # type: ignore[arg-type]
            made.append(volume.dataset(name))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def samples(opened: Callable[..., dlfs.Dataset]) -> dlfs.Dataset:
    return opened("bytes")


@pytest.fixture
def arrays(opened: Callable[..., dlfs.Dataset]) -> dlfs.Dataset:
    return opened("arrays")
