"""The registry of devices in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlfs.base.units import KIB
from dlfs.block import MemoryDevice
from dlfs.errors import NotFoundError, UsageError


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    MemoryDevice.forget(request.node.name)


def test_bytes_outlive_closing_but_not_forgetting(name: str) -> None:
    with MemoryDevice(name, 64 * KIB, writable=True) as device:
        device.write(0, b"z" * 512)
    with MemoryDevice(name) as device:
        assert device.read(0, 512) == b"z" * 512
        assert device.size_bytes == 64 * KIB
    MemoryDevice.forget(name)
    MemoryDevice.forget(name)
    with pytest.raises(NotFoundError, match=name):
        MemoryDevice(name)


def test_a_forgotten_device_lives_until_its_users_close(name: str) -> None:
    old = MemoryDevice(name, 64 * KIB, writable=True)
    MemoryDevice.forget(name)
    old.write(0, b"z" * 512)
    with MemoryDevice(name, 32 * KIB) as new:
        assert new.read(0, 512) == bytes(512)
        assert old.read(0, 512) == b"z" * 512
    native = old.native
    old.close()
    assert native.closed


def test_sizes_must_agree(name: str) -> None:
    with MemoryDevice(name, 64 * KIB, block_bytes=4096) as device:
        assert device.block_bytes == 4096
        assert device.uri == f"mem:{name}?size=65536&block=4096"
    MemoryDevice(name, 64 * KIB).close()
    with pytest.raises(UsageError, match="expected 32768 bytes"):
        MemoryDevice(name, 32 * KIB)
    with pytest.raises(UsageError, match="bytes a block"):
        MemoryDevice(name, block_bytes=512)


def test_sizes_must_be_whole_blocks(name: str) -> None:
    with pytest.raises(UsageError, match="1000 bytes"):
        MemoryDevice(name, 1000)
    with pytest.raises(UsageError, match="blocks of 300"):
        MemoryDevice(name, 4096, block_bytes=300)
