"""Volumes that adapters read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from tests.support.datasets import random_samples
from tests.support.volumes import write_dataset

COUNT = 300


@pytest.fixture(scope="package")
def make_volume(tmp_path_factory) -> Callable[..., Path]:
    """Makes a volume of datasets, each samples by path."""

    def make(**datasets: Mapping[str | bytes, bytes]) -> Path:
        path: Path = tmp_path_factory.mktemp("volume") / "volume.img"
        dlfs.format_volume(str(path), size_bytes=32 * MIB)
        with dlfs.open(str(path)) as volume:
            for name, samples in datasets.items():
                write_dataset(volume, name, samples)
        return path

    return make


@pytest.fixture(scope="package")
def samples() -> dict[bytes, bytes]:
    return random_samples(COUNT, seed=5)


@pytest.fixture(scope="package")
def volume_path(make_volume, samples) -> Path:
    """A volume with the dataset ``numbers``."""
    path: Path = make_volume(numbers=samples, other={"one": b"1", "deep/er/two": b"22"})
    return path


@pytest.fixture
def numbers(volume_path) -> Iterator[dlfs.Dataset]:
    """The dataset ``numbers``, open."""
    with dlfs.open(str(volume_path)) as volume, volume["numbers"] as opened:
        yield opened


@pytest.fixture
def ordered(samples) -> list[bytes]:
    """The samples of ``numbers`` by their indices."""
    return [samples[path] for path in sorted(samples)]


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Record the number of samples of each read of a dataset, in the order of the reads."""
    sizes: list[int] = []
    read = dlfs.Dataset.read

    def noted(dataset: dlfs.Dataset, indices: list[int], **how: str) -> dlfs.Batch:
        sizes.append(len(indices))
        return read(dataset, indices, **how)

    monkeypatch.setattr(dlfs.Dataset, "read", noted)
    return sizes
