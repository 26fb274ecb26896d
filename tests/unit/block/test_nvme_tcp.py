"""Devices over NVMe/TCP, against an honest target."""

from __future__ import annotations

import random

import pytest

from dlfs.block import NvmeTcpAssociation, NvmeTcpDevice, NvmeTcpUri, open_device, parse_uri
from dlfs.block.nvme import NvmeCommand
from dlfs.errors import ClosedError, DeviceError, DeviceLostError, NotFoundError, UsageError
from dlfs.testing.nvme import DEFAULT_NQN, DISCOVERY_NQN, ScriptedTarget
from dlfs.units import KIB, MIB

IDENTIFY = NvmeCommand(0x06, cdw10=1)


def address_of(uri: str) -> NvmeTcpUri:
    parsed = parse_uri(uri)
    assert isinstance(parsed, NvmeTcpUri)
    return parsed


@pytest.mark.parametrize("options", ["", "&hdgst=1", "&ddgst=1", "&hdgst=1&ddgst=1"])
def test_reads_what_was_written(options: str) -> None:
    data = random.Random(1).randbytes(MIB)
    with ScriptedTarget() as target, open_device(target.uri() + options, writable=True) as device:
        assert isinstance(device, NvmeTcpDevice)
        assert device.identity.startswith("nvme:uuid:")
        for offset, length in ((0, MIB), (512 * KIB, 512), (4096, 8 * KIB), (0, 128 * KIB)):
            device.write(offset, data[:length])
            assert device.read(offset, length) == data[:length]
        device.flush()
        status = device.status()
    assert status.connected
    assert status.reconnects == status.retries == status.protocol_errors == 0
    assert status.last_error == ""


def test_runs_single_commands() -> None:
    with ScriptedTarget() as target, open_device(target.uri()) as device:
        assert isinstance(device, NvmeTcpDevice)
        data = bytearray(4096)
        assert device.runner.run_admin(IDENTIFY, data).status == 0
        assert data[768 : 768 + len(DEFAULT_NQN)] == DEFAULT_NQN.encode()
        assert device.runner.run_admin(NvmeCommand(0xC5)).status == 0x001
        assert device.runner.run_io(NvmeCommand(0x00, nsid=device.nsid)).status == 0
        with pytest.raises(UsageError):
            device.runner.run_admin(IDENTIFY, bytearray(8192))
    with pytest.raises(ClosedError):
        device.runner.run_admin(IDENTIFY, data)
    with pytest.raises(ClosedError):
        _ = device.runner


def test_a_controller_alone_runs_admin_commands() -> None:
    with (
        ScriptedTarget() as target,
        NvmeTcpAssociation([("127.0.0.1", target.port)], DISCOVERY_NQN) as association,
    ):
        data = bytearray(4096)
        assert association.run_admin(IDENTIFY, data).status == 0
        assert association.status().namespace_id is None
        with pytest.raises(DeviceError, match="0x00"):
            association.run_io(NvmeCommand(0x00))


def test_what_is_not_there_is_named() -> None:
    with ScriptedTarget() as target:
        port = target.port
        wrong = f"nvme-tcp://127.0.0.1:{port}/nqn.2024-01.org.example:nobody?nsid=1"
        with pytest.raises(NotFoundError, match=r"subsystem nqn.2024-01.org.example:nobody.*0x182"):
            open_device(wrong)
        with pytest.raises(NotFoundError, match="namespace 9 of"):
            open_device(f"nvme-tcp://127.0.0.1:{port}/{DEFAULT_NQN}?nsid=9")
    with pytest.raises(DeviceLostError, match=rf"connect 127.0.0.1:{port}: Connection refused"):
        open_device(f"nvme-tcp://127.0.0.1:{port}/{DEFAULT_NQN}?nsid=1")
