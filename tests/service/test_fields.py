"""Samples with fields are read from a service as from the devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dlfs
from dlfs.units import MIB
from tests.service.serving import Service


def test_fields_are_read_from_a_service(tmp_path: Path) -> None:
    path = str(tmp_path / "fields.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(50):
            mask = np.full((1 + number % 3, 2), number, np.uint8)
            sample = {"image": bytes(number), "mask": mask, "label": number, "text": f"t {number}"}
            writer.add(f"{number:02}", sample)
    service = Service([path], tmp_path / "f.sock")
    service.wait_ready()
    try:
        with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
            assert list(dataset.fields) == ["image", "mask", "label", "text"]
            for batch in dataset.batches(16, seed=1, fields=["mask", "label", "text"]):
                numbers = batch.indices.tolist()
                assert batch["label"].tolist() == numbers
                assert batch["text"] == [f"t {number}" for number in numbers]
                shapes = [(1 + number % 3, 2) for number in numbers]
                assert [mask.shape for mask in batch["mask"]] == shapes
            assert dataset[[3, 4]]["image"].to_list() == [bytes(3), bytes(4)]
            assert dataset.sample(5)["label"] == 5
    finally:
        service.stop()
        service.close()
