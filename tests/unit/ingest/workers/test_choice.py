"""How many workers an import has whose caller does not say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import open_source
from dlfs.ingest.source import Source
from dlfs.ingest.workers import by_workers
from dlfs.ingest.workers.by_workers import default_workers
from tests.support.files import write_files
from tests.support.parts import open_parts
from tests.support.volumes import new_volume

FILES, FILE_BYTES = 100, 10_000
PART_BYTES = 100_000  # ten parts


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    files = {f"{n:03}": bytes(FILE_BYTES) for n in range(FILES)}
    with closing(open_source(write_files(tmp_path / "folder", files))) as source:
        source.buffer_bytes = FILE_BYTES
        yield source


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dlfs.Volume]:
    monkeypatch.setattr(by_workers, "DEFAULT_BYTES", FILES * FILE_BYTES - 1)
    monkeypatch.setattr(by_workers, "allowed_processors", lambda: 6)
    path = new_volume(tmp_path / "disk", size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as volume:
        yield volume


def choose(volume: dlfs.Volume, source: Source, part_bytes: int = PART_BYTES) -> int:
    return default_workers(volume, "x", source, "shuffled", 0, part_bytes)


@pytest.mark.parametrize(
    ("processors", "part_bytes", "expected"),
    [
        (6, PART_BYTES, 6),
        (2, PART_BYTES, 2),
        (64, PART_BYTES, 8),
        (1, PART_BYTES, 0),
        (6, FILES * FILE_BYTES // 5, 5),
        (6, FILES * FILE_BYTES // 2, 0),
    ],
)
def test_as_many_as_processors_and_parts(
    volume: dlfs.Volume,
    source: Source,
    processors: int,
    part_bytes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_workers, "allowed_processors", lambda: processors)
    assert choose(volume, source, part_bytes) == expected


def test_a_small_source_has_none(
    volume: dlfs.Volume, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_workers, "DEFAULT_BYTES", FILES * FILE_BYTES)
    assert choose(volume, source) == 0


def test_beside_another_import_there_are_none(volume: dlfs.Volume, source: Source) -> None:
    open_parts(volume, "y").commit(reserve=2)
    volume.refresh()
    assert choose(volume, source) == 0


def test_a_volume_that_cannot_grant_has_none(volume: dlfs.Volume, source: Source) -> None:
    with dlfs.open(new_volume("mem:choice?size=8MiB")) as memory:
        assert choose(memory, source) == 0
    assert choose(volume, source) == 6
