"""Clients of a service read on while their dataset is moved to other members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from tests.service.serving import Service, make_samples, make_volume
from tests.support.descriptors import open_names
from tests.support.waiting import wait_for
from tests.unit.store.test_following import overwrite, reuse_chunks

Serve = Callable[..., Service]


def test_clients_follow_a_dataset_that_is_moved(serve: Serve, tmp_path: Path) -> None:
    samples = make_samples(200)
    old = make_volume(tmp_path / "old.img", samples)
    new = str(tmp_path / "new.img")
    service = serve(old, options=("--cache", "16MiB"))
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset, volume["d"] as other:
        paths = dataset.paths()
        expected = list(samples.values())
        batches = dataset.batches(16, seed=3)
        seen = []
        for number, batch in enumerate(batches):
            with batch:
                assert batch.to_list() == [expected[i] for i in batch.indices]
                seen += batch.indices.tolist()
            if number == 2:
                with dlfs.open(old) as writer:
                    writer.grow(new, size_bytes=16 * MIB)
                    writer.shrink([0])
                overwrite(old)
        assert sorted(seen) == list(range(len(expected)))
        with other.read(range(len(expected))) as batch:
            assert batch.to_list() == expected
        assert other.get(paths[-1]) == expected[-1]
    with dlfs.connect(service.uri) as volume:
        assert volume.info().uri == new
    service.stop()


@pytest.mark.parametrize("known", [False, True])
def test_columns_are_loaded_where_the_dataset_is_now(
    serve: Serve, tmp_path: Path, known: bool
) -> None:
    """The service has the dataset open, and loads columns when a client first needs them.

    Args:
        serve: starts the service.
        tmp_path: folder of the test.
        known: True if the client has them before the move, and the service's reader of fields not.
    """
    path = str(tmp_path / "v.img")
    dlfs.format_volume(path, size_bytes=3 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(100):
            writer.add(f"{number:02}", {"image": bytes([number]) * 9000, "label": number})
    service = serve(path)
    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        assert len(dataset) == 100
        if known:
            assert list(dataset.fields) == ["image", "label"]
        with dlfs.open(path) as writer:
            writer.grow(tmp_path / "new.img", size_bytes=3 * MIB)
            reuse_chunks(writer)
        with dataset.read([7, 99], fields=["label"]) as batch:
            assert batch["label"].tolist() == [7, 99]
    service.stop()


def test_a_device_that_left_is_closed_without_a_request(serve: Serve, tmp_path: Path) -> None:
    """No client reads when the members change, and the one that has read has gone."""
    old = make_volume(tmp_path / "old.img", make_samples(20))
    new = str(tmp_path / "new.img")
    service = serve(old)

    def is_open(path: str) -> bool:
        return path in open_names(service.pid)

    with dlfs.connect(service.uri) as volume, volume["d"] as dataset:
        assert len(dataset.read(range(20)).to_list()) == 20
    assert is_open(old)
    with dlfs.open(old) as writer:
        writer.grow(new, size_bytes=16 * MIB)
        writer.shrink([0])
    wait_for(lambda: is_open(new) and not is_open(old), "the device that left to be closed")
    service.stop()
