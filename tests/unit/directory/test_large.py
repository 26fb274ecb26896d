"""Two million samples: built, shared, looked up, within the memory that the design allows."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dlfs._native.segment import build_segment
from dlfs.base.units import KIB
from dlfs.directory import DirectoryIdentity, DirectorySizes, load_directory
from dlfs.format.location import pack_locations

COUNT = 2_000_000
RESIDENT_BYTES_PER_SAMPLE = 32
MEMORY_BYTES_PER_SAMPLE = 430
SAMPLE_BYTES = 4096
DATASET = uuid.UUID(int=2)


def digits(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Decimal digits with leading zeros, ``uint8[n, width]``."""
    out = np.empty((len(numbers), width), np.uint8)
    rest = numbers.astype(np.int64)
    for place in reversed(range(width)):
        rest, digit = np.divmod(rest, 10)
        out[:, place] = digit + ord("0")
    return out


def paths_of(numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """``train/nDDDDD/image_DDDDDDDD.jpeg``, a thousand to a directory, packed."""
    template = np.frombuffer(b"train/n00000/image_00000000.jpeg", np.uint8)
    text = np.tile(template, (len(numbers), 1))
    text[:, 7:12] = digits(numbers // 1000, 5)
    text[:, 19:27] = digits(numbers, 8)
    offsets = np.arange(len(numbers) + 1, dtype=np.uint64) * np.uint64(len(template))
    return text.reshape(-1), offsets


def path_of(number: int) -> bytes:
    return b"train/n%05d/image_%08d.jpeg" % (number // 1000, number)


@pytest.fixture(scope="module")
def memory_before() -> int:
    """Resident memory before the directory is built, in bytes; the peak is counted from here on.

    Earlier tests of this process may have had more at a time, and may have some left.
    """
    with contextlib.suppress(OSError):  # a kernel without page monitoring cannot reset the peak
        Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def memory_bytes(field: str) -> int:
    """Return a field of this process's status, such as VmHWM, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * KIB


@pytest.fixture(scope="module")
def places(memory_before: int) -> NDArray[np.uint64]:
    """The location of each sample, in samples: they are packed in a shuffled order."""
    return np.random.default_rng(1).permutation(COUNT).astype(np.uint64)


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, places: NDArray[np.uint64]
) -> tuple[Path, DirectorySizes]:
    text, offsets = paths_of(np.arange(COUNT))
    locations = pack_locations(
        places * np.uint64(SAMPLE_BYTES), np.full(COUNT, SAMPLE_BYTES), np.arange(COUNT)
    )
    segment = build_segment(
        text,
        offsets,
        locations,
        dataset_uuid=DATASET.bytes,
        data_bytes=COUNT * SAMPLE_BYTES,
        chunk_bytes=64 * SAMPLE_BYTES,
    )
    path = tmp_path_factory.mktemp("large") / "segment"
    with path.open("wb") as file:
        file.write(segment.entries.data)
        file.write(segment.names.data)
    return path, DirectorySizes(segment.entries.nbytes, segment.names.nbytes)


def test_a_directory_of_two_million_samples_is_built_and_read_in_limited_memory(
    stored: tuple[Path, DirectorySizes],
    places: NDArray[np.uint64],
    memory_before: int,
    tmp_path: Path,
) -> None:
    path, sizes = stored
    assert sizes.entries_bytes <= RESIDENT_BYTES_PER_SAMPLE * COUNT

    def read_into(offset: int, memory: memoryview) -> None:
        with path.open("rb") as file:
            file.seek(offset)
            assert file.readinto(memory) == len(memory)

    identity = DirectoryIdentity(uuid.UUID(int=1), DATASET, "large")
    with load_directory(identity, sizes, read_into, root=tmp_path) as directory:
        assert len(directory) == COUNT
        chosen = np.random.default_rng(2).integers(0, COUNT, 200_000)
        text, offsets = paths_of(chosen)
        assert np.array_equal(directory.find_packed(text, offsets), chosen)
        text[::32] = ord("T")
        assert (directory.find_packed(text, offsets) == -1).all()
        assert directory.name(1_234_567) == path_of(1_234_567)
        assert directory.lower_bound(path_of(1_765_432)) == 1_765_432
        order = directory.order()
        assert np.array_equal(places[order], np.arange(COUNT, dtype=np.uint64))
        assert directory.rank_at(1_000_000 * SAMPLE_BYTES) == 1_000_000
        assert sum(1 for _ in directory.children(b"train")) == COUNT // 1000
        assert sum(1 for _ in directory.children(b"train/n01321")) == 1000
        assert directory.crcs([COUNT - 1]).tolist() == [COUNT - 1]
    assert memory_bytes("VmHWM") - memory_before < MEMORY_BYTES_PER_SAMPLE * COUNT
