"""Devices through SPDK, and whole volumes, against SPDK's target."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs._native.abi import NVME_DATA_BYTES_MAX
from dlfs.base.units import KIB, MIB
from dlfs.block import Kind, SpdkDevice, aligned_buffer, open_device, operation_error
from dlfs.block.lease import LeaseTimes
from dlfs.block.nvme import NvmeCommand
from dlfs.block.shared import SharedNamespaceDevice
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    NotFoundError,
    UsageError,
)
from tests.spdk.target import Namespace, SpdkTarget
from tests.support.descriptors import own_threads
from tests.support.volumes import write_dataset
from tests.support.waiting import retried

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:spdk"
IDENTIFY, READ, FLUSH = 0x06, 0x02, 0x00
CONTROLLER = 1
SAMPLES = {f"d{i % 5}/s{i:03}".encode(): random.Random(i).randbytes(i * 211) for i in range(300)}
ORDERED = [SAMPLES[path] for path in sorted(SAMPLES)]


@pytest.fixture(autouse=True)
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    times = LeaseTimes(renew_s=0.1, valid_s=20, drain_s=20, claim_s=0.25, poll_s=0.02)
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", times)


@pytest.fixture
def namespace(spdk_target: SpdkTarget) -> Iterator[str]:
    """Export a namespace of 32 MiB and return its URI."""
    with spdk_target.subsystem(NQN):
        yield spdk_target.spdk_uri(NQN)


def spdk_device(uri: str, *, writable: bool = True) -> SpdkDevice:
    device = open_device(uri, writable=writable)
    assert isinstance(device, SpdkDevice)
    return device


# ---- devices -------------------------------------------------------------------------------------


def test_both_initiators_see_one_namespace(spdk_target: SpdkTarget, namespace: str) -> None:
    with spdk_device(namespace) as ours, open_device(spdk_target.tcp_uri(NQN)) as other:
        assert ours.identity == other.identity
        assert (ours.size_bytes, ours.block_bytes) == (32 * MIB, 512)
        assert ours.info.subsystem_nqn == NQN.encode()
        assert ours.info.serial == b"DLFS"
        ours.write(64 * KIB, b"\x5a" * 4096)
        assert other.read(64 * KIB, 4096) == b"\x5a" * 4096


def test_operations_far_longer_than_a_transfer(namespace: str) -> None:
    data = random.Random(1).randbytes(8 * MIB)
    buffer = aligned_buffer(8 * MIB, 4096)
    for bounce in ("", " bounce=1"):
        with spdk_device(namespace + bounce) as device, device.queue_pair(3) as queue:
            assert device.info.max_transfer_bytes < 8 * MIB
            device.write(MIB, data)
            buffer[:] = 0
            assert queue.submit(Kind.READ, buffer, MIB, 1)
            assert queue.poll(-1) == [(1, 8 * MIB)]
            assert buffer.tobytes() == data


def test_the_deepest_queue_pair(namespace: str) -> None:
    data = random.Random(2).randbytes(4 * MIB)
    buffer = aligned_buffer(4 * MIB, 4096)
    with spdk_device(namespace) as device, device.queue_pair(4096) as queue:
        device.write(0, data)
        for tag in range(4096):
            part = buffer[tag * KIB : (tag + 1) * KIB]
            assert queue.submit(Kind.READ, part, tag * KIB, tag)
        done: list[int] = []
        while queue.in_flight:
            done += [tag for tag, result in queue.poll(-1) if result == KIB]
        assert sorted(done) == list(range(4096))
        assert buffer.tobytes() == data


def test_registered_memory_is_a_hint(namespace: str) -> None:
    buffer = aligned_buffer(4 * MIB, 2 * MIB)
    for bounce in ("", " bounce=1"):
        with spdk_device(namespace + bounce) as device, device.queue_pair(4) as queue:
            device.write(0, b"\x11" * 4096)
            queue.register(buffer)
            assert queue.submit(Kind.READ, buffer[:4096], 0, 1)
            assert queue.poll(-1) == [(1, 4096)]
            assert bytes(buffer[:4096]) == b"\x11" * 4096
            queue.register(None)


def test_single_commands(namespace: str) -> None:
    with spdk_device(namespace) as device:
        device.write(0, b"\x42" * 512)
        data = bytearray(4096)
        assert device.runner.run_admin(NvmeCommand(IDENTIFY, cdw10=CONTROLLER), data).status == 0
        assert data[4:24].rstrip() == b"DLFS"
        block = bytearray(512)
        assert device.runner.run_io(NvmeCommand(READ, nsid=1), block).status == 0
        assert block == b"\x42" * 512
        assert device.runner.run_io(NvmeCommand(FLUSH, nsid=1)).status == 0
        past_the_end = NvmeCommand(READ, nsid=1, cdw10=0xFFFFFFFF)
        assert device.runner.run_io(past_the_end, block).status == 0x80
        assert device.runner.run_admin(NvmeCommand(0xFF)).status != 0
        for size in (6, NVME_DATA_BYTES_MAX + 4):
            with pytest.raises(UsageError, match="multiple of 4"):
                device.runner.run_admin(NvmeCommand(IDENTIFY), bytearray(size))
    with pytest.raises(ClosedError, match="closed"):
        device.runner.run_admin(NvmeCommand(IDENTIFY, cdw10=CONTROLLER), data)


def test_devices_share_a_controller_until_the_last_is_closed(spdk_target: SpdkTarget) -> None:
    with spdk_target.subsystem(NQN, [Namespace(MIB), Namespace(2 * MIB, 4096)]):
        first = spdk_device(spdk_target.spdk_uri(NQN, 1))
        second = spdk_device(spdk_target.spdk_uri(NQN, 2))
        assert first.identity != second.identity
        controllers = spdk_target.call("nvmf_subsystem_get_controllers", nqn=NQN)
        assert len(controllers) == 1
        first.close()
        assert second.read(0, 4096) == bytes(4096)
        second.close()


def test_many_threads_open_and_close(namespace: str) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with spdk_device(namespace) as device:
                    assert len(device.read(0, 64 * KIB)) == 64 * KIB
        except (AssertionError, DeviceError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- the process ---------------------------------------------------------------------------------


def test_the_process_keeps_its_cpus_and_its_handler(namespace: str) -> None:
    script = f"""
