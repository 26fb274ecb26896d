"""Devices over NVMe/TCP, against a target without faults, or a lost one."""

from __future__ import annotations

import contextlib
import errno
import random
from uuid import UUID

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import (
    Kind,
    NvmeTcpAssociation,
    NvmeTcpDevice,
    aligned_buffer,
    open_device,
)
from dlfs.block.nvme import NvmeCommand
from dlfs.block.nvme_tcp import QUEUE_PAIRS_OF_WRITER
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    LimitError,
    NotFoundError,
    UsageError,
)
from tests.support.nvme import (
    DEFAULT_NQN,
    DISCOVERY_NQN,
    Event,
    Fault,
    FaultScript,
    Namespace,
    ScriptedTarget,
    Settings,
    Subsystem,
)
from tests.support.nvme.faults import Omit
from tests.support.waiting import wait_for

IDENTIFY = NvmeCommand(0x06, cdw10=1)


@pytest.mark.parametrize(
    "options", ["", "&hdgst=1", "&ddgst=1", "&hdgst=1&ddgst=1", "&busy_poll_us=1000"]
)
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
            device.runner.run_admin(IDENTIFY, bytearray(65_537))
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


HASTY = "&timeout_ms=200&connect_ms=1000&reconnect_ms=400"


def test_another_path_is_used_when_the_first_is_lost() -> None:
    data = random.Random(2).randbytes(64 * KIB)
    identity = UUID("6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a")
    spaces = [Namespace(2 * MIB, identity=identity) for _ in range(2)]
    first, second = (ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) for space in spaces)
    for space in spaces:
        space.contents[: len(data)] = data
    with first, second:
        uri = f"{first.uri()}&path=127.0.0.1:{second.port}"
        with open_device(uri) as device, device.queue_pair(8) as queue:
            assert isinstance(device, NvmeTcpDevice)
            buffer = aligned_buffer(4096, 4096)
            assert queue.submit(Kind.READ, buffer, 4096, 1)
            assert queue.poll(-1) == [(1, 4096)]
            first.kill()
            assert queue.submit(Kind.READ, buffer, 8192, 2)
            assert queue.poll(-1) == [(2, 4096)]
            assert buffer.tobytes() == data[8192 : 8192 + 4096]
            assert device.status().path == 1
            first.restart()
            second.kill()
            assert device.read(0, len(data)) == data
            assert device.status().path == 0
            assert device.status().reconnects == 2
        first.kill()
        second.restart()
        with open_device(uri) as device:
            assert device.read(0, len(data)) == data


def test_a_different_namespace_behind_a_path_is_not_taken_for_the_same() -> None:
    with ScriptedTarget() as first, ScriptedTarget() as second:
        uri = f"{first.uri()}&path=127.0.0.1:{second.port}{HASTY}"
        with open_device(uri) as device:
            first.kill()
            with pytest.raises((DeviceLostError, DeviceTimeoutError)):
                device.read(0, 4096)


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_few_queue_pairs(queues: int) -> None:
    namespace = Namespace(64 * MIB)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [namespace])]) as target:
        dlfs.format_volume(target.uri())
        with dlfs.open(target.uri()) as volume, volume.writer("first") as writer:
            writer.add("a", b"a")
    few = Subsystem(DEFAULT_NQN, [namespace], settings=Settings(io_queues=queues))
    with ScriptedTarget([few]) as target:
        refused = pytest.raises(LimitError, match=f"allows this host {queues}, .* 1, a writer 3")
        enough = contextlib.nullcontext()
        with dlfs.open(target.uri()) as volume:
            assert volume["first"].get("a") == b"a"
            assert sum(len(batch) for batch in volume["first"].batches(1, seed=1)) == 1
        with (
            refused if queues < QUEUE_PAIRS_OF_WRITER else enough,
            dlfs.open(target.uri()) as volume,
            volume.writer("second") as writer,
        ):
            writer.add("b", b"b")


@pytest.mark.parametrize("block_bytes", [8 * KIB, 64 * KIB])
def test_blocks_that_are_larger_than_a_superblock(block_bytes: int) -> None:
    namespace = Namespace(64 * MIB, block_bytes=block_bytes)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [namespace])]) as target:
        for call in (dlfs.format_volume, dlfs.open):
            with pytest.raises(UsageError, match=f"512 to 4096 bytes, got blocks of {block_bytes}"):
                call(target.uri())


