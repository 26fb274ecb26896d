"""DH-HMAC-CHAP with SPDK's target: all hashes and groups, one-way and mutual, and rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import NvmeTcpDevice, open_device
from dlfs.block.host import host_nqn
from dlfs.errors import AuthenticationError
from dlfs.fabric.keys import generate_key, write_key
from tests.spdk.target import Namespace, SpdkTarget, lacks_target
from tests.support.datasets import random_samples
from tests.support.volumes import write_dataset

pytestmark = [
    pytest.mark.spdk,
    pytest.mark.timeout(600),
    pytest.mark.skipif(lacks_target() is not None, reason=str(lacks_target())),
]

NQN = "nqn.2024-01.org.dlfs.test:keys"
HASHES = ("sha256", "sha384", "sha512")
GROUPS = ("null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192")
ROTATIONS = 50
CONNECT_MS = 30_000


class Keyed:
    """A target with one subsystem, the keys of this host and of the controller."""

    def __init__(self, target: SpdkTarget, folder: Path) -> None:
        self.target = target
        self._folder = folder
        self._number = 0
        self.target.call("nvmf_subsystem_allow_any_host", nqn=NQN, allow_any_host=False)
        self.target.call("nvmf_subsystem_add_host", nqn=NQN, host=host_nqn(), **self.new_keys())

    def new_keys(self) -> dict[str, str]:
        """Make keys known to the target; the return value names them."""
        self._number += 1
        self.keys = {"host": generate_key(hash_id=1 + self._number % 3), "ctrlr": generate_key()}
        names: dict[str, str] = {}
        for side, text in self.keys.items():
            path = self._folder / f"{side}{self._number}"
            path.touch(0o600)
            path.write_text(text)
            names[side] = path.name
            self.target.call("keyring_file_add_key", name=path.name, path=str(path))
        return {"dhchap_key": names["host"], "dhchap_ctrlr_key": names["ctrlr"]}

    def rotate_target(self) -> None:
        self.target.call("nvmf_subsystem_set_keys", nqn=NQN, host=host_nqn(), **self.new_keys())

    def rotate_host(self) -> None:
        write_key("host", self.keys["host"], replace=True)
        write_key("ctrlr", self.keys["ctrlr"], replace=True)

    def uri(self, **options: object) -> str:
        named = {"dhchap_key": "host", "dhchap_ctrl_key": "ctrlr", "connect_ms": CONNECT_MS}
        chosen = {name: value for name, value in {**named, **options}.items() if value}
        return self.target.tcp_uri(NQN, **chosen)


@contextmanager
def keyed(folder: Path, config: Mapping[str, object] | None = None) -> Iterator[Keyed]:
    """Start a target that has this host's keys."""
    with SpdkTarget(config=config) as target:
        target.add(NQN, [Namespace(64 * MIB)])
        made = Keyed(target, folder)
        made.rotate_host()
        yield made


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this host's keys in a directory of the test."""
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("digest", HASHES)
def test_hashes_and_groups(tmp_path: Path, digest: str, group: str) -> None:
    config = {"dhchap_digests": [digest], "dhchap_dhgroups": [group]}
    with keyed(tmp_path, config) as found:
        for options in ({}, {"dhchap_ctrl_key": ""}):  # mutual, then one-way
            with open_device(found.uri(**options)) as device:
                assert isinstance(device, NvmeTcpDevice)
                assert device.read(0, 4096) == bytes(4096)
                device.authenticate()
                assert device.status().reconnects == 0


def test_wrong_and_missing_keys(tmp_path: Path) -> None:
    with keyed(tmp_path) as found:
        with pytest.raises(AuthenticationError, match="demands authentication"):
            open_device(found.uri(dhchap_key="", dhchap_ctrl_key=""))
        write_key("wrong", generate_key())
        with pytest.raises(AuthenticationError, match="the target refused this host"):
            open_device(found.uri(dhchap_key="wrong"))
        with pytest.raises(AuthenticationError, match="this host refused the target"):
            open_device(found.uri(dhchap_ctrl_key="wrong"))
        with pytest.raises(AuthenticationError, match="concatenation does not match"):
            open_device(found.uri(concat=1))  # which SPDK does not support


def test_keys_are_rotated_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """The target has the new keys first, so that reconnects fail until this host has them."""
    samples = random_samples(1000, seed=8, low=4000, high=40_000)
    with keyed(tmp_path) as found:
        dlfs.format_volume([found.uri()])
        write_dataset(found.uri(), "keys", samples, seed=1)
        rotations = 0
        seen: dict[bytes, bytes] = {}
        uri = found.uri(reconnect_ms=60_000)
        with dlfs.open(uri, memory_bytes=2 * MIB) as volume:
            dataset = volume.dataset("keys")
            paths = dataset.paths()
            with dataset.batches(16, seed=2, shuffle="global") as batches:
                for batch in batches:
                    with batch:
                        for number, index in enumerate(batch.indices.tolist()):
                            assert paths[index] not in seen
                            seen[paths[index]] = batch.tobytes(number)
                    if rotations < ROTATIONS:
                        found.rotate_target()
                        found.target.drop_hosts(NQN)
                        found.rotate_host()
                        rotations += 1
        assert rotations == ROTATIONS
        assert seen == samples
