"""The parts of remote sources, whose objects other processes fetch themselves."""

from __future__ import annotations

import io
import random
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlfs.base.arguments import Layout
from dlfs.base.units import KIB
from dlfs.dataset import committed_steps
from dlfs.errors import DeviceError, FormatError
from dlfs.ingest.importer import open_source
from dlfs.ingest.parts import open_part
from dlfs.ingest.source import Division, Source
from tests.unit.ingest.part_reading import read_all, read_elsewhere, read_part
from tests.unit.ingest.remote.object_store import BUCKET, ObjectStore, object_store
from tests.unit.ingest.test_steps import everything, fresh, run

__all__ = ["object_store"]

PART_BYTES = 200 * KIB
SPOOL_BYTES = 300 * KIB
LAYOUTS: list[Layout] = ["shuffled", "path"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def store(object_store: ObjectStore) -> None:
    """Store objects in class folders, and archives of them."""
    for shard in range(8):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for number in range(shard * 10, shard * 10 + 10):
                data = random.Random(number).randbytes((0, 100, 9000, 30_000)[number % 4])
                object_store.put(f"train/{'ab'[number % 2]}/{number:03} é", data)
                info = tarfile.TarInfo(f"{number:03}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        object_store.put(f"shards/{shard}.tar", packed.getvalue())


KINDS = {
    "objects": ("train", "folder"),
    "classes": ("train", "imagefolder"),
    "shards": ("shards/{0..7}.tar", "auto"),
}


def opened(kind: str, spool: Path, **options: Any) -> Source:
    name, format_name = KINDS[kind]
    source = open_source(
        f"s3://{BUCKET}/{name}",
        format_name=format_name,
        spool=spool,
        spool_bytes=SPOOL_BYTES,
        **options,
    )
    source.buffer_bytes = 64 * KIB
    source._source.buffer_bytes = 64 * KIB  # type: ignore[attr-defined]
    return source


def divided(source: Source, layout: Layout = "shuffled") -> Division:
    found = source.divide(layout=layout, seed=5, part_bytes=PART_BYTES)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_what_the_blocks_say(
    object_store: ObjectStore, tmp_path: Path, kind: str, layout: Layout
) -> None:
    store(object_store)
    with closing(opened(kind, tmp_path / "spool")) as source:
        division = divided(source, layout)
        source.part_bytes = PART_BYTES
        parts, ends = read_all(source, layout, 5)
    assert len(division) == len(parts) > 3
    assert ends == [*range(len(parts) - 1)]
    own = {"spool": str(tmp_path / "own"), "spool_bytes": 40 * KIB}
    assert read_elsewhere(division, tmp_path, layout, 5, **own) == parts
    assert [*(tmp_path / "own").iterdir()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_import_goes_on_to_the_same_dataset(
    object_store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    store(object_store)
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    options = {"step_bytes": PART_BYTES, "layout": "shuffled"}
    assert run(whole, opened(kind, tmp_path / "spool"), **options) is not None
    kill_at = 3
    while run(killed, opened(kind, tmp_path / "spool"), kill_at=kill_at, **options) is None:
        kill_at += 4
    assert everything(killed) == everything(whole)


def test_a_part_has_no_credentials(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    store(object_store)
    with closing(opened("objects", tmp_path / "spool")) as source:
        division = divided(source)
    assert all(b"a-secret-key" not in division.describe(one) for one in range(len(division)))


@pytest.mark.parametrize("kind", ["objects", "shards"])
def test_an_object_that_changed_since_the_division_is_an_error(
    object_store: ObjectStore, tmp_path: Path, kind: str
) -> None:
    store(object_store)
    with closing(opened(kind, tmp_path / "spool")) as source:
        division = divided(source, "path")
    if kind == "objects":
        object_store.put("train/a/002 é", bytes(9000))
    else:
        object_store.put("shards/0.tar", bytes(10_240))
    with pytest.raises(DeviceError, match="changed during the import"):
        read_part(division.describe(0), "path", 5, spool=str(tmp_path / "own"))
    assert [*(tmp_path / "own").iterdir()] == []


@pytest.mark.parametrize("name", [b"../../escape", b"/etc/x", b"a//b", b"a/./b", b"a\0b"])
def test_an_object_with_a_hostile_name_is_an_error(
    object_store: ObjectStore, tmp_path: Path, name: bytes
) -> None:
    store(object_store)
    with closing(opened("shards", tmp_path / "spool")) as source:
        part = msgspec.msgpack.decode(divided(source).describe(0))
    part["objects"][0][1] = name
    with pytest.raises(FormatError, match="open a part of a source"):
        open_part(msgspec.msgpack.encode(part), spool=str(tmp_path / "own"))


def test_objects_that_are_fetched_before_are_not_divided(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    store(object_store)
    url = f"s3://{BUCKET}/shards/{{0..7}}.tar"
    with closing(open_source(url, spool=tmp_path / "spool")) as source:
        assert source.divide(layout="path", seed=0, part_bytes=PART_BYTES) is None
        assert "fetched before" in source.undivided
