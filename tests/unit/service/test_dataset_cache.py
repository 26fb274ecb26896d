"""The memory budget of a node service's datasets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import GIB, KIB, MIB
from dlfs.connection.connection import OpenOptions
from dlfs.errors import LimitError
from dlfs.service import dataset_cache
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from tests.unit.store.test_following import overwrite


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Make a volume with a dataset that has fields."""
    path = str(tmp_path / "v.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    with dlfs.open(path) as volume, volume.writer("d") as writer:
        for number in range(20):
            writer.add(f"{number:02}", {"image": bytes(50_000), "label": number, "weight": 1.5})
    return path


def held_bytes(cache: DatasetCache) -> int:
    """Return the memory that all datasets hold; check that it is that of all of them together."""
    held = cache.memory.stats()["held_bytes"]
    assert sum(entry["cache_bytes"] for entry in cache.statistics()) == held
    return held


def test_a_move_gives_back_the_memory_of_readers_of_fields(path: str, tmp_path: Path) -> None:
    with (
        closing(DatasetCache(64 * MIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as served,
        served.dataset("d", 1) as dataset,
    ):
        assert held_bytes(cache) == 0
        for fields in (["label"], ["weight"]):
            assert len(dataset.read([3], fields=fields).fields) == 1
        with dlfs.open(path) as volume:
            volume.grow(tmp_path / "new.img", size_bytes=16 * MIB)
            volume.shrink([0])
        overwrite(path)
        with dataset.read([3]) as batch:
            assert len(batch[0]) > 50_000
            assert cache.memory.stats()["readers"] == 1
            assert 0 < held_bytes(cache) <= 20 * 256 * KIB
        assert cache.memory.stats()["memory_bytes"] == 64 * MIB


def test_few_unused_datasets_stay_open(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "UNUSED_MAX", 2)
    with dlfs.open(path) as volume:
        for name in ("e", "f", "g"):
            with volume.writer(name) as writer:
                writer.add("one", name.encode())
    with (
        closing(DatasetCache(64 * MIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as served,
    ):
        used = served.dataset("d", 1)
        for name in ("e", "f", "e", "g"):
            with served.dataset(name, 1) as dataset:
                assert dataset.get("one") == name.encode()
        assert {entry["dataset"] for entry in cache.statistics()} == {"d", "e", "g"}
        used.close()
        assert {entry["dataset"] for entry in cache.statistics()} == {"d", "g"}
        assert held_bytes(cache) >= 0


def test_volumes_of_two_chunk_sizes_divide_the_memory(path: str, tmp_path: Path) -> None:
    paths = [path, *(str(tmp_path / name) for name in ("small.img", "later.img"))]
    for other, chunk_bytes in zip(paths[1:], (64 * KIB, 128 * KIB), strict=True):
        dlfs.format_volume(other, size_bytes=16 * MIB, chunk_bytes=chunk_bytes)
        with dlfs.open(other) as volume, volume.writer("d") as writer:
            writer.add("one", b"1")
    with (
        closing(DatasetCache(64 * MIB)) as cache,
        ServedVolume(path, cache, OpenOptions()) as large,
        ServedVolume(paths[1], cache, OpenOptions()) as small,
    ):
        with pytest.raises(ZeroDivisionError), ServedVolume(paths[2], cache, OpenOptions()):
            raise ZeroDivisionError  # it is gone before the memory is divided
        with large.dataset("d", 1) as one, small.dataset("d", 1) as other:
            assert len(one.read([0])[0]) > 50_000
            assert other.get("one") == b"1"
            assert cache.memory.stats() == {
                "memory_bytes": 64 * MIB,
                "held_bytes": held_bytes(cache),
                "readers": 2,
            }
        with pytest.raises(
            LimitError, match=r"expected 512\.0 KiB of memory .* 0 B of 64\.0 MiB are left"
        ):
            ServedVolume(paths[2], cache, OpenOptions())
        with ServedVolume(paths[1], cache, OpenOptions()) as again:
            again.refresh()


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
        waiting = [pool.submit(cache.attributes, served.uuid, dataset.uuid) for _ in range(2)]
        try:
            assert reading.wait(100)
            pool.submit(lambda: served.acquire(dataset.uuid).close()).result(timeout=100)
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        first, second = (one.result() for one in waiting)
        assert first is second
        assert len(loads) == 1
