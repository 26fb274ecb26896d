"""Opening devices by URI."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.block import FileDevice, MemoryDevice, open_device
from dlfs.errors import NotFoundError, UsageError


def test_opens_files_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "odd,name:1.img"
    with FileDevice.create(path, MIB) as made:
        made.write(0, b"x" * 4096)
        uri = made.uri
    assert uri.startswith("file:")
    assert "," not in uri
    for engine in ("auto", "threads"):
        with open_device(uri, engine=engine) as device:
            assert device.read(0, 4096) == b"x" * 4096
            assert not device.writable
            assert device.uri == uri
    with open_device("mem:1MiB", writable=True) as device:
        assert device.size_bytes == MIB
    MemoryDevice.forget("1MiB")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("nvme-tcp+discover://host", "names many devices"),
        ("nvme-tcp://host", "parse device URI"),
    ],
)
def test_says_what_is_no_device(uri: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_device(uri)


def test_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.img"):
        open_device(str(tmp_path / "none.img"))
    with pytest.raises(NotFoundError, match="mem:nobody"):
        open_device("mem:nobody")
