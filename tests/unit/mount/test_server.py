from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyfuse3")

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.mount import server


@pytest.mark.parametrize(("memory_bytes", "again"), [(64 * KIB, 64), (16 * MIB, 0)])
def test_a_dataset_is_read_once_if_it_fits_the_memory_of_the_mount(
    tmp_path: Path, memory_bytes: int, again: int
) -> None:
    image = str(tmp_path / "volume.img")
    dlfs.format_volume(image, size_bytes=16 * MIB)
    with dlfs.open(image) as volume, volume.writer("train") as writer:
        for index in range(64):
            writer.add(b"%02d" % index, bytes(40 * KIB))
    with server._opened([image], memory_bytes) as [volume]:
        dataset = volume["train"]
        for index in range(64):
            dataset[index]
        before = dataset.stats()["reads"]
        for index in range(64):
            dataset[index]
        assert dataset.stats()["reads"] - before == again