import ctypes, os, signal
from dlfs.block import open_device
libc = ctypes.CDLL(None)
def handler():
    action = ctypes.create_string_buffer(256)
    libc.sigaction(int(signal.SIGBUS), None, action)
    return action.raw[:8]  # the address of the handler
before = os.sched_getaffinity(0), handler()
with open_device({namespace!r}) as device:
    assert device.read(0, 4096) == bytes(4096)
    affinities = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    assert (os.sched_getaffinity(0), handler()) == before
    assert before[0] in affinities
print("ended well")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended well\n"
    assert done.stderr == ""


def test_nothing_is_left_of_a_closed_device(namespace: str) -> None:
    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(own_threads())

    spdk_device(namespace).close()
    before = state()
    for _ in range(3):
        with spdk_device(namespace) as device, device.queue_pair(8):
            device.read(0, 4096)
    assert state() == before


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("huge=1", "without huge pages"),
        ("shm_id=5", "shm_id"),
        ("cores=0+0", "cores"),
    ],
)
def test_options_that_the_process_cannot_change_any_more(
    namespace: str, option: str, says: str
) -> None:
    with spdk_device(namespace), pytest.raises(DeviceError, match=says):
        open_device(f"{namespace} {option}")


def test_a_pcie_device_needs_pci_from_the_start(namespace: str) -> None:
    with spdk_device(namespace), pytest.raises(DeviceError, match="without PCI"):
        open_device("spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=1")


# ---- what goes wrong -----------------------------------------------------------------------------


def test_what_is_not_there(spdk_target: SpdkTarget, namespace: str) -> None:
    with pytest.raises(NotFoundError, match="no namespace 7"):
        open_device(spdk_target.spdk_uri(NQN, 7))
    with pytest.raises(DeviceLostError, match=f"{NQN}-none"):
        open_device(spdk_target.spdk_uri(f"{NQN}-none"))
    nobody = namespace.replace(f"trsvcid={spdk_target.port}", "trsvcid=1")
    with pytest.raises(DeviceLostError, match="trsvcid=1 "):
        open_device(nobody)
    with pytest.raises(UsageError, match="adrfam"):
        open_device(namespace.replace("adrfam=IPv4", "adrfam=what"))


