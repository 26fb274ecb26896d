"""The scripted target as a program, with the calls of nvmf_tgt's JSON-RPC that composing makes.

``python -m tests.deploy.scripted_nvmf_tgt -r SOCKET`` stands for SPDK's target where that is not
installed. Namespaces are files, and keys are not demanded. Other options of nvmf_tgt are ignored.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

from dlfs.fabric.recipes import DISCOVERY_NQN
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem


class Target:
    """The state that calls change; each public method is one of SPDK's."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._subsystems: dict[str, dict[str, Any]] = {
            DISCOVERY_NQN: {"hosts": [], "namespaces": [], "listen_addresses": []}
        }
        self._targets: dict[tuple[str, int], ScriptedTarget] = {}

    def bdev_get_bdevs(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "aliases": [], "num_blocks": size // 4096, "block_size": 4096}
            for name, size in self._sizes.items()
        ]

    def bdev_aio_create(self, name: str, filename: str, block_size: int) -> str:
        assert block_size == 4096
        self._sizes[name] = os.stat(filename).st_size
        return name

    def nvmf_get_subsystems(self) -> list[dict[str, Any]]:
        return [{"nqn": nqn, **found} for nqn, found in self._subsystems.items()]

    def nvmf_create_subsystem(self, nqn: str, **named: Any) -> bool:
        self._subsystems[nqn] = {**named, "hosts": [], "namespaces": [], "listen_addresses": []}
        return True

    def nvmf_get_transports(self) -> list[dict[str, Any]]:
        return [{"trtype": "TCP"}]

    def nvmf_subsystem_add_host(self, nqn: str, host: str) -> bool:
        self._subsystems[nqn]["hosts"].append({"nqn": host})
        return True

    def nvmf_subsystem_add_ns(self, nqn: str, namespace: dict[str, Any]) -> int:
        self._subsystems[nqn]["namespaces"].append(namespace)
        return 1

    def nvmf_subsystem_add_listener(self, nqn: str, listen_address: dict[str, str]) -> bool:
        found = self._subsystems[nqn]
        found["listen_addresses"].append(listen_address)
        if nqn == DISCOVERY_NQN:  # the scripted target has one at every port
            return True
        space = found["namespaces"][0]
        path = space["bdev_name"]
        made = Namespace(self._sizes[path], path=Path(path), identity=UUID(space["uuid"]))
        hosts = [host["nqn"] for host in found["hosts"]]
        place = (listen_address["traddr"], int(listen_address["trsvcid"]))
        target = self._targets.get(place) or ScriptedTarget([])
        self._targets[place] = target
        target.addresses, target._asked_port = [place[0]], place[1]
        self._change(target, [*target.subsystems, Subsystem(nqn, [made], hosts=hosts)])
        return True

    def _change(self, target: ScriptedTarget, subsystems: list[Subsystem]) -> None:
        """Have a target other subsystems; hosts of the others connect again."""
        target.stop()
        target.subsystems = subsystems
        if subsystems:
            target.start()

    def nvmf_delete_subsystem(self, nqn: str) -> bool:
        del self._subsystems[nqn]
        for target in self._targets.values():
            left = [each for each in target.subsystems if each.nqn != nqn]
            if len(left) < len(target.subsystems):
                self._change(target, left)
        return True

    def bdev_aio_delete(self, name: str) -> bool:
        del self._sizes[name]
        return True

    def keyring_get_keys(self) -> list[dict[str, Any]]:
        return []


class Handler(socketserver.BaseRequestHandler):
    """One connection, over which requests come one at a time."""

    def handle(self) -> None:
        text = ""
        while part := self.request.recv(65536):
            text += part.decode()
            try:
                request = json.loads(text)
            except json.JSONDecodeError:
                continue  # the request is incomplete
            text = ""
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            method = getattr(self.server.target, request["method"], None)  # type: ignore[attr-defined]
            if method is None:
                answer["error"] = {"code": -32601, "message": f"no {request['method']}"}
            else:
                answer["result"] = method(**request.get("params") or {})
            self.request.sendall(json.dumps(answer).encode())


def main(arguments: list[str]) -> None:
    """Answer at the socket until the process is killed."""
    with socketserver.UnixStreamServer(arguments[arguments.index("-r") + 1], Handler) as server:
        server.target = Target()  # type: ignore[attr-defined]
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
