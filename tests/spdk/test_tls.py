"""TLS against SPDK's target: both cipher suites, exact epochs, refusals, discovery.

SPDK knows identities of version 0 only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import open_device, parse_uri
from dlfs.block.uri import NvmeTcpDiscoverUri
from dlfs.errors import AuthenticationError, DeviceLostError, DeviceTimeoutError
from dlfs.fabric.discovery import DISCOVERY_NQN, discover
from tests.nvmet.guest import free_port
from tests.spdk.target import Namespace, SpdkTarget
from tests.support.nvme.tls import key_text
from tests.support.volumes import write_dataset

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:tls"
HOST_NQN = "nqn.2024-01.org.dlfs.test:tls-host"
SHORT, LONG = random.Random(1).randbytes(32), random.Random(2).randbytes(48)
SAMPLES = {f"d{i % 5}/s{i:04}".encode(): random.Random(i).randbytes(i * 97) for i in range(1000)}
ORDERED = [SAMPLES[path] for path in sorted(SAMPLES)]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder of keys."""
    folder = tmp_path / "keys"
    folder.mkdir(0o700)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setenv("DLFS_KEYS", str(folder))
    return folder


def store(keys: Path, name: str, text: str) -> Path:
    path = keys / name
    path.touch(0o600)
    path.write_text(text)
    return path


@contextmanager
def exported(target: SpdkTarget, keys: Path, text: str) -> Iterator[int]:
    """Export a subsystem to one host with TLS, and return its port."""
    port = free_port()
    target.call("keyring_file_add_key", name="psk", path=str(store(keys, "psk", text)))
    with target.subsystem(NQN, [Namespace(64 * MIB)]):
        target.call("nvmf_subsystem_allow_any_host", nqn=NQN, allow_any_host=False)
        target.call("nvmf_subsystem_add_host", nqn=NQN, host=HOST_NQN, psk="psk")
        target.call(
            "nvmf_subsystem_add_listener",
            nqn=NQN,
            listen_address={
                "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)
            },
            secure_channel=True,
        )  # fmt: skip
        try:
            yield port
        finally:
            target.call("nvmf_subsystem_remove_host", nqn=NQN, host=HOST_NQN)
            target.call("keyring_file_remove_key", name="psk")


def uri_of(port: int, key: str | None = "psk", **options: object) -> str:
    words = "".join(f"&{name}={value}" for name, value in options.items())
    words += f"&tls_psk={key}" if key else ""
    return f"nvme-tcp://127.0.0.1:{port}/{NQN}?nsid=1&hostnqn={HOST_NQN}{words}"


@pytest.mark.parametrize(
    ("key", "hash_number"),
    [(SHORT, 1), (LONG, 2), (SHORT, 0), (LONG, 0)],
    ids=["sha256", "sha384", "32 bytes", "48 bytes"],
)
def test_epochs_with_both_suites(
    spdk_target: SpdkTarget, keys: Path, key: bytes, hash_number: int
) -> None:
    with exported(spdk_target, keys, key_text(key, hash_number)) as port:
        uri = uri_of(port)
        dlfs.format_volume([uri])
        write_dataset(uri, "ds", SAMPLES)
        with dlfs.open(uri) as volume, volume.dataset("ds") as dataset:
            for seed in range(3):
                found: dict[int, bytes] = {}
                for batch in dataset.batches(16, shuffle="global", seed=seed):
                    for index, data in zip(batch.indices, batch, strict=True):
                        assert int(index) not in found
                        found[int(index)] = bytes(data)
                assert [found[index] for index in range(len(SAMPLES))] == ORDERED


def test_large_transfers(spdk_target: SpdkTarget, keys: Path) -> None:
    data = random.Random(3).randbytes(8 * MIB)
    with (
        exported(spdk_target, keys, key_text(SHORT, 1)) as port,
        open_device(uri_of(port, hdgst=1, ddgst=1), writable=True) as device,
    ):
        device.write(MIB, data)
        assert device.read(MIB, len(data)) == data


def test_refusals(spdk_target: SpdkTarget, keys: Path) -> None:
    with exported(spdk_target, keys, key_text(SHORT, 1)) as port:
        store(keys, "other", key_text(LONG[:32], 1))
        with pytest.raises(AuthenticationError, match="the target refused identity"):
            open_device(uri_of(port, "other"))
        with pytest.raises(AuthenticationError, match="the port demands TLS"):
            open_device(uri_of(port, None))
        with pytest.raises(
            (AuthenticationError, DeviceLostError), match=r"without TLS|in the TLS handshake"
        ):
            open_device(uri_of(spdk_target.port))


def test_a_target_that_is_stopped_in_the_handshake(spdk_target: SpdkTarget, keys: Path) -> None:
    """The kernel accepts the connection; the target answers when it goes on."""
    with exported(spdk_target, keys, key_text(SHORT, 1)) as port:
        spdk_target.freeze()
        try:
            with pytest.raises(DeviceTimeoutError, match="no answer in the TLS handshake"):
                open_device(uri_of(port, connect_ms=300))
        finally:
            spdk_target.thaw()
        with open_device(uri_of(port, connect_ms=30_000)) as device:
            assert device.read(0, 512) == bytes(512)


def test_discovery_names_the_demand(spdk_target: SpdkTarget, keys: Path) -> None:
    with exported(spdk_target, keys, key_text(SHORT, 1)):
        plain = {
            "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1",
            "trsvcid": str(spdk_target.port),
        }  # fmt: skip
        spdk_target.call("nvmf_subsystem_add_listener", nqn=DISCOVERY_NQN, listen_address=plain)
        spdk_target.call("nvmf_subsystem_remove_listener", nqn=NQN, listen_address=plain)
        text = f"nvme-tcp+discover://127.0.0.1:{spdk_target.port}?hostnqn={HOST_NQN}"
        request = parse_uri(text)
        assert isinstance(request, NvmeTcpDiscoverUri)
        found = {each.nqn: each for each in discover(request).subsystems}
        assert "accepts only connections with TLS 1.3" in str(found[NQN].problem)
        assert found[NQN].paths == ()
        spdk_target.call("nvmf_subsystem_remove_listener", nqn=DISCOVERY_NQN, listen_address=plain)
