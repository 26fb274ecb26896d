"""Events and paths of SPDK's target: hot-plug and ANA states by JSON-RPC, under load.

DLFS_HOTPLUG_SECONDS and DLFS_ANA_TOGGLES ask for longer runs than usual.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import NvmeTcpDevice, open_device
from dlfs.block.host import host_nqn
from dlfs.errors import DeviceLostError
from dlfs.fabric.keys import KeyKind, generate_key, write_key
from tests.nvmet.guest import free_port
from tests.nvmet.volumes import LARGE, MEMORY_BYTES, add_large, assert_whole, read_epoch
from tests.spdk.target import Namespace, SpdkTarget
from tests.support.waiting import retried, until

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:events"
SECONDS = float(os.environ.get("DLFS_HOTPLUG_SECONDS", "3"))
TOGGLES = int(os.environ.get("DLFS_ANA_TOGGLES", "10"))
PAGE = 4096
TIMEOUT_S = 20


def opened(uri: str, *, writable: bool = False) -> NvmeTcpDevice:
    device = open_device(uri, writable=writable)
    assert isinstance(device, NvmeTcpDevice)
    return device


@dataclass
class TwoPaths:
    """A subsystem with ANA at two ports of a target."""

    target: SpdkTarget
    ports: list[int]
    tls: bool

    @property
    def uri(self) -> str:
        """URI of namespace 1 with both paths."""
        first, second = self.ports
        options = "timeout_ms=4000&reconnect_ms=10000" + "&tls_psk=psk" * self.tls
        return f"nvme-tcp://127.0.0.1:{first}/{NQN}?nsid=1&path=127.0.0.1:{second}&{options}"

    def _address(self, number: int) -> dict[str, str]:
        port = str(self.ports[number])
        return {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}

    def listen(self) -> None:
        """Listen on both ports."""
        for number in range(2):
            self.target.call(
                "nvmf_subsystem_add_listener",
                nqn=NQN, listen_address=self._address(number), secure_channel=self.tls,
            )  # fmt: skip

    def set_state(self, number: int, state: str) -> None:
        """Change the ANA state at one port."""
        self.target.call(
            "nvmf_subsystem_listener_set_ana_state",
            nqn=NQN,
            listen_address=self._address(number),
            ana_state=state,
        )


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def two_paths(
    request: pytest.FixtureRequest,
    spdk_target: SpdkTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TwoPaths]:
    """Export a RAM disk at two ports, as a subsystem with ANA, without and with TLS."""
    found = TwoPaths(spdk_target, [free_port(), free_port()], request.param)
    call = spdk_target.call
    call(
        "nvmf_create_subsystem",
        nqn=NQN, allow_any_host=not found.tls, serial_number="DLFS", ana_reporting=True,
    )  # fmt: skip
    if found.tls:
        monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))
        key = write_key("psk", generate_key(KeyKind.TLS))
        call("keyring_file_add_key", name="psk", path=str(key))
        call("nvmf_subsystem_add_host", nqn=NQN, host=host_nqn(), psk="psk")
    call("bdev_malloc_create", name="ana", num_blocks=48 * MIB // 512, block_size=512)
    call("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "ana", "nsid": 1})
    found.listen()
    try:
        yield found
    finally:
        call("nvmf_delete_subsystem", nqn=NQN)
        call("bdev_malloc_delete", name="ana")
        if found.tls:
            call("keyring_file_remove_key", name="psk")


def test_epochs_are_exact_while_the_states_are_toggled(two_paths: TwoPaths) -> None:
    dlfs.format_volume(two_paths.uri)
    with dlfs.open(two_paths.uri) as volume:
        add_large(volume)
    done = threading.Event()
    bad = ["inaccessible", "non_optimized"]

    def toggle() -> None:
        try:
            with opened(two_paths.uri) as device:
                for turn in range(TOGGLES):
                    here = device.status().path
                    two_paths.set_state(1 - here, "optimized")
                    two_paths.set_state(here, bad[turn % 2])
                    until(device, lambda s, here=here: s.connected and s.path != here)
                    if turn % 10 == 0:
                        two_paths.target.freeze()
                        time.sleep(0.2)
                        two_paths.target.thaw()
                assert device.status().ana_state == "optimized"
        finally:
            done.set()

    thread = threading.Thread(target=toggle)
    thread.start()
    epochs = 0
    with (
        dlfs.open(two_paths.uri, memory_bytes=MEMORY_BYTES) as volume,
        volume.dataset("large") as large,
    ):
        while not done.is_set():
            assert_whole(read_epoch(large, epochs), LARGE)
            epochs += 1
    thread.join()
    assert epochs > 0
    print(f"{TOGGLES} toggles, {epochs} epochs")


def test_writes_survive_a_change_of_the_path(two_paths: TwoPaths) -> None:
    chance = random.Random(1)
    with opened(two_paths.uri, writable=True) as device:
        for turn in range(8):
            here = device.status().path
            two_paths.set_state(1 - here, "optimized")
            two_paths.set_state(here, "inaccessible")
            data = chance.randbytes(64 * PAGE)
            device.write(0, data)
            assert device.read(0, len(data)) == data
            assert device.status().path_moves == turn + 1


def test_events_of_namespaces_arrive(two_paths: TwoPaths) -> None:
    call = two_paths.target.call
    call("bdev_malloc_create", name="second", num_blocks=MIB // 512, block_size=512)
    try:
        with opened(two_paths.uri) as device:
            end = time.monotonic() + TIMEOUT_S
            # nvmf_tgt sends the next event once the host has read what changed by the last one.
            while (status := device.status()).namespace_events < 5:
                assert time.monotonic() < end, status
                call("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "second", "nsid": 2})
                call("nvmf_subsystem_remove_ns", nqn=NQN, nsid=2)
            assert device.read(0, PAGE) == bytes(PAGE)
            assert device.status().reconnects == 0
    finally:
        call("bdev_malloc_delete", name="second")


def test_namespaces_come_and_go(spdk_target: SpdkTarget) -> None:
    """The volume's namespace stays; others come and go, and one of them is used directly."""
    names = ["/".join((NQN, str(nsid))) for nsid in range(1, 4)]
    with spdk_target.subsystem(NQN, [Namespace(), Namespace(), Namespace()]):
        uri = spdk_target.tcp_uri(NQN)
        dlfs.format_volume(uri)
        with dlfs.open(uri) as volume:
            add_large(volume)
        done = threading.Event()
        turns = 0

        def plug() -> None:
            nonlocal turns
            end = time.monotonic() + SECONDS
            try:
                while time.monotonic() < end:
                    for nsid in (2, 3):
                        spdk_target.call("nvmf_subsystem_remove_ns", nqn=NQN, nsid=nsid)
                    for nsid in (3, 2):
                        namespace = {"bdev_name": names[nsid - 1], "nsid": nsid}
                        spdk_target.call("nvmf_subsystem_add_ns", nqn=NQN, namespace=namespace)
                    turns += 1
            finally:
                done.set()

        thread = threading.Thread(target=plug)
        epochs = reads = losses = 0
        with (
            dlfs.open(uri, memory_bytes=MEMORY_BYTES) as volume,
            volume.dataset("large") as large,
            opened(uri) as watched,
            opened(spdk_target.tcp_uri(NQN, 2)) as plugged,
        ):
            thread.start()
            while not done.is_set():
                assert_whole(read_epoch(large, epochs), LARGE)
                epochs += 1
                began = time.monotonic()
                try:
                    assert plugged.read(0, PAGE) == bytes(PAGE)
                    reads += 1
                except DeviceLostError:
                    losses += 1
                assert time.monotonic() - began < 5
            thread.join()
            status = watched.status()
            # The namespace is back.
            assert retried(lambda: plugged.read(0, PAGE), DeviceLostError) == bytes(PAGE)
        assert status.namespace_events > 0
        assert (status.reconnects, status.protocol_errors, status.timeouts) == (0, 0, 0)
        print(f"{turns} turns, {epochs} epochs, {reads} reads, {losses} losses, {status}")
