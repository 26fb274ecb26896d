"""Attribute segments brought into memory, from whichever copies are right."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.attributes import (
    AttributeTable,
    load_attributes,
    load_attributes_whole,
    read_attributes,
)
from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, FormatError
from dlfs.format.geometry import DataSpace
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import Generation, load_generation
from tests.support.volumes import flip_copies

COUNT = 3000
COLUMNS = {"a": np.arange(COUNT), "b": np.arange(COUNT) * 0.5}


@pytest.fixture
def members(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.img") for number in range(2)]
    dlfs.format_volume(paths, size_bytes=4 * MIB, chunk_bytes=16 * KIB, replicas=2)
    zeros = np.zeros(COUNT, np.int64)
    with dlfs.open(paths) as volume:
        with volume.writer("ds") as writer:
            names = [b"%05d" % number for number in range(COUNT)]
            writer.add_batch(names, b"", zeros, zeros, attributes=COLUMNS)
        with volume.writer("plain") as writer:
            writer.add("a", b"x")
    return paths


@pytest.fixture
def generation(members: list[str]) -> Iterator[Generation]:
    devices = open_members(members)
    yield load_generation(devices)
    close_devices(devices)


def flip(generation: Generation, column: int, copy: int) -> None:
    """Flip a bit of a column, in one copy."""
    record = generation.catalog.datasets[0]
    space = DataSpace(generation.geometry, record.data_runs)
    extent = record.attribute_extent
    assert extent is not None
    address = extent.address + extent.head_bytes + column * 24576
    flip_copies(generation, space, address, copy)


def check(table: AttributeTable) -> None:
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(table.column(name), values)


def test_each_column_is_read_from_a_copy_where_it_is_right(
    members: list[str], generation: Generation
) -> None:
    record, geometry = generation.catalog.datasets[0], generation.geometry
    extent = record.attribute_extent
    assert extent is not None
    flip(generation, 0, copy=0)
    flip(generation, 1, copy=1)
    for root in (None, Path("/dev/shm")):
        uuid = generation.superblock.volume_uuid
        table = load_attributes(generation.sources, geometry, record, volume_uuid=uuid, root=root)
        check(table)
        table.close()
    memory = read_attributes(generation.sources, geometry, record)
    assert memory is not None
    assert memory.size % geometry.chunk_bytes == 0
    assert not memory[extent.segment_bytes :].any()
    check(AttributeTable.over(memory, extent.head_bytes))
    with dlfs.open(members) as volume:
        assert [finding.kind for finding in volume.verify()] == ["attributes"] * 2
    report = dlfs.repair(members)
    assert report.damaged == ()
    with dlfs.open(members) as volume:
        assert list(volume.verify()) == []


def test_a_column_without_a_valid_copy_is_reported_and_kept(
    members: list[str], generation: Generation
) -> None:
    record = generation.catalog.datasets[0]
    for copy in range(2):
        flip(generation, 0, copy)
    with pytest.raises(ChecksumError, match="column 'a': expected CRC32C"):
        read_attributes(generation.sources, generation.geometry, record)
    report = dlfs.repair(members)
    assert len(report.damaged) == 1
    assert "read column 'a'" in report.damaged[0]
    with dlfs.open(members) as volume, volume["ds"] as dataset:
        with pytest.raises(FormatError, match="column 'a'"):
            dataset.column("a")
        np.testing.assert_array_equal(dataset.column("b"), COLUMNS["b"])


def test_a_whole_segment_can_be_lent_by_its_descriptor(generation: Generation) -> None:
    record, plain = generation.catalog.datasets
    extent = record.attribute_extent
    assert extent is not None
    place = (generation.sources, generation.geometry)
    part = load_attributes_whole(*place, record, diagnose=lambda: None)
    assert part is not None
    copy = os.dup(part.descriptor)
    memory = mmap.mmap(copy, extent.segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    with pytest.raises(PermissionError):
        os.pwrite(copy, b"x", 0)
    os.close(copy)
    part.release()
    check(AttributeTable.over(np.frombuffer(memory, np.uint8), extent.head_bytes))
    assert load_attributes_whole(*place, plain, diagnose=lambda: None) is None
    assert read_attributes(generation.sources, generation.geometry, plain) is None
