"""Requests that a kernel target refuses or cannot satisfy end in typed errors that name them."""

from __future__ import annotations

import errno
import struct

import pytest

from dlfs.block import open_device
from dlfs.block.nvme import NvmeCommand
from dlfs.block.nvme_tcp import NvmeTcpDevice
from dlfs.errors import DeviceError, DeviceLostError, NotFoundError
from tests.nvmet.guest import free_port
from tests.nvmet.shared import ALLOWED_HOST, OPEN, REFUSED_HOST, RESTRICTED
from tests.nvmet.target import KernelTarget, namespace_uuid

pytestmark = pytest.mark.qemu

IDENTIFY = 0x06
CONTROLLER_PAGE = 1
ONCS_OFFSET, ONCS_RESERVATIONS = 520, 1 << 5
NAMESPACE_PAGE = 0
RESCAP_OFFSET = 31
RESERVATION_REPORT = 0x0E
INVALID_OPCODE = 0x01


@pytest.mark.parametrize("host", [REFUSED_HOST, None], ids=["another", "default"])
def test_a_host_that_is_not_allowed_gets_an_error_that_names_it(
    kernel_target: KernelTarget, host: str | None
) -> None:
    options = {"hostnqn": host} if host else {}
    with pytest.raises(DeviceError, match=RESTRICTED) as caught:
        open_device(kernel_target.uri(RESTRICTED, **options))
    assert caught.value.errno == errno.EACCES
    assert f"127.0.0.1:{kernel_target.port}" in str(caught.value)
    if host:
        assert host in str(caught.value)


def test_a_host_that_is_allowed_reads(kernel_target: KernelTarget) -> None:
    with open_device(kernel_target.uri(RESTRICTED, hostnqn=ALLOWED_HOST)) as device:
        assert device.read(0, 4096) == bytes(4096)


def test_an_unknown_subsystem_is_not_found(kernel_target: KernelTarget) -> None:
    unknown = "nqn.2024-01.org.dlfs.test:unknown"
    with pytest.raises(NotFoundError, match=unknown) as caught:
        open_device(kernel_target.uri(unknown))
    assert f"127.0.0.1:{kernel_target.port}" in str(caught.value)


@pytest.mark.parametrize("nsid", [3, 1000, 0xFFFFFFFE])
def test_an_unallocated_namespace_is_not_found(kernel_target: KernelTarget, nsid: int) -> None:
    with pytest.raises(NotFoundError, match=f"nsid={nsid}") as caught:
        open_device(kernel_target.uri(OPEN, nsid))
    assert f"127.0.0.1:{kernel_target.port}" in str(caught.value)


def test_a_port_without_a_listener_is_lost_at_once() -> None:
    port = free_port()
    with pytest.raises(DeviceLostError, match=f"127.0.0.1:{port}"):
        open_device(f"nvme-tcp://127.0.0.1:{port}/{OPEN}?nsid=1")


def test_the_identity_is_that_of_the_namespace(kernel_target: KernelTarget) -> None:
    with open_device(kernel_target.uri(OPEN, 2)) as device:
        assert str(namespace_uuid(OPEN, 2)) in device.identity
        assert device.block_bytes == 4096


def test_the_kernel_reports_that_it_has_no_reservations(kernel_target: KernelTarget) -> None:
    """Linux has reservations since 6.13 (resv_enable); without them a writer has only its lease."""
    with open_device(kernel_target.uri(OPEN), writable=True) as device:
        assert isinstance(device, NvmeTcpDevice)
        page = bytearray(4096)
        result = device.runner.run_admin(NvmeCommand(IDENTIFY, cdw10=CONTROLLER_PAGE), page)
        assert result.status == 0
        assert not struct.unpack_from("<H", page, ONCS_OFFSET)[0] & ONCS_RESERVATIONS
        result = device.runner.run_admin(NvmeCommand(IDENTIFY, 1, cdw10=NAMESPACE_PAGE), page)
        assert result.status == 0
        assert page[RESCAP_OFFSET] == 0
        report = device.runner.run_io(NvmeCommand(RESERVATION_REPORT, 1, cdw10=15), bytearray(64))
        assert report.status == INVALID_OPCODE
        device.lock_exclusive("a writer without reservations")
        device.unlock()
