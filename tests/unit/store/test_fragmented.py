"""Volumes whose free chunks are in many runs, of which a catalog may use a few only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.format.geometry import ChunkRun
from dlfs.store import moving
from dlfs.store import transaction as transactions
from dlfs.store.moving import move_chunks
from dlfs.store.transaction import Transaction
from tests.support.volumes import read_dataset, write_dataset

CHUNK = 4 * KIB
STEP_CHUNKS = 8
FIRST = {"scattered": 420, "whole": 100}
"""Chunks of the datasets that are written first."""


def fill(volume: dlfs.Volume, name: str, chunks: int) -> dict[bytes, bytes]:
    samples = {b"%04d" % number: bytes([number % 251]) * CHUNK for number in range(chunks)}
    write_dataset(volume, name, samples)
    return samples


def scatter(volume: dlfs.Volume, name: str) -> None:
    """Move every second chunk of a dataset away, so that free chunks are between the others."""
    uris = volume.uri.split(",")
    with Transaction(uris, volume_uuid=volume.uuid, holder="a test") as transaction:
        records = transaction.base.catalog.datasets
        ((run, *_),) = [record.data_runs for record in records if record.name == name.encode()]
        old = [ChunkRun(run.first_chunk + at, 1) for at in range(1, run.chunk_count, 2)]
        move_chunks(transaction, old, transaction.space.take_all, lambda _count: None)
    volume.refresh()


def test_shrinking_without_room_for_its_catalogs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "STEP_BYTES", STEP_CHUNKS * CHUNK)
    files = [str(tmp_path / f"member{number}") for number in range(3)]
    dlfs.format_volume(files[0], size_bytes=4 * MIB, chunk_bytes=CHUNK)
    with dlfs.open(files[0]) as volume:
        samples = {name: fill(volume, name, count) for name, count in FIRST.items()}
        scatter(volume, "scattered")
        volume.grow(files[1], size_bytes=4 * MIB)
        samples["moved"] = fill(volume, "moved", 100)
        generation = volume.generation
        with monkeypatch.context() as limits:
            limits.setattr(transactions, "CATALOG_EXTENTS_MAX", 2)
            with pytest.raises(dlfs.SpaceError, match="nothing was changed"):
                volume.shrink([1])
        volume.refresh()
        assert volume.generation == generation
        volume.shrink([1])
        assert volume.uri == files[0]
        assert {name: read_dataset(volume, name) for name in samples} == samples
        assert list(volume.verify()) == []


def test_shrinking_goes_on_after_an_error_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "STEP_BYTES", STEP_CHUNKS * CHUNK)
    files = [str(tmp_path / f"member{number}") for number in range(3)]
    dlfs.format_volume(files[0], size_bytes=4 * MIB, chunk_bytes=CHUNK)
    steps = iter(range(100))
    copy = moving._copy

    def copy_twice(*arguments: Any) -> None:
        if next(steps) == 2:
            raise dlfs.SpaceError("no room, which nobody foresaw")
        copy(*arguments)

    monkeypatch.setattr(moving, "_copy", copy_twice)
    with dlfs.open(files[0]) as volume:
        samples = {"kept": fill(volume, "kept", 420)}
        volume.grow(files[1], size_bytes=4 * MIB)
        samples["moved"] = fill(volume, "moved", 100)
        with pytest.raises(dlfs.SpaceError, match=r"64.0 KiB of .* were moved before"):
            volume.shrink([1])
        volume.refresh()
        assert {name: read_dataset(volume, name) for name in samples} == samples
        assert list(volume.verify()) == []
        volume.grow(files[2], size_bytes=4 * MIB)
        volume.shrink([1])
        assert volume.uri == f"{files[0]},{files[2]}"
        assert {name: read_dataset(volume, name) for name in samples} == samples
        assert list(volume.verify()) == []
