"""A lab with storage and DLFS: a target on the head with a volume, deploy/slurm on all nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import dlfs
from tests.slurm.lab import ROOT, USERS, Machine, SlurmLab
from tests.support.waiting import wait_for

HOST = "nqn.2024-01.org.example:trainers"
NQN = "nqn.2024-01.org.example:storage"
SAMPLES = 600
RUNTIME = "/run/dlfs/slurm"
SETTINGS = """
Prolog={folder}/dlfs/prolog
Epilog={folder}/dlfs/epilog
TaskProlog={folder}/dlfs/task-prolog
PrologFlags=Alloc
"""
PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"


class Cluster(SlurmLab):
    """A lab whose jobs read the dataset ``photos`` of ``SAMPLES`` samples over NVMe/TCP.

    Args:
        nodes: number of nodes.
        prolog: True if prolog and epilog start and stop node services.
        settings: further lines of slurm.conf.
        datasets: False for a volume without datasets.
        users: users, as of ``SlurmLab``.

    Attributes:
        has_prolog: whether prolog and epilog start and stop node services.
        scripts: the installed copy of deploy/slurm.
        volume: URI of the volume, for all machines.
    """

    private_tmp = True

    def __init__(
        self,
        nodes: int = 2,
        *,
        prolog: bool = True,
        settings: str = "",
        users: dict[str, int] | None = None,
        datasets: bool = True,
    ) -> None:
        self.has_prolog = prolog
        self._datasets = datasets
        self._target: subprocess.Popen[str] | None = None
        self.volume = f"nvme-tcp://10.77.0.1:4420/{NQN}?nsid=1&hostnqn={HOST}"
        super().__init__(nodes, (SETTINGS if prolog else "") + settings, users or USERS)
        if prolog:
            for node in self.nodes.values():
                self.configure(node)
        self.start_target()

    def prepare(self) -> None:
        """Install deploy/slurm, and make the volume; before the nodes boot."""
        self.identity = uuid4()
        self.scripts = self.folder / "dlfs"
        shutil.copytree(ROOT / "deploy" / "slurm", self.scripts)
        disk = self.folder / "disk"
        dlfs.format_volume(str(disk), size_bytes=64 << 20)
        if not self._datasets:
            return
        with dlfs.open(str(disk)) as volume, volume.writer("photos") as writer:
            for number in range(SAMPLES):
                writer.add(f"{number % 2}/{number:04}.jpg", number.to_bytes(2) * 2048)

    def configure(self, machine: Machine, **settings: str) -> None:
        """Write /etc/dlfs/slurm.conf of a machine."""
        values = {"VOLUME": self.volume, "PATH": PATH, "MOUNT": "yes"} | settings
        folder = machine.etc / "dlfs"
        folder.mkdir(exist_ok=True)
        lines = [f"{name}='{value}'\n" for name, value in values.items()]
        (folder / "slurm.conf").write_text("".join(lines))

    def start_target(self) -> None:
        """Start the storage target on the head."""
        disk = self.folder / "disk"
        subsystem = {"nqn": NQN, "path": str(disk), "uuid": str(self.identity), "hosts": [HOST]}
        order = {"address": "10.77.0.1", "port": 4420, "subsystems": [subsystem]}
        self._target = self.head.start(
            sys.executable, "-m", "tests.deploy.target", json.dumps(order)
        )
        assert self._target.stdout is not None
        assert self._target.stdout.readline() == "listening\n"

    def kill_target(self) -> None:
        """Kill the storage target, as a power cut would."""
        assert self._target is not None
        for pid in self.head.processes("tests.deploy.target"):
            self.signal(pid, 9)
        self._target.communicate()
        self._target = None

    def close(self) -> None:
        if self._target is not None:
            self._target.kill()
            self._target.communicate()
        super().close()

    def leftovers(self, machine: Machine) -> list[str]:
        """Return what DLFS has left on a node: processes, mounts, sockets and memory."""
        processes = machine.processes("dlfs.service.daemon", "dlfs serve", "train.py")
        script = (
            f"ls -A {RUNTIME} 2>/dev/null; ls -d /tmp/dlfs-[0-9]* 2>/dev/null; ls -A /dev/shm; "
        )
        script += "grep fuse.dlfs /proc/self/mountinfo; true"
        return [*processes.values(), *machine.run("sh", "-c", script).splitlines()]

    def wait_until_clean(self) -> None:
        """Wait until all jobs have ended and no node has anything left; fail otherwise."""
        wait_for(lambda: not self.head.run("squeue", "--noheader"), "all jobs to end")
        up = [node for node in self.nodes.values() if node.is_up]
        wait_for(lambda: self.idle() == len(up), "all nodes to be idle")
        found: dict[str, list[str]] = {}

        def is_clean() -> bool:
            found.update({node.name: self.leftovers(node) for node in up})
            return not any(found.values())

        try:
            wait_for(is_clean, "the nodes to be clean")
        except AssertionError as error:
            error.add_note(f"left: {found}")
            raise
