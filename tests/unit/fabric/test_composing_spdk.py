"""Composing on nvmf_tgt while another command composes the same name.

The other command acts at a chosen call. The target's answers are those of SPDK 26.05;
tests/spdk/test_composing.py has two commands at once on a real one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlfs.errors import DeviceError, ExistsError
from dlfs.fabric.composing import NamespaceRequest, open_target

client = pytest.importorskip("spdk.rpc.client")

MIB = 1 << 20


class Target:
    """The state of a target, and the call before which another command is faster."""

    def __init__(self, before: str) -> None:
        self.before = before
        self.lvols: dict[str, int] = {}
        self.subsystems: dict[str, dict[str, Any]] = {}

    def call(self, method: str, parameters: dict[str, Any]) -> Any:
        if method == self.before:
            self.before = ""
            if method == "bdev_lvol_create":
                self.lvols["lvs/a"] = 16 * MIB
            else:
                self.call("nvmf_create_subsystem", parameters)
        return getattr(self, method)(**parameters)

    def refuse(self, code: int, message: str) -> Any:
        answer = json.dumps({"code": code, "message": message}, indent=2)
        raise client.JSONRPCException(f"request:\n{{}}\nresponse:\n{answer}")

    def nvmf_get_subsystems(self) -> list[dict[str, Any]]:
        return list(self.subsystems.values())

    def bdev_get_bdevs(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "aliases": [name], "num_blocks": size // 512, "block_size": 512}
            for name, size in self.lvols.items()
        ]

    def bdev_lvol_get_lvstores(self) -> list[dict[str, Any]]:
        return [{"name": "lvs", "cluster_size": MIB}]

    def bdev_lvol_create(self, lvol_name: str, size_in_mib: int, **_: Any) -> None:
        if f"lvs/{lvol_name}" in self.lvols:
            self.refuse(-17, "File exists")
        self.lvols[f"lvs/{lvol_name}"] = size_in_mib * MIB

    def nvmf_create_subsystem(self, nqn: str, **named: Any) -> None:
        if nqn in self.subsystems:
            self.refuse(-32603, f"Unable to create subsystem {nqn}")
        empty = {"hosts": [], "namespaces": [], "listen_addresses": []}
        self.subsystems[nqn] = {"nqn": nqn, **named, **empty}

    def nvmf_delete_subsystem(self, nqn: str) -> None:
        del self.subsystems[nqn]

    def keyring_get_keys(self) -> list[dict[str, Any]]:
        return []

    def nvmf_get_transports(self) -> list[dict[str, Any]]:
        return self.refuse(-1, "no transports today")


def compose(monkeypatch: pytest.MonkeyPatch, made: Target) -> None:
    monkeypatch.setattr(client.JSONRPCClient, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(client.JSONRPCClient, "call", lambda _, *words: made.call(*words))
    monkeypatch.setattr(client.JSONRPCClient, "close", lambda _: None)
    with open_target("spdk:/none") as target:
        target.create(
            NamespaceRequest(
                name="a",
                size_bytes=16 * MIB,
                store="lvs",
                address="127.0.0.1",
                allowed_hosts=("nqn.2024-01.org.example:trainer",),
            )
        )


@pytest.mark.parametrize("before", ["bdev_lvol_create", "nvmf_create_subsystem"])
def test_another_create_is_named_and_stays(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    made = Target(before)
    with pytest.raises(ExistsError, match="composed by another command") as raised:
        compose(monkeypatch, made)
    assert "{" not in str(raised.value)
    assert len(made.subsystems) == (before == "nvmf_create_subsystem")


def test_a_refusal_is_told_without_json_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Target("")
    with pytest.raises(DeviceError, match=r"nvmf_get_transports: no transports today$"):
        compose(monkeypatch, made)
    assert made.subsystems == {}
