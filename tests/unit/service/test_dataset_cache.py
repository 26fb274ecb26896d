"""The memory budget of a node service's datasets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs import connection
from dlfs.connection import OpenOptions
from dlfs.errors import DeviceError
from dlfs.service import dataset_cache
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.units import GIB, MIB
from tests.unit.resizing.test_following import overwrite


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Make a volume with a dataset that has fields."""
    path = str(tmp_path / "v.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(20):
            writer.add(f"{number:02}", {"image": bytes(50_000), "label": number, "weight": 1.5})
    return path


def test_a_reader_of_fields_that_fails_to_open_takes_no_memory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reader = connection.make_native_reader

    def fail(*_arguments: object) -> None:
        raise DeviceError("out of memory")

    with (
        closing(DatasetCache(GIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as served,
        served.dataset("d", 1) as dataset,
    ):
        (before,) = cache.statistics()
        monkeypatch.setattr(connection, "make_native_reader", fail)
        with pytest.raises(DeviceError, match="out of memory"):
            dataset.session.readers.reader(["label"])
        assert cache.statistics()[0]["cache_bytes"] == before["cache_bytes"]
        monkeypatch.setattr(connection, "make_native_reader", make_reader)
        dataset.session.readers.reader(["label"])
        assert cache.statistics()[0]["cache_bytes"] > before["cache_bytes"]


def test_a_move_gives_back_the_memory_of_readers_of_fields(path: str, tmp_path: Path) -> None:
    with (
        closing(DatasetCache(GIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as served,
        served.dataset("d", 1) as dataset,
    ):
        (before,) = cache.statistics()
        for fields in (["label"], ["weight"]):
            assert len(dataset.read([3], fields=fields).fields) == 1
        assert cache.statistics()[0]["cache_bytes"] > before["cache_bytes"]
        with dlfs.open(path) as volume:
            volume.grow(tmp_path / "new.img", size_bytes=16 * MIB)
            volume.shrink([0])
        overwrite(path)
        assert len(dataset.read([3])[0]) > 50_000
        assert cache.statistics()[0]["cache_bytes"] == before["cache_bytes"]


def test_a_dataset_is_acquired_while_its_attributes_are_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may take its whole timeout for the attributes; they alone wait for it."""
    load = dataset_cache._load_attributes
    reading, go_on = threading.Event(), threading.Event()
    loads: list[object] = []

    def load_slowly(session: Any) -> Any:
        loads.append(session)
        reading.set()
        assert go_on.wait(100)
        return load(session)

    monkeypatch.setattr(dataset_cache, "_load_attributes", load_slowly)
    with (
        closing(DatasetCache(GIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as served,
        served.dataset("d", 1) as dataset,
        ThreadPoolExecutor(3) as pool,
    ):
        waiting = [pool.submit(served.attributes, dataset.uuid) for _ in range(2)]
        try:
            assert reading.wait(100)
            pool.submit(lambda: served.acquire(dataset.uuid).close()).result(timeout=100)
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        first, second = (one.result() for one in waiting)
        assert first is second
        assert len(loads) == 1
