"""The bindings of NVMe/TCP: what they refuse, and how identifiers are written."""

from __future__ import annotations

import errno
from uuid import UUID

import pytest

from dlfs._native import abi
from dlfs._native.device import NativeDevice
from dlfs._native.nvme import format_namespace_id, open_nvme, read_status, run_command
from dlfs.errors import DeviceError, UsageError

HOST_ID = UUID("6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a")
NQN = "nqn.2024-01.org.example:a"


def open_with(**changes: object) -> NativeDevice:
    values: dict[str, object] = {
        "uri": "nvme-tcp:a test",
        "paths": [("127.0.0.1", 1)],
        "subsystem_nqn": NQN,
        "nsid": 1,
        "host_nqn": NQN,
        "host_id": HOST_ID,
        "header_digest": False,
        "data_digest": False,
        "timeout_ms": 1000,
        "connect_ms": 1000,
        "keepalive_ms": 0,
        "reconnect_ms": 0,
        "busy_poll_us": 0,
        "writable": False,
    }
    return open_nvme(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"paths": []},
        {"paths": [("127.0.0.1", 1)] * 5},
        {"paths": [("127.0.0.1", 0)]},
        {"paths": [("127.0.0.1", 65536)]},
        {"paths": [("", 1)]},
        {"paths": [("x" * 256, 1)]},
        {"nsid": 0xFFFFFFFF},
        {"subsystem_nqn": ""},
        {"subsystem_nqn": "x" * 224},
        {"host_nqn": "x" * 224},
        {"timeout_ms": 0},
        {"connect_ms": 0},
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="open nvme-tcp:a test"):
        open_with(**changes)


def test_other_devices_have_no_controller() -> None:
    with NativeDevice.memory(4096, 512, uri="mem:a test") as device:
        for use in (
            lambda: read_status(device),
            lambda: run_command(device, (0,) * 8, None, io_queue=False, to_device=False),
        ):
            with pytest.raises(DeviceError) as caught:
                use()
            assert caught.value.errno == errno.ENOTSUP
            assert "mem:a test" in str(caught.value)


def test_identifiers_as_text() -> None:
    value = HOST_ID.bytes
    assert format_namespace_id(abi.NVME_ID_NONE, value) is None
    assert format_namespace_id(abi.NVME_ID_UUID, value) == f"uuid:{HOST_ID}"
    assert format_namespace_id(abi.NVME_ID_NGUID, value) == f"nguid:{HOST_ID.hex}"
    assert format_namespace_id(abi.NVME_ID_EUI64, value) == f"eui64:{HOST_ID.hex[:16]}"