def test_a_frozen_target_is_a_timeout_and_then_goes_on() -> None:
    with SpdkTarget() as target:
        target.add(NQN)
        uri = target.spdk_uri(NQN, timeout_ms=300, reconnect_ms=60_000, keepalive_ms=0)
        with spdk_device(uri) as device:
            device.write(0, b"\x33" * 4096)
            target.freeze()
            try:
                with pytest.raises(DeviceTimeoutError, match="read spdk:"):
                    device.read(0, 4096)
            finally:
                target.thaw()
            assert device.read(0, 4096) == b"\x33" * 4096


def test_a_target_that_does_not_return_is_lost_within_the_time_limit() -> None:
    with SpdkTarget() as target:
        target.add(NQN)
        uri = target.spdk_uri(NQN, timeout_ms=2000, reconnect_ms=500, connect_ms=500)
        with spdk_device(uri) as device, device.queue_pair(4) as queue:
            buffer = aligned_buffer(4096, 4096)
            target.kill()
            assert queue.submit(Kind.READ, buffer, 0, 1)
            ((tag, code),) = queue.poll(-1)
            assert tag == 1
            assert isinstance(
                operation_error(device.uri, Kind.READ, 0, 4096, code), DeviceLostError
            )
            with pytest.raises(DeviceLostError):
                device.runner.run_admin(NvmeCommand(IDENTIFY, cdw10=CONTROLLER), bytearray(4096))
            with pytest.raises(DeviceLostError):
                device.flush()
            target.start()
            assert read_when_back(device) == bytes(4096)


def read_when_back(device: SpdkDevice) -> bytes:
    """Read the first 4 KiB as soon as a lost device is connected again."""
    return retried(lambda: device.read(0, 4096), DeviceLostError)


def test_a_flush_reports_a_lost_cache(tmp_path: Path) -> None:
    with SpdkTarget() as target:
        target.add(NQN, [Namespace(path=tmp_path / "disk")])
        with spdk_device(target.spdk_uri(NQN)) as device:
            device.write(0, bytes(4096))
            device.flush()
            device.write(0, b"\x01" * 4096)
            target.kill()
            target.start()
            with pytest.raises(DeviceError, match="flush spdk:"):
                device.flush()
            device.write(0, b"\x02" * 4096)
            device.flush()


# ---- volumes -------------------------------------------------------------------------------------


def make_volume(uri: str) -> None:
    dlfs.format_volume([uri], chunk_bytes=64 * KIB)
    write_dataset(uri, "ds", SAMPLES)


def read_epoch(dataset: dlfs.Dataset, seed: int) -> list[bytes]:
    """Read an epoch in global order; return the samples by index."""
    found: dict[int, bytes] = {}
    for batch in dataset.batches(16, shuffle="global", seed=seed):
        for index, data in zip(batch.indices, batch, strict=True):
            assert int(index) not in found
            found[int(index)] = bytes(data)
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("spdk", {}), ("nvme-tcp", {}), ("nvme-tcp", {"hdgst": 1, "ddgst": 1})],
    ids=["spdk", "nvme-tcp", "nvme-tcp-digests"],
)
def test_a_volume(spdk_target: SpdkTarget, scheme: str, options: dict[str, int]) -> None:
    with spdk_target.subsystem(NQN):
        make = spdk_target.spdk_uri if scheme == "spdk" else spdk_target.tcp_uri
        uri = make(NQN, **options)
        make_volume(uri)
        with dlfs.open(uri) as volume:
            assert not list(volume.verify())
            with volume.dataset("ds") as dataset:
                assert [bytes(data) for data in dataset.read(range(len(dataset)))] == ORDERED
                assert read_epoch(dataset, 1) == ORDERED


@pytest.mark.parametrize("scheme", ["spdk", "nvme-tcp"])
def test_a_target_that_is_killed_in_the_middle_of_epochs(tmp_path: Path, scheme: str) -> None:
    with SpdkTarget() as target:
        target.add(NQN, [Namespace(path=tmp_path / "disk")])
        make = target.spdk_uri if scheme == "spdk" else target.tcp_uri
        uri = make(NQN, reconnect_ms=10_000)
        make_volume(uri)
        with dlfs.open(uri, memory_bytes=MIB) as volume, volume.dataset("ds") as dataset:
            for seed in range(3):
                found: dict[int, bytes] = {}
                for count, batch in enumerate(dataset.batches(8, shuffle="global", seed=seed)):
                    if count == 5 + seed:
                        target.kill()
                        target.start()
                    for index, data in zip(batch.indices, batch, strict=True):
                        assert int(index) not in found
                        found[int(index)] = bytes(data)
                assert [found[index] for index in range(len(found))] == ORDERED
