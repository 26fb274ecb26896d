"""What a mount with little memory reads from the devices, and what memory its server takes."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dlfs.base.units import KIB, MIB
from tests.fuse.mounting import Mount, mounted, served_by
from tests.support.volumes import new_volume, write_dataset

pytestmark = pytest.mark.fuse

PAGE = 4 * KIB
CHUNK = 256 * KIB
MEMORY = 16 * MIB
SMALL = {f"small/{number:02d}": 100_000 + number for number in range(20)}
LARGE = {f"large{number}": 24 * MIB for number in range(3)}


@functools.cache
def content(path: str) -> bytes:
    """Return the bytes of a file."""
    length = (SMALL | LARGE)[path]
    return (random.Random(path).randbytes(4099) * (length // 4099 + 1))[:length]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with a dataset that is larger than the memory of its mounts."""
    volume = new_volume(tmp_path_factory.mktemp("memory") / "volume.img", size_bytes=128 * MIB)
    write_dataset(volume, "train", {path: content(path) for path in SMALL | LARGE})
    return volume


@pytest.fixture
def small_mount(volume: Path, server: str, tmp_path: Path) -> Iterator[Mount]:
    options = served_by(server)
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", cache_bytes=MEMORY, **options) as made:
        (made / "train/small/00").stat()  # opens the dataset
        yield made


def opened(stack: ExitStack, mount: Mount, paths: dict[str, int]) -> dict[str, int]:
    """Open files whose pages the kernel requests one at a time."""
    files = {}
    for path in paths:
        files[path] = os.open(mount / f"train/{path}", os.O_RDONLY)
        stack.callback(os.close, files[path])
        os.posix_fadvise(files[path], 0, 0, os.POSIX_FADV_RANDOM)
    return files


def read_bytes_of(mount: Mount) -> int:
    """Return the bytes that a server has read from devices; 0 where files lie in memory."""
    fields = Path(f"/proc/{mount.pid}/io").read_text().split()
    return int(fields[fields.index("read_bytes:") + 1])


def test_small_files_that_are_read_by_pages_are_read_once(small_mount: Mount) -> None:
    """Meanwhile other files need more memory than there is."""
    with ExitStack() as stack:
        small = opened(stack, small_mount, SMALL)
        large = opened(stack, small_mount, LARGE)
        before = read_bytes_of(small_mount)
        pressure = 0
        for offset in range(0, max(SMALL.values()), PAGE):
            for path, file in small.items():
                expected = content(path)[offset : offset + PAGE]
                assert os.pread(file, PAGE, offset) == expected
            for path, file in large.items():
                at = LARGE[path] - (offset // PAGE + 1) * 3 * CHUNK  # nothing is read ahead
                assert os.pread(file, PAGE, at) == content(path)[at : at + PAGE]
                pressure += CHUNK
        assert pressure > MEMORY
        # A sample lies in whole blocks, of which it needs not all.
        once = pressure + sum(length + 2 * PAGE for length in SMALL.values())
        assert read_bytes_of(small_mount) - before <= 1.1 * once


def test_random_pages_of_a_large_file_cost_a_chunk_each(small_mount: Mount) -> None:
    draw = random.Random(3)
    with ExitStack() as stack:
        path, file = next(iter(opened(stack, small_mount, LARGE).items()))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_NORMAL)
        expected = content(path)
        pages = draw.sample(range(1, LARGE[path] // PAGE), 100)
        before = read_bytes_of(small_mount)
        for page in pages:
            at = page * PAGE
            assert os.pread(file, PAGE, at) == expected[at : at + PAGE]
        assert read_bytes_of(small_mount) - before <= len(pages) * CHUNK


def memory_peak_of(mount: Mount) -> int:
    fields = Path(f"/proc/{mount.pid}/status").read_text().split()
    return int(fields[fields.index("VmHWM:") + 1]) * KIB


def test_files_larger_than_the_memory_in_turns(small_mount: Mount) -> None:
    with ExitStack() as stack:
        files = opened(stack, small_mount, LARGE)
        before = memory_peak_of(small_mount)
        for offset in range(0, max(LARGE.values()), MIB):
            for path, file in files.items():
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_NORMAL)
                assert os.pread(file, MIB, offset) == content(path)[offset : offset + MIB]
        # Of 72 MiB: its memory, and more for threads and the requests of each processor.
        more = MEMORY + 2 * MIB * (os.cpu_count() or 1)
        assert memory_peak_of(small_mount) - before <= MEMORY + more


def test_many_open_files_leave_memory_for_others(small_mount: Mount) -> None:
    """A file that is read while others wait to be read on is read from the devices once."""
    with ExitStack() as stack:
        for path, file in opened(stack, small_mount, SMALL).items():
            assert os.pread(file, PAGE, 0) == content(path)[:PAGE]
        before = read_bytes_of(small_mount)
        for path, length in LARGE.items():
            with open(small_mount / f"train/{path}", "rb", buffering=0) as file:
                for at in range(0, length, CHUNK):
                    assert file.read(CHUNK) == content(path)[at : at + CHUNK]
        assert read_bytes_of(small_mount) - before <= 1.1 * sum(LARGE.values())
