"""Containers of trainers, without any capability, read through what other containers serve."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs.mount.mountpoint import device_of, mount_file_system, unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.holder import deposit, list_held
from tests.containers.podman import Container, Podman, children_of
from tests.containers.reading import CAPABILITIES, FILES, SAMPLES, TRAINER, Reader
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.containers]

SERVER, HOLDER, STRANGER = 10001, 10002, 20002
"""Users of the containers."""
CONNECT = """
import dlfs
with dlfs.connect("unix:/data/s.sock") as volume, volume["d"] as dataset:
    for epoch in range(2):
        for batch in dataset.batches(64, seed=1, epoch=epoch):
            with batch:
                assert all(set(sample) == {sample[0]} and len(sample) == 5000 for sample in batch)
    print(len(dataset))
"""


@pytest.fixture
def volume(shared: Path) -> Path:
    """Make a volume with a dataset in the shared directory."""
    import dlfs

    path = new_volume(shared / "v.img", size_bytes=16 << 20)
    with dlfs.open(path) as opened, opened.writer("d") as writer:
        for name, data in SAMPLES.items():
            writer.add(name, data)
    path.chmod(0o644)
    return path


@pytest.fixture
def node(shared: Path) -> Iterator[Path]:
    """The shared directory, with mounts that propagate to and from containers, as on a node."""
    subprocess.run(["mount", "--bind", shared, shared], check=True)
    subprocess.run(["mount", "--make-shared", shared], check=True)
    yield shared
    subprocess.run(["umount", "--recursive", "--lazy", shared], check=True)


def data(folder: Path, propagation: str = "rslave") -> list[str]:
    return [f"--volume={folder}:/data:{propagation}"]


# ---- the node service ----------------------------------------------------------------------------


def test_a_service_and_who_may_use_it(podman: Podman, shared: Path, volume: Path) -> None:
    """Memory passes by the socket: neither /dev/shm nor the host's IPC namespace is shared."""
    words = ("serve", "/data/v.img", "--socket", "/data/s.sock", "--allow-user", TRAINER)
    with podman.start(*words, options=data(shared), user=SERVER) as service:
        service.wait_running("dlfs", "info", "unix:/data/s.sock")
        read = podman.python(CAPABILITIES + CONNECT, options=data(shared), user=TRAINER)
        assert read.stdout.split() == [str(len(SAMPLES))]
        refused = podman.python(CONNECT, options=data(shared), user=STRANGER, check=False)
        assert refused.returncode == 1
        assert str(STRANGER) in refused.stderr.splitlines()[-1]
        assert f"uid {STRANGER}" in service.logs() or f"user {STRANGER}" in service.logs()


# ---- mounts --------------------------------------------------------------------------------------


class Held:
    """A mount that the test makes as a node plugin would, a holder, and a server of it.

    Args:
        podman: where containers run.
        node: the directory of the node.
    """

    def __init__(self, podman: Podman, node: Path) -> None:
        self._podman = podman
        self._node = node
        self.point = node / "mnt"
        self.point.mkdir()
        self.folder = node / "holder"
        self.holder = podman.start("hold", "/data/holder", options=data(node), user=HOLDER)
        wait_for((self.folder / "control.sock").exists, self.holder.logs)
        options = MountOptions(allow_other=True).for_kernel()
        kernel = mount_file_system(str(self.point), options)
        try:
            device = device_of(str(self.point))
            deposit(self.folder, "photos", kernel, device=device, uid=SERVER)
        finally:
            os.close(kernel)
        self.server = self.start_server()

    def start_server(self) -> Container:
        """Start a container, without capabilities, that sees nothing but the mount's own folder."""
        only = self.folder / "mounts/photos"
        options = [f"--volume={only}:/held", f"--volume={self._node / 'v.img'}:/v.img:ro"]
        words = ("mount", "--holder", "/held", "/v.img")
        return self._podman.start(*words, options=options, user=SERVER)

    def wait_answering(self) -> None:
        """Wait until the mount's server answers."""
        wait_for(lambda: [each.answers for each in list_held(self.folder)] == [True], self.logs)

    def logs(self) -> str:
        return self.holder.logs() + self.server.logs()


@pytest.fixture
def held(podman: Podman, node: Path, volume: Path) -> Iterator[Held]:
    made = Held(podman, node)
    yield made
    with contextlib.suppress(OSError):
        unmount(str(made.point), lazy=True)


def test_a_mount_that_a_container_without_rights_serves(
    podman: Podman, held: Held, node: Path
) -> None:
    held.wait_answering()
    assert "CapEff:\t0000000000000000" in held.server.run("cat", "/proc/self/status").stdout
    read = podman.python(
        f"{CAPABILITIES}{FILES}read('/data/mnt/d')", options=data(node), user=TRAINER
    )
    assert read.stdout.split() == [str(len(SAMPLES))]


def test_killed_and_paused_servers_of_a_held_mount(podman: Podman, held: Held, node: Path) -> None:
    """A reader waits for the next server: of the same container, of a new one, or after a pause."""
    with Reader(podman, data(node), "/data/mnt/d") as reader:
        for end in ("server", "container", "pause", "holder"):
            held.wait_answering()
            reader.wait_for_more()
            if end == "server":
                (server,) = children_of(held.server.state["Pid"])
                os.kill(server, signal.SIGKILL)
            elif end == "container":
                held.server.do("kill")
                held.server.do("start")
            elif end == "pause":
                held.server.do("pause")
                reader.wait_blocked()
                held.server.do("unpause")
            else:
                held.holder.do("kill")
                held.holder.do("start")
                wait_for((held.folder / "control.sock").exists, held.logs)
            reader.wait_for_more()
        assert reader.deaths() == []


def test_a_mount_of_another_container(podman: Podman, node: Path, volume: Path) -> None:
    """Container A mounts, and B has it by propagation, also after each of them has died."""
    (node / "mnt").mkdir()
    mounting = "dlfs mount --allow-other /data/v.img /data/mnt && exec sleep infinity"
    options = [*data(node, "rshared"), "--entrypoint", "sh"]
    a = podman.start("-c", mounting, options=options, root_for_mounts=True)
    a.wait_running("ls", "/data/mnt/d")
    with Reader(podman, data(node), "/data/mnt/d") as b:
        b.wait_for_more()
        kill_server(a)
        b.wait_for_more()
        b.container.do("restart", "--time", "0")
        b.wait_for_more()
        kill_server(a)
        b.wait_for_more()
        a.do("pause")
        b.wait_blocked()
        a.do("unpause")
        b.wait_for_more()
        assert b.deaths() == []
    a.run("dlfs", "umount", "--lazy", "/data/mnt")
    a.do("kill")


def kill_server(mounting: Container) -> None:
    """Kill the server of a mount: the child of its keeper, which the first process has."""
    (keeper,) = children_of(mounting.state["Pid"])
    (server,) = children_of(keeper)
    os.kill(server, signal.SIGKILL)