def test_a_flush_reports_that_writes_before_a_reset_may_be_lost() -> None:
    with ScriptedTarget() as target, open_device(target.uri(), writable=True) as device:
        assert isinstance(device, NvmeTcpDevice)
        device.write(0, bytes(4096))
        target.kill()
        target.restart(lose_cache=True)
        with pytest.raises(DeviceError, match=r"lost after writes.* write cache") as caught:
            device.flush()
        assert caught.value.errno == errno.EIO
        device.flush()  # no write since the last flush
        device.write(0, bytes(4096))
        device.flush()
        target.drop_connections()
        device.flush()  # all writes are durable
        assert device.status().reconnects == 2


def test_errors_name_the_target_and_the_failure() -> None:
    with ScriptedTarget() as target, open_device(target.uri() + HASTY, writable=True) as device:
        assert device.read(0, 4096) == bytes(4096)  # so that there is a queue pair
        target.pause()
        with pytest.raises(DeviceTimeoutError) as timeout:
            device.write(0, bytes(4096))
        assert f"127.0.0.1:{target.port}" in str(timeout.value)
        assert "no answer to a command in time" in str(timeout.value)
        target.resume()
        assert device.read(0, 4096) == bytes(4096)
        target.kill()
        with pytest.raises(DeviceLostError, match="Connection refused"):
            device.read(0, 4096)
        with pytest.raises(DeviceLostError):
            device.queue_pair(4)
        with pytest.raises(DeviceLostError):
            device.flush()


def test_a_lost_device_is_found_again() -> None:
    with ScriptedTarget() as target, open_device(target.uri() + HASTY) as device:
        target.kill()
        with pytest.raises(DeviceLostError):
            device.read(0, 4096)
        target.restart()
        while True:  # it stays lost for a second
            with contextlib.suppress(DeviceLostError):
                assert device.read(0, 4096) == bytes(4096)
                break


@pytest.mark.parametrize("keepalive_ms", [0, 1])
def test_keep_alives_can_be_turned_off(keepalive_ms: int) -> None:
    """With 0 the target does not watch the host; with 1 ms it ends the association repeatedly."""
    with ScriptedTarget() as target, open_device(target.uri(keepalive_ms=keepalive_ms)) as device:
        assert device.read(0, 4096) == bytes(4096)


def test_keep_alives_are_sent_in_time() -> None:
    """Only the admin queue's keep-alives keep the controller alive, not commands of an I/O queue.

    They are sent twice as often as required, so a busy machine may be late by two seconds.
    """
    with ScriptedTarget() as target, open_device(target.uri(keepalive_ms=4000)) as device:

        def read_until_sent() -> bool:
            assert device.read(0, 4096) == bytes(4096)
            return target.counters.commands[Event.KEEP_ALIVE] >= 3

        wait_for(read_until_sent, "three keep-alives")
        assert target.counters.keep_alives_missed == 0
        assert isinstance(device, NvmeTcpDevice)
        assert device.status().reconnects == 0


def test_a_name_is_tried_at_all_its_addresses() -> None:
    with ScriptedTarget() as target:  # listens on 127.0.0.1 only; the name may resolve to ::1 first
        with open_device(target.uri().replace("127.0.0.1", "localhost")) as device:
            assert device.read(0, 4096) == bytes(4096)
        with pytest.raises(NotFoundError, match=r"find the address of nowhere\.invalid"):
            open_device(target.uri().replace("127.0.0.1", "nowhere.invalid"))


def test_ipv6() -> None:
    with ScriptedTarget(ipv6=True) as target:
        uri = target.uri().replace("127.0.0.1", "[::1]")
        with open_device(uri) as device:
            assert device.read(0, 4096) == bytes(4096)


def test_one_unanswered_command_among_answered_ones() -> None:
    script = FaultScript([Fault(Event.READ, Omit(), nth=5)])
    with ScriptedTarget(script=script) as target, open_device(target.uri() + HASTY) as device:
        assert isinstance(device, NvmeTcpDevice)
        waiting = set(range(4))
        with device.queue_pair(8) as queue:
            for tag in waiting:
                assert queue.submit(Kind.READ, aligned_buffer(4096, 4096), tag * 4096, tag)
            while script.played == 0 or device.status().timeouts == 0:  # keeps the queue busy
                for tag, result in queue.poll(-1):
                    assert result == 4096
                    assert queue.submit(Kind.READ, aligned_buffer(4096, 4096), 0, tag)
            while queue.in_flight:
                assert all(result == 4096 for _, result in queue.poll(-1))
        assert device.status().reconnects >= 1  # more on a slow machine
