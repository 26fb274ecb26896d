"""Machines for walk-throughs: network namespaces on one switch, each with a shell.

The trainer's namespace has the switch. A storage node's kernel is simulated by a folder like
nvmet's configfs (``tests.unit.fabric.configfs``), which its recipes write to, and by the scripted
target, which exports the namespaces configured there. ``scp`` copies to another machine's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from tests.unit.fabric.configfs import FakeConfigfs

ROOT = Path(__file__).parents[2]
_END = "--end--"
_SCP = """#!/bin/bash
# scp FILE USER@ADDRESS:
cp "$1" {folder}/"$(sed 's/.*@//; s/:$//' <<<"$2")"/
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


_SSH = """#!/bin/bash
# ssh OPTIONS USER@ADDRESS sh -s VERB: on that machine, as far as scripts for nvmet can tell.
set -- "${{@: -4}}"
kernel={folder}/kernel-${{1#*@}}
NVMET_CONFIGFS=$kernel/nvmet PATH=$kernel/bin:$PATH exec "${{@:2}}"
"""


class Machine:
    """A network namespace, a folder, and a shell in it.

    Args:
        folder: folder of all machines; a machine's own folder in it has its address as name.
        name: name of the network namespace.
        address: IPv4 address in 10.0.0.0/24.
        switch: network namespace that has the switch; None: this one.
    """

    def __init__(self, folder: Path, name: str, address: str, switch: str | None) -> None:
        self.name = name
        self.address = address
        self.folder = folder / address
        self.folder.mkdir()
        self._tools = folder / "tools"
        _ip("netns", "add", name)
        try:
            self._connect(switch)
        except BaseException:
            _ip("netns", "del", name)
            raise
        # A private /etc, for the machine's name towards storage nodes.
        self._etc = folder / f"etc-{address}"
        shutil.copytree("/etc", self._etc, symlinks=True, ignore=shutil.ignore_patterns("nvme"))
        (self._etc / "machine-id").write_text(f"{uuid4().hex}\n")
        self._shell = self._popen("sh", "-ec", f"mount --bind {self._etc} /etc; exec bash --norc")

    def _connect(self, switch: str | None) -> None:
        own = ("-n", self.name)
        _ip(*own, "link", "set", "lo", "up")
        port = "switch"
        if switch is None:
            _ip(*own, "link", "add", port, "type", "bridge")
        else:
            port, other = "eth0", f"to{self.address.rpartition('.')[2]}"
            _ip(*own, "link", "add", port, "type", "veth", "peer", "name", other, "netns", switch)
            _ip("-n", switch, "link", "set", other, "master", "switch", "up")
        _ip(*own, "address", "add", f"{self.address}/24", "dev", port)
        _ip(*own, "link", "set", port, "up")

    def environment(self) -> dict[str, str]:
        """Environment of the programs on the machine."""
        path = f"{self._tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(self.folder)}

    def _popen(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, command: str) -> tuple[int, str]:
        """Run a command in the shell; returns its exit code and output."""
        shell = self._shell
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n%s %d\\n' {_END} $?\n")
        shell.stdin.flush()
        shown = ""
        for line in shell.stdout:
            if line.startswith(_END):
                return int(line.split()[-1]), shown.removesuffix("\n")
            shown += line
        raise AssertionError(f"the shell of {self.name} ended: {shown}")

    def close(self) -> None:
        """End the shell and the namespace."""
        self._shell.communicate("exit\n")
        _ip("netns", "del", self.name)


class StorageNode(Machine):
    """A machine whose kernel is simulated; see the head of this module."""

    def __init__(self, folder: Path, name: str, address: str, switch: str | None) -> None:
        self.disk = folder / f"disk-{address}"
        with self.disk.open("wb") as disk:
            disk.truncate(64 << 20)
        configfs = folder / f"kernel-{address}"
        configfs.mkdir()
        self.configfs = FakeConfigfs(configfs)
        self._targets: dict[int, subprocess.Popen[str]] = {}
        super().__init__(folder, name, address, switch)

    def environment(self) -> dict[str, str]:
        return self.configfs.environment(super().environment())

    def type(self, command: str) -> tuple[int, str]:
        """Run a command, then make the simulated kernel serve the current exports."""
        done = super().type(command)
        self.serve()
        return done

    def serve(self) -> None:
        """Serve what configfs exports now."""
        content = self.configfs.content()
        wanted = {
            int(value): [
                name.split("/")[-1] for name in content if name.startswith(f"ports/{value}/subsys")
                and content[name]
            ]
            for name, value in content.items()
            if name.endswith("/addr_trsvcid")
        }  # fmt: skip
        for port in [port for port in self._targets if not wanted.get(port)]:
            self.crash(port)
        for port, nqns in wanted.items():
            if nqns and port not in self._targets:
                self._start(port, [_subsystem(nqn, content) for nqn in nqns])

    def _start(self, port: int, subsystems: list[Mapping[str, object]]) -> None:
        order = json.dumps({"address": self.address, "port": port, "subsystems": subsystems})
        target = self._popen(sys.executable, "-m", "tests.deploy.target", order)
        assert target.stdout is not None
        assert target.stdout.readline() == "listening\n"
        self._targets[port] = target

    def crash(self, port: int | None = None) -> None:
        """Kill the target at a port, or all targets, as a power cut would."""
        for each in [*self._targets] if port is None else [port]:
            target = self._targets.pop(each)
            target.kill()
            target.communicate()

    def close(self) -> None:
        self.crash()
        super().close()


def _subsystem(nqn: str, content: Mapping[str, str]) -> Mapping[str, object]:
    place = f"subsystems/{nqn}"
    return {
        "nqn": nqn,
        "path": content[f"{place}/namespaces/1/device_path"],
        "uuid": content[f"{place}/namespaces/1/device_uuid"],
        "hosts": [n.split("/")[-1] for n in content if n.startswith(f"{place}/allowed_hosts/")],
    }


class Network:
    """The trainer and the two storage nodes of deploy/README.md."""

    def __init__(self, folder: Path) -> None:
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (("scp", _SCP), ("ssh", _SSH)):
            (tools / name).write_text(text.format(folder=folder))
            (tools / name).chmod(0o755)
        prefix = f"dlfs{os.getpid()}"
        self.machines: dict[str, Machine] = {}
        try:
            self.machines["trainer"] = Machine(folder, f"{prefix}-t", "10.0.0.20", None)
            for name, address in (("storage-a", "10.0.0.11"), ("storage-b", "10.0.0.12")):
                node = StorageNode(folder, f"{prefix}-{name[-1]}", address, f"{prefix}-t")
                self.machines[name] = node
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all machines."""
        for machine in self.machines.values():
            machine.close()
