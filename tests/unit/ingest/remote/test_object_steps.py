"""An import of objects goes on, also after its local copies were deleted."""

from __future__ import annotations

import io
import random
import shutil
import tarfile
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB
from dlfs.dataset import committed_steps
from dlfs.errors import UsageError
from dlfs.ingest.importer import open_source
from dlfs.ingest.source import Source
from tests.unit.ingest.remote.object_store import BUCKET, ObjectStore, object_store
from tests.unit.ingest.test_steps import everything, fresh, run

__all__ = ["object_store"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def store(object_store: ObjectStore) -> None:
    """Store objects, and a tar archive of them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(60):
            data = random.Random(number).randbytes(20_000)
            object_store.put(f"train/{number:03}", data)
            info = tarfile.TarInfo(f"{number:03}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    object_store.put("x.tar", packed.getvalue())


def opened(name: str, spool: Path) -> Source:
    source = open_source(f"s3://{BUCKET}/{name}", spool=spool)
    inner = source._source  # type: ignore[attr-defined]
    inner.buffer_bytes = 64 * KIB
    return source


@pytest.mark.parametrize("name", ["train", "x.tar"])
def test_copies_that_are_fetched_again_are_the_same_source(
    object_store: ObjectStore, tmp_path: Path, name: str
) -> None:
    store(object_store)
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    assert run(whole, opened(name, tmp_path / "spool")) is not None
    assert run(killed, opened(name, tmp_path / "spool"), kill_at=10) is None
    shutil.rmtree(tmp_path / "spool")
    with dlfs.open(killed) as volume:
        (unfinished,) = volume.unfinished()
    report = run(killed, opened(name, tmp_path / "other"))
    assert report is not None
    assert report.kept_count == unfinished.sample_count > 0
    assert everything(killed) == everything(whole)


def test_an_object_that_changed_is_another_source(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    store(object_store)
    volume = fresh(tmp_path / "v.img")
    assert run(volume, opened("train", tmp_path / "spool"), kill_at=10) is None
    object_store.put("train/007", bytes(20_000))
    with pytest.raises(UsageError, match="its source, or options of it, are not those of now"):
        run(volume, opened("train", tmp_path / "spool"))
