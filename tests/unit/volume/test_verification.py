"""Verification of samples larger than a chunk: each part has a checksum, and a finding names it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.block import open_device
from dlfs.connection.segment_loading import load_segment
from dlfs.format.constants import DIRECTORY_BLOCK_BYTES
from dlfs.format.geometry import DataSpace
from dlfs.store.transaction import load_generation
from tests.fault.test_order import seal
from tests.support.files import flip_bit
from tests.support.volumes import new_volume, write_dataset

CHUNK = 16 << 10
LARGE = random.Random(7).randbytes(5 * CHUNK + 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a volume of two versions, of which the second has a second large sample."""
    path = tmp_path / "volume.img"
    dlfs.format_volume(path, size_bytes=4 << 20, chunk_bytes=CHUNK)
    with dlfs.open(path) as volume:
        with volume.writer("a") as writer:
            writer.add("small", b"x" * 100)
            writer.add("large", LARGE, attributes={})
        with volume.append("a") as writer:
            writer.add("larger", LARGE + LARGE)
    return path


def position(path: Path, version: int, name: str, offset: int) -> int:
    """Return the offset on the device of a byte of a sample."""
    with open_device(str(path)) as device:
        generation = load_generation([device])
        record = next(r for r in generation.catalog.datasets if r.version == version)
        with load_segment(generation, record, shared=False) as directory:
            address = int(directory.addresses(directory.find([name.encode()]))[0])
        return DataSpace(generation.geometry, record.data_runs).resolve(address + offset)[1]


def test_the_damaged_parts_of_a_large_sample_are_named(path: Path) -> None:
    with dlfs.open(path) as volume:
        assert list(volume.verify()) == []
    damaged = [position(path, 2, "larger", offset) for offset in (CHUNK + 5, 10 * CHUNK + 7)]
    for at in damaged:
        flip_bit(path, at)
    with dlfs.open(path) as volume:
        first, last = volume.verify()
    assert (first.path, first.sample_offset_bytes, first.length_bytes) == (b"larger", CHUNK, CHUNK)
    assert (last.path, last.sample_offset_bytes) == (b"larger", 10 * CHUNK)
    assert last.length_bytes == 2 * len(LARGE) - 10 * CHUNK
    assert first.offset_bytes == damaged[0] - 5
    assert last.offset_bytes == damaged[1] - 7
    assert first.member == str(path)
    assert (
        f"'larger' of dataset 'a' version 2, bytes {CHUNK} to {2 * CHUNK - 1} of {2 * len(LARGE)}: "
        f"{path} at byte {first.offset_bytes}, {CHUNK} bytes: expected CRC32C"
    ) in str(first)


def test_an_appended_version_has_the_parts_of_the_one_before(path: Path) -> None:
    with dlfs.open(path) as volume:
        first, second = volume.dataset("a", 1), volume.dataset("a", 2)
        parts = first.directory.parts
        assert np.array_equal(second.directory.parts[: len(parts)], parts)
        assert np.count_nonzero(parts) == 6
        assert np.count_nonzero(second.directory.parts) == 6 + 11
    flip_bit(path, position(path, 1, "large", 3 * CHUNK))
    with dlfs.open(path) as volume:
        findings = list(volume.verify())
    assert [(f.version, f.path, f.sample_offset_bytes) for f in findings] == [
        (1, b"large", 3 * CHUNK),
        (2, b"large", 3 * CHUNK),
    ]


def test_a_checksum_that_is_not_that_of_the_parts_is_a_finding(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = content.index(b"DLFSDIR1")
    (entries_bytes,) = struct.unpack_from("<Q", content, start + 64)
    segment = content[start : start + entries_bytes]
    (parts,) = struct.unpack_from("<Q", segment, 176)
    assert parts % DIRECTORY_BLOCK_BYTES == 0
    segment[parts + 4 * 1] ^= 1
    seal(segment)
    content[start : start + entries_bytes] = segment
    path.write_bytes(content)
    with dlfs.open(path) as volume:
        kinds = [(finding.kind, finding.version) for finding in volume.verify()]
        assert kinds[0][0] == "directory"
        assert "sample 0 'large' to be that of its parts" in str(next(iter(volume.verify())))
        with volume.dataset("a", kinds[0][1]) as dataset:
            assert dataset.get("large") == LARGE


def test_a_dataset_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    path = new_volume(tmp_path / "volume.img", size_bytes=4 << 20, chunk_bytes=CHUNK)
    write_dataset(path, "a", {"x": b"1" * 5000})
    write_dataset(path, "b", {"y": b"2" * 5000})
    with dlfs.open(path) as volume, dlfs.open(path) as other:

        def remove(_done: int, _total: int) -> None:
            if "b" in other:
                other.remove("b")

        findings = list(volume.verify(progress=remove))
    assert [str(one) for one in findings] == []
