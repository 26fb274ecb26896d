"""The CSI driver, the holder, mount pods and trainers, each in a container, on one node.

The test calls the driver as kubelet does. Pods that the driver makes are containers; what stands
for the API server and kubelet is ``tests.kubernetes.api_server``. ``DLFS_CONTAINER_KILLS`` is the
number of kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlfs.base.units import MIB
from dlfs.mount.mountpoint import MOUNTINFO, parse_mountinfo
from dlfs.mount.supervise.holder import list_held
from tests.containers.podman import Container, Podman
from tests.containers.reading import SAMPLES, Reader
from tests.kubernetes.api_server import ApiServer, Pod
from tests.kubernetes.driving import capability, invoke
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.scripted import DEFAULT_NQN
from tests.support.volumes import new_volume, write_dataset
from tests.support.waiting import retried, wait_for

pytestmark = [pytest.mark.containers]

KILLS = int(os.environ.get("DLFS_CONTAINER_KILLS", "4"))
SERVER = 10001


class ContainerPod(Pod):
    """A pod whose container is one of the image, which is started again whenever it ends."""

    def __init__(self, pod: Any, podman: Podman) -> None:
        self._podman = podman
        super().__init__(pod)

    def _options(self, container: Any) -> Iterator[str]:
        spec = self.pod["spec"]
        user, rights = spec["securityContext"], container["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        yield f"--user={user['runAsUser']}:{user['runAsGroup']}"
        yield from ("--read-only", "--security-opt=no-new-privileges")
        memory = container["resources"]["limits"]["memory"]
        yield f"--memory={memory.removesuffix('i').lower()}"
        paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
        for mount in container["volumeMounts"]:
            path = paths.get(mount["name"])
            place = mount["mountPath"]
            yield f"--volume={path}:{place}:ro" if path else f"--tmpfs={place}"
        yield from (f"--env={each['name']}={each['value']}" for each in container["env"])

    def _run(self) -> None:
        (container,) = self.pod["spec"]["containers"]
        (found,) = self.pod["status"]["containerStatuses"]
        options = [*self._podman.options(network="host"), *self._options(container)]
        assert container["image"] == self._podman.image
        made = self._podman("create", *options, self._podman.image, *container["args"])
        self.container = Container(self._podman, made.stdout.strip())
        while not self._ended.is_set():
            self._podman("start", self.container.name)
            code = int(self._podman("wait", self.container.name).stdout)
            message = self.container.logs()[-2048:]
            found["lastState"] = {"terminated": {"exitCode": code, "message": message}}

    def kill(self) -> None:
        with contextlib.suppress(AssertionError):  # it may have ended
            self.container.do("kill")

    def end(self) -> None:
        self._ended.set()
        wait_for(lambda: hasattr(self, "container"), "the pod's container")
        while self._thread.is_alive():
            self.kill()
            self._thread.join(1)
        self._podman("rm", "--force", self.container.name)


class Api(ApiServer):
    def __init__(self, account: Path, podman: Podman) -> None:
        self._podman = podman
        super().__init__(account)

    def make_pod(self, body: Any) -> Pod:
        return ContainerPod(body, self._podman)


class Node:
    """A node with its holder and driver, and what kubelet asks of the driver.

    Args:
        podman: where containers run.
        folder: a directory in memory, which is at the same path in containers, with propagation.
        account: where the service account of the driver is to be.
    """

    def __init__(self, podman: Podman, folder: Path, account: Path) -> None:
        self.folder = folder
        self.socket = folder / "csi.sock"
        self.holder_folder = folder / "holder"
        self.target = folder / "pods/trainer/volume"
        self.target.parent.mkdir(parents=True)
        self.api = Api(account, podman)
        both = f"--volume={folder}:{folder}:rshared"
        self.holder = podman.start(*("hold", self.holder_folder), options=["--user=0", both])
        self._ready(self.holder, self.holder_folder / "control.sock")
        machine = account / "machine-id"
        machine.write_text("0123456789abcdef" * 2)
        words = ["--endpoint", f"unix:{self.socket}", "--node-id", "node-1"]
        words += ["--state", folder / "state", "--run", folder / "run", "--image", podman.image]
        words += ["--holder", self.holder_folder, "--server-user", f"{SERVER}:{SERVER}"]
        words += ["--api", self.api.url, "--account", account]
        self.driver = podman.start(
            *words,
            options=[
                f"--volume={account}:{account}:ro",
                f"--volume={machine}:/etc/machine-id:ro",
                both,
            ],
            image=podman.driver_image,
            privileged=True,
            network="host",
        )
        self._ready(self.driver, self.socket)

    def _ready(self, container: Container, socket: Path) -> None:
        def ready() -> bool:
            if not container.state["Running"]:
                raise AssertionError(container.logs())
            return socket.exists()

        wait_for(ready, container.logs)

    def logs(self) -> str:
        """Return what all containers but the readers have printed."""
        texts = [f"driver:\n{self.driver.logs()}", f"holder:\n{self.holder.logs()}"]
        pods = list(self.api.pods.values())
        return "\n".join([*texts, *(f"pod:\n{pod.container.logs()}" for pod in pods)])

    def call(self, method: str, **words: Any) -> Any:
        return invoke(self.socket, method, volume_id="v", target_path=str(self.target), **words)

    def publish(self, volumes: str) -> None:
        attributes = {"volumes": volumes, "dataset": "d", "podMemory": "512Mi"}
        self.call("NodePublishVolume", volume_capability=capability(), volume_context=attributes)

    def kill(self, what: str) -> None:
        """Kill containers, and start them again as kubelet does."""
        for name in ("driver", "holder"):
            if what in (name, "all"):
                getattr(self, name).do("kill")
        if what in ("server", "all"):
            for pod in list(self.api.pods.values()):
                pod.kill()
        for name in ("holder", "driver"):
            if what in (name, "all"):
                getattr(self, name).do("start")

    def left(self) -> list[str]:
        """Return what publishing leaves, and unpublishing removes."""
        inside = os.fsencode(self.folder) + b"/"
        mounts = [found.mountpoint for found in parse_mountinfo(MOUNTINFO.read_bytes())]
        found = [os.fsdecode(each) for each in mounts if each.startswith(inside)]
        found += [str(each) for each in (self.folder / "state/records").iterdir()]
        found += [held.name for held in list_held(self.holder_folder)]
        return [*found, *self.api.pods, *map(str, self.target.parent.iterdir())]


@pytest.fixture
def node(podman: Podman, tmp_path: Path) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="dlfs-node-", dir="/dev/shm"))
    folder.chmod(0o755)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    made = Node(podman, folder, tmp_path / "account")
    try:
        yield made
        print(made.logs())
    finally:
        for container in (made.driver, made.holder):
            container.do("rm", "--force", "--time", "0")
        made.api.close()
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)
        shutil.rmtree(folder)


def test_kills_of_driver_holder_servers_and_all_under_readers(podman: Podman, node: Node) -> None:
    """Readers go on; only where all have died at once does the mount end, with ENOTCONN."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chosen = random.Random(seed)
    options = [f"--volume={node.folder}/pods:/pods:rslave"]
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(16 * MIB)])]) as storage:
        new_volume(storage.uri())
        write_dataset(storage.uri(), "d", SAMPLES)
        node.publish(storage.uri())
        with (
            Reader(podman, options, "/pods/trainer/volume") as first,
            Reader(podman, options, "/pods/trainer/volume") as second,
        ):
            for number in range(KILLS):
                before = [reader.deaths() for reader in (first, second)]
                what = ("driver", "holder", "server", "all")[number % 4]
                print(number, what)
                timer = threading.Timer(chosen.uniform(0, 0.5), node.kill, [what])
                timer.start()
                timer.join()
                for reader in (first, second):
                    reader.wait_for_more()
                if what != "all":
                    assert [reader.deaths() for reader in (first, second)] == before, what
                wait_for(
                    lambda: (
                        [(held.present, held.answers) for held in held_now(node)] == [(True, True)]
                    ),
                    lambda: f"the mount, got {list_held(node.holder_folder)}",
                )
        node.call("NodeUnpublishVolume")
        wait_for(lambda: node.left() == [], lambda: f"nothing left, got {node.left()}")


def held_now(node: Node) -> list[Any]:
    """Return what the holder has, once it answers."""
    return retried(lambda: list_held(node.holder_folder), Exception)
