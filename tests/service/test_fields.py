"""Samples with fields are read from a service as from the devices: chosen fields alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, ServiceLostError, UsageError
from dlfs.service.protocol import DatasetState, OpenDataset
from tests.service.serving import Service
from tests.support.files import write_at

COUNT = 50
IMAGE_BYTES = 50_000
FIELDS = ["mask", "label", "text"]


def image_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(IMAGE_BYTES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("fields") / "fields.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(COUNT):
            mask = np.full((1 + number % 3, 2), number, np.uint8)
            sample = {"image": image_of(number), "mask": mask, "label": number}
            writer.add(f"{number:02}", {**sample, "text": f"t {number}"})
    return path


@pytest.fixture(scope="module")
def service(path: str) -> Iterator[Service]:
    service = Service([path], Path(path).with_suffix(".sock"))
    try:
        yield service.wait_ready()
    finally:
        service.close()


def check(batch: dlfs.Batch) -> list[int]:
    """Compare the chosen fields of a batch with what was written; return its indices."""
    numbers = batch.indices.tolist()
    assert list(batch.fields) == FIELDS
    assert batch["label"].tolist() == numbers
    assert batch["text"] == [f"t {number}" for number in numbers]
    assert [mask.shape for mask in batch["mask"]] == [(1 + number % 3, 2) for number in numbers]
    assert [set(mask.flat) for mask in batch["mask"]] == [{number} for number in numbers]
    assert batch.lengths.max() < 64
    return numbers  # type: ignore[no-any-return]


def dataset_statistics(service: Service) -> dict[str, Any]:
    (found,) = service.snapshot()["datasets"]
    return found  # type: ignore[no-any-return]


def test_a_service_reads_the_chosen_fields_alone(service: Service) -> None:
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        assert list(dataset.fields) == ["image", *FIELDS]
        whole_bytes = dataset_statistics(service)["cache_bytes"]
        seen: list[int] = []
        for batch in dataset.batches(16, seed=1, fields=FIELDS):
            seen += check(batch)
        assert sorted(seen) == list(range(COUNT))
        check(dataset.read([7, 7, 0], fields=FIELDS))
        found = dataset_statistics(service)
        assert found["reader"]["read_bytes"] <= COUNT * 8 * KIB
        assert found["cache_bytes"] > whole_bytes
        with dlfs.connect(service.uri) as other, other["d"] as again:  # has the same reader
            check(again.read([1, 2], fields=FIELDS))
            assert dataset_statistics(service)["cache_bytes"] == found["cache_bytes"]
            assert dataset_statistics(service)["reader"]["samples"] == COUNT + 5
            with pytest.raises(UsageError, match="no such field"):
                again.read([1], fields=["other"])
        assert dataset[[3, 4]]["image"].to_list() == [image_of(3), image_of(4)]
        assert dataset.sample(5)["label"] == 5
        assert dataset.read([1], fields=["image"]).lengths[0] > IMAGE_BYTES
        pinned = dataset.read(range(COUNT), fields=FIELDS)
        assert max(client["pinned_bytes"] for client in service.clients()) > 0
        check(pinned)


def test_damage_of_other_fields_is_no_error(path: str, service: Service) -> None:
    place = Path(path).read_bytes().index(image_of(9)) + 100
    write_at(path, place, bytes([image_of(9)[100] ^ 1]))
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        check(dataset.read([9], fields=FIELDS))
        with pytest.raises(ChecksumError, match="sample 9 '09'"):
            dataset.read([9])


def test_more_choices_than_the_service_has_readers_are_read_whole(service: Service) -> None:
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        for choice in (["mask"], ["label"], ["text"]):
            assert list(dataset.read([3], fields=choice).fields) == choice
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        batch = dataset.read([3], fields=["label", "text"])
        assert (batch["label"].tolist(), batch["text"]) == ([3], ["t 3"])
        assert batch.lengths.tolist() == dataset.lengths([3]).tolist()
        with closing(service.connection()) as control:
            request = OpenDataset(volume.uuid, dataset.uuid, ("label", "text"))
            state, descriptors = control.request(request, DatasetState, 2)
            with descriptors:
                assert state.fields == ()
        with closing(service.connection()) as control:
            request = OpenDataset(volume.uuid, dataset.uuid, ("x",))
            with pytest.raises(UsageError, match="no such field"):
                control.request(request, DatasetState, 2)


def test_a_process_has_epochs_of_many_datasets_and_choices_at_once(service: Service) -> None:
    with dlfs.connect(service.uri) as volume, ExitStack() as stack:
        datasets = [stack.enter_context(volume.dataset("d").open()) for _ in range(35)]
        choices = (None, ["mask"], ["label"], ["text"])
        epochs = [
            stack.enter_context(dataset.batches(COUNT, seed=1, fields=choice, on_error="skip"))
            for dataset in datasets
            for choice in choices
        ]
        assert min(len(next(epoch).indices) for epoch in epochs) >= COUNT - 1  # one is damaged


def test_an_epoch_goes_on_with_the_next_service(path: str, service: Service) -> None:
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        epoch = dataset.batches(10, seed=2, fields=FIELDS)
        seen = check(next(epoch))
        service.kill()
        with pytest.raises(ServiceLostError):
            next(epoch)
        following = Service([path], service.socket)
        try:
            following.wait_ready()
            for batch in epoch:
                seen += check(batch)
            assert sorted(seen) == list(range(COUNT))
            following.stop()
        finally:
            following.close()
