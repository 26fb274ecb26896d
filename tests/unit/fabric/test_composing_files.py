"""Files whose space is reserved for namespaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceError, ExistsError, NotFoundError, SpaceError, UsageError
from dlfs.fabric.composing import NamespaceRequest, open_target
from dlfs.fabric.composing.files import reserve_file, resize_file


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_space_is_reserved_and_a_file_of_that_size_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.namespace"
    reserve_file(str(path), MIB, "compose")
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (MIB, 0o600)
    assert allocated(path) >= MIB
    path.write_bytes(bytes([7]) * MIB)
    reserve_file(str(path), MIB, "compose")
    assert path.read_bytes() == bytes([7]) * MIB
    with pytest.raises(ExistsError, match="exists with 1048576 bytes, not 2097152; resize"):
        reserve_file(str(path), 2 * MIB, "compose")
    assert os.listdir(tmp_path) == ["a.namespace"]


def test_what_a_killed_call_left_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a.namespace"
    (tmp_path / "a.namespace.new").write_bytes(bytes(3 * MIB))
    reserve_file(str(path), MIB, "compose")
    assert path.stat().st_size == MIB
    assert os.listdir(tmp_path) == ["a.namespace"]


def test_too_little_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpaceError, match=r"reserve 1048576 bytes for .*a\.namespace: No space"):
        reserve_file(str(tmp_path / "a.namespace"), MIB, "compose")
    assert os.listdir(tmp_path) == []


def test_what_cannot_fit_takes_no_space_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(SpaceError, match=r"a\.namespace: No space left.*\d+ bytes are free"):
        reserve_file(str(tmp_path / "a.namespace"), 1 << 55, "compose")
    assert os.listdir(tmp_path) == []


def test_a_file_of_another_command_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.namespace"
    fallocate = os.posix_fallocate

    def slow(descriptor: int, offset: int, length: int) -> None:
        fallocate(descriptor, offset, length)
        (tmp_path / "a.namespace.new").rename(path)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    reserve_file(str(path), MIB, "compose")
    assert path.stat().st_size == MIB


def test_resize(tmp_path: Path) -> None:
    path = tmp_path / "a.namespace"
    reserve_file(str(path), MIB, "compose")
    for size_bytes in (2 * MIB, 256 * KIB):
        resize_file(str(path), size_bytes, "resize")
        assert path.stat().st_size == size_bytes
        assert allocated(path) >= size_bytes
    with pytest.raises(NotFoundError, match="there is no such folder"):
        reserve_file(str(tmp_path / "none" / "a.namespace"), MIB, "compose")
    with pytest.raises(DeviceError, match="Is a directory"):
        resize_file(str(tmp_path), MIB, "resize")


def test_files_are_made_on_the_machine_of_nvmf_tgt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("spdk.rpc.client")
    monkeypatch.setattr(client.JSONRPCClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(client.JSONRPCClient, "call", lambda *_: [])
    monkeypatch.setattr(client.JSONRPCClient, "close", lambda _: None)
    wanted = NamespaceRequest(
        name="a",
        size_bytes=MIB,
        store="/srv",
        address="10.0.0.11",
        allowed_hosts=("nqn.2024-01.org.example:trainer",),
    )
    with (
        open_target("spdk://10.0.0.11:5260") as target,
        pytest.raises(UsageError, match="expected the name of an lvol store, got /srv"),
    ):
        target.create(wanted)
