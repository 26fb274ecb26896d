"""A placeholder for a device that cannot be opened fails with the reason at every use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlfs.block import BlockDevice, MissingDevice
from dlfs.errors import DeviceLostError, NotFoundError


@pytest.mark.parametrize(
    "use",
    [
        lambda device: device.native,
        lambda device: device.queue_pair(4),
        lambda device: device.read(0, 512),
        lambda device: device.write(0, bytes(512)),
        lambda device: device.flush(),
        lambda device: device.lock_exclusive("a test"),
    ],
)
def test_every_use_is_a_loss_with_its_reason(use: Callable[[BlockDevice], object]) -> None:
    reason = NotFoundError("no such file")
    with MissingDevice("/dev/gone", reason) as device:
        with pytest.raises(DeviceLostError, match=r"/dev/gone.*no such file") as caught:
            use(device)
        assert caught.value.__cause__ is reason
        device.unlock()


def test_it_is_a_block_device_unlike_any_other() -> None:
    one, other = (MissingDevice("x", NotFoundError("gone")) for _ in range(2))
    assert one.identity != other.identity
    assert (one.size_bytes, one.writable) == (0, False)
    assert "gone" in repr(one)
