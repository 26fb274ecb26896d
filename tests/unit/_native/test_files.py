"""Reading files and ranges in batches from Python; ``native/tests/import`` has the errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from dlfs._native.files import CUT_SHORT, FILE_DTYPE, read_files, read_ranges, stat_files
from dlfs.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def batch(folder: int, names: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[Any], int]:
    """Paths and the array that describes files as they are now, one behind the other."""
    files = np.zeros(len(names), FILE_DTYPE)
    position = used = 0
    for file, name in zip(files, names, strict=True):
        status = os.stat(name, dir_fd=folder)
        file["position"], file["buffer_offset"] = position, used
        file["length_bytes"], file["modified_ns"] = status.st_size, status.st_mtime_ns
        position += len(name) + 1
        used += status.st_size
    paths = np.frombuffer(b"".join(name + b"\0" for name in names), np.uint8)
    return paths, files, used


def read(folder: int, names: list[bytes]) -> tuple[int, NDArray[Any], bytes]:
    paths, files, used = batch(folder, names)
    buffer = np.zeros(used, np.uint8)
    failed = read_files(folder, paths, files, buffer, follow_links=True, threads=4)
    return failed, files, buffer.tobytes()


def test_reads_every_file_into_its_place(folder: int, tmp_path: Path) -> None:
    names = [b"%d\n\xff" % i for i in range(100)]
    for i, name in enumerate(names):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"%d," % i * i)
    failed, files, data = read(folder, names)
    assert failed == 0
    assert not files["code"].any()
    assert data == b"".join(b"%d," % i * i for i in range(100))


def test_arrays_of_other_kinds_are_refused(folder: int) -> None:
    files, data = np.zeros(1, FILE_DTYPE), np.zeros(1, np.uint8)
    frozen = data.copy()
    frozen.flags.writeable = False
    for bad_files, buffer in cast(Any, [(data, data), (files[::-1][::2], frozen), (files, files)]):
        with pytest.raises(UsageError):
            read_ranges(bad_files, buffer, threads=1)


def test_reads_ranges_of_open_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)))
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    ranges = np.zeros(3, FILE_DTYPE)
    ranges["descriptor"] = descriptor
    ranges["position"] = [10, 0, 250]
    ranges["buffer_offset"] = [0, 3, 8]
    ranges["length_bytes"] = [3, 5, 7]
    buffer = np.zeros(15, np.uint8)
    failed = read_ranges(ranges, buffer, threads=2)
    os.close(descriptor)
    assert failed == 1
    assert ranges["code"].tolist() == [0, 0, CUT_SHORT]
    assert buffer[:8].tolist() == [10, 11, 12, 0, 1, 2, 3, 4]


def test_looks_at_files(folder: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").mkdir()
    names = [b"a", b"link", b"folder"]
    paths, want, _ = batch(folder, names)
    files = np.zeros(3, FILE_DTYPE)
    files["position"] = want["position"]
    assert stat_files(folder, paths, files, follow_links=True, threads=2) == 1
    assert files["code"].tolist() == [0, 0, -errno.ESTALE]
    assert files["length_bytes"][:2].tolist() == [5, 5]
    assert files["modified_ns"][:2].tolist() == want["modified_ns"][:2].tolist()
    assert stat_files(folder, paths, files, follow_links=False, threads=2) == 2
    (tmp_path / "a").unlink()
    assert stat_files(folder, paths, files, follow_links=True, threads=2) == 3
    assert files["code"][0] == -errno.ENOENT
