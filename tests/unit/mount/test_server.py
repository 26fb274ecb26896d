from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyfuse3")

from dlfs.base.units import KIB, MIB
from dlfs.mount import server
from tests.support.volumes import new_volume, write_dataset


@pytest.mark.parametrize(("memory_bytes", "again"), [(64 * KIB, 64), (16 * MIB, 0)])
def test_a_dataset_is_read_once_if_it_fits_the_memory_of_the_mount(
    tmp_path: Path, memory_bytes: int, again: int
) -> None:
    image = new_volume(str(tmp_path / "volume.img"), size_bytes=16 * MIB)
    write_dataset(image, "train", {b"%02d" % index: bytes(40 * KIB) for index in range(64)})
    with server._opened([image], memory_bytes) as [volume]:
        dataset = volume["train"]
        for index in range(64):
            dataset[index]
        before = dataset.stats()["reads"]
        for index in range(64):
            dataset[index]
        assert dataset.stats()["reads"] - before == again
