"""DH-HMAC-CHAP with the kernel's target: hashes, groups, one-way and mutual, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlfs.block import open_device
from dlfs.errors import AuthenticationError
from dlfs.fabric.keys import generate_key, write_key
from tests.nvmet.shared import AUTHENTICATED, KEYS
from tests.nvmet.target import KernelTarget

pytestmark = pytest.mark.qemu

CONNECT_MS = 30_000
FIRST = next(iter(KEYS))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this host's keys in a directory of the test."""
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))


def address(target: KernelTarget, host: str, **options: object) -> str:
    return target.uri(AUTHENTICATED, hostnqn=host, connect_ms=CONNECT_MS, **options)


@pytest.mark.parametrize("host", KEYS)
def test_both_sides_prove_themselves(kernel_target: KernelTarget, host: str) -> None:
    write_key("host", KEYS[host].host)
    write_key("controller", KEYS[host].controller)
    names = {"dhchap_key": "host", "dhchap_ctrl_key": "controller"}
    with open_device(address(kernel_target, host, **names)) as device:
        assert device.read(0, 4096) == bytes(4096)


def test_one_way(kernel_target: KernelTarget) -> None:
    write_key("host", KEYS[FIRST].host)
    with open_device(address(kernel_target, FIRST, dhchap_key="host")) as device:
        assert device.read(0, 4096) == bytes(4096)


def test_no_key_is_refused(kernel_target: KernelTarget) -> None:
    with pytest.raises(AuthenticationError, match=f"{AUTHENTICATED} demands authentication"):
        open_device(address(kernel_target, FIRST))


def test_a_wrong_key_is_refused_by_the_target(kernel_target: KernelTarget) -> None:
    write_key("host", generate_key())
    with pytest.raises(AuthenticationError, match="the target refused this host"):
        open_device(address(kernel_target, FIRST, dhchap_key="host"))


def test_a_wrong_controller_key_is_refused_by_this_host(kernel_target: KernelTarget) -> None:
    write_key("host", KEYS[FIRST].host)
    write_key("controller", generate_key())
    names = {"dhchap_key": "host", "dhchap_ctrl_key": "controller"}
    with pytest.raises(AuthenticationError, match="this host refused the target"):
        open_device(address(kernel_target, FIRST, **names))


def test_a_kernel_without_concatenation_is_not_used_without_tls(
    kernel_target: KernelTarget,
) -> None:
    write_key("host", KEYS[FIRST].host)
    with pytest.raises(AuthenticationError, match="the target refused this host"):
        open_device(address(kernel_target, FIRST, dhchap_key="host", concat=1))
