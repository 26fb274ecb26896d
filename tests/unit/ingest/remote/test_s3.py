"""Imports from S3, on a server of this machine: faults, changes, kills."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.errors import ChecksumError, DeviceError, FormatError, NotFoundError
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.remote import failures, fetching, stores
from dlfs.ingest.remote.stores import REQUESTS
from dlfs.volume.volume import Volume
from tests.support.processes import PROCESSES, preload
from tests.unit.ingest.remote.object_store import (
    BUCKET,
    ObjectStore,
    broken,
    cut,
    object_store,
    run_import,
    swapped,
)
from tests.unit.ingest.taking import take

__all__ = ["object_store"]
URL = f"s3://{BUCKET}/train"
OBJECTS = int(os.environ.get("DLFS_TEST_OBJECTS", "1200"))
"""Objects of a large import. A page of a listing has 1,000 keys."""
KILLS = int(os.environ.get("DLFS_TEST_KILLS", "5"))
preload("s3fs", "dlfs.ingest.formats.folder", run_import.__module__)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)


def contents(dataset: dlfs.Dataset) -> list[tuple[bytes, bytes]]:
    """Return the paths and bytes of all samples, in their order."""
    return list(zip(dataset.paths(), dataset.read(range(len(dataset))).to_list(), strict=True))


def fetch(volume: Volume, spool: Path, url: str = URL) -> dict[str, bytes]:
    source = open_source(url, spool=spool)
    try:
        import_dataset(volume, source, "n")
    finally:
        source.close()
    assert list(spool.iterdir()) == []
    with volume["n"] as dataset:
        return {path.decode(): data for path, data in contents(dataset)}


def test_all_objects_under_a_prefix_arrive(
    object_store: ObjectStore, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    files = {f"c{i % 3}/a b+{i}é.bin": random.Random(i).randbytes(i * 300) for i in range(20)}
    for name, data in files.items():
        object_store.put(f"train/{name}", data)
    object_store.put("train/", b"")  # a key that stands for the folder
    object_store.put("training/other", b"x")
    assert fetch(volume, tmp_path / "spool") == files
    assert object_store.gets["train/c1/a b+19é.bin"] == 6  # ranges
    assert object_store.gets["training/other"] == 0


@pytest.mark.parametrize("key", ["train/", "train/sub/", "train/a/"])
def test_a_key_that_ends_with_a_slash_is_not_dropped_with_its_bytes(
    object_store: ObjectStore, tmp_path: Path, key: str
) -> None:
    object_store.put("train/a/1", b"1")
    object_store.put(key, b"")
    with closing(open_source(URL, spool=tmp_path)) as source:
        assert set(take(source)) == {"a/1"}
    object_store.put(key, b"data")
    for url in (URL, URL + "/"):
        with pytest.raises(FormatError, match=f"object bucket/{key}: .*, got 4 bytes"):
            open_source(url, spool=tmp_path)


def test_no_request_waits_for_a_connection(object_store: ObjectStore, tmp_path: Path) -> None:
    """One that does is passed by later ones, and the objects before it wait in the spool."""
    together = threading.Barrier(REQUESTS, timeout=60)

    def wait(*answer: Any) -> Any:
        together.wait()
        return answer

    for number in range(REQUESTS):
        object_store.put(f"train/{number}", b"abc")
        object_store.faults[f"train/{number}"] = [wait]
    assert len(take(open_source(URL, spool=tmp_path))) == REQUESTS
    assert not together.broken


def test_temporary_faults_are_repeated(
    object_store: ObjectStore, volume: Volume, tmp_path: Path
) -> None:
    files = {f"{i}": random.Random(i).randbytes(1000) for i in range(4)}
    for name, data in files.items():
        object_store.put(f"train/{name}", data)
    object_store.faults["train/0"] = [broken]
    object_store.faults["train/1"] = [cut, cut]
    object_store.faults["train/2"] = [swapped]
    assert fetch(volume, tmp_path / "spool") == files
    assert [object_store.gets[f"train/{i}"] for i in range(4)] == [2, 3, 2, 1]


def test_bytes_that_differ_from_the_md5_twice_are_an_error(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.put("train/a", b"abc")
    object_store.faults["train/a"] = [swapped] * 20
    with pytest.raises(ChecksumError, match=f"import {URL}/a: "):
        take(open_source(URL, spool=tmp_path))


def test_pieces_of_an_object_that_is_damaged_as_a_whole_are_fetched_again(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's MD5 comes with each piece, and is known to the next import as well."""
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    object_store.put("train/a", random.Random(1).randbytes(2500))
    object_store.faults["train/a"] = [swapped] * 6
    with pytest.raises(ChecksumError, match=f"import {URL}/a: expected md5"):
        take(open_source(URL, spool=tmp_path))
    object_store.faults["train/a"] = [swapped] * 3

    def end(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as context:  # killed when all pieces are complete
        context.setattr(fetching, "compute", end)
        with pytest.raises(DeviceError):  # the thread's InterruptedError
            take(open_source(URL, spool=tmp_path))
    take(open_source(URL, spool=tmp_path))
    assert object_store.gets["train/a"] == 12


def test_an_object_that_changes_after_the_listing_is_an_error(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    object_store.put("train/a", b"abc")
    object_store.put("train/b", b"abc")

    def change(status: int, headers: list[tuple[str, str]], body: bytes) -> object:
        changed = [(name, '"1"' if name.lower() == "etag" else text) for name, text in headers]
        return status, changed, body

    object_store.faults["train/b"] = [change]  # type: ignore[list-item]
    with pytest.raises(DeviceError, match=f"import {URL}/b: the object changed") as caught:
        take(open_source(URL, spool=tmp_path))
    assert caught.value.errno == errno.ESTALE
    object_store.put("train/b", b"new")  # a new import has a new listing
    source = open_source(URL, spool=tmp_path)
    assert source.sample_bytes == 6
    assert len(take(source)) == 2
    assert object_store.gets == {"train/a": 2, "train/b": 2}


def test_a_failing_store_is_an_error_that_names_the_object(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "ATTEMPTS_MAX", 2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    object_store.put("train/a", b"abc")
    object_store.faults["train/a"] = [broken] * 100
    with pytest.raises(DeviceError, match=f"import {URL}/a: read bytes 0 to 3: "):
        take(open_source(URL, spool=tmp_path))
    with pytest.raises(NotFoundError, match="there is no such object or folder"):
        open_source(f"{URL}/nothing", spool=tmp_path)


@pytest.mark.slow
def test_a_killed_import_goes_on_where_it_was(object_store: ObjectStore, tmp_path: Path) -> None:
    """Killed at seeded places and run again, an import fetches no complete object twice."""
    draw = random.Random(15)
    folder, spool = tmp_path / "train", tmp_path / "spool"
    for i in range(OBJECTS):
        data = draw.randbytes(draw.randrange(2000))
        object_store.put(f"train/{i % 7}/{i}", data)
        (folder / str(i % 7)).mkdir(parents=True, exist_ok=True)
        (folder / str(i % 7) / str(i)).write_bytes(data)
    volume = str(tmp_path / "vol.img")
    dlfs.format_volume(volume, size_bytes=max(64 << 20, OBJECTS * 8192))
    places = sorted(draw.sample(range(OBJECTS), KILLS))
    complete: set[str] = set()
    for place in [*places, None]:
        before = object_store.gets.copy()
        process = PROCESSES.Process(
            target=run_import, args=(object_store.environment, URL, volume, str(spool))
        )
        process.start()
        while place is not None and object_store.gets.total() <= place:
            with object_store.counted:
                object_store.counted.wait(timeout=1)
            assert process.is_alive()
        if place is not None:
            process.kill()
        process.join()
        assert process.exitcode == (0 if place is None else -signal.SIGKILL)
        assert not {key for key in object_store.gets - before if key in complete}
        complete = complete_keys(spool)
    assert object_store.gets.total() <= OBJECTS + KILLS * REQUESTS
    assert list(spool.iterdir()) == []
    with dlfs.open(volume) as opened:
        import_dataset(opened, open_source(folder), "local")
        with opened["n"] as fetched, opened["local"] as local:
            assert contents(fetched) == contents(local)


def complete_keys(spool: Path) -> set[str]:
    """Return the keys of the objects that a manifest has, but for a line that was cut off."""
    keys = set()
    for manifest in spool.glob("*/manifest.jsonl"):
        for line in manifest.read_bytes().splitlines(keepends=True):
            record = json.loads(line) if line.endswith(b"\n") else {}
            if "url" in record:
                keys.add(record["url"].removeprefix(f"s3://{BUCKET}/"))
    return keys
