"""Servers that are jobs of a real Slurm cluster: volumes mounted by the job, and by the prolog."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jupyterhub.hub import PROXY, ROOT, TOKEN
from tests.slurm.cluster import Cluster
from tests.slurm.lab import lacks_slurm
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.jupyterhub, pytest.mark.root]

BIN = Path(sys.executable).parent
HEAD = "10.77.0.1"
CONFIGURATION = """\
import sys

sys.path.insert(0, {package!r})
import batchspawner
from dlfs_volumes import SlurmVolumes, read_table

SlurmVolumes(read_table({table!r}), dlfs="{bin}/dlfs", wait_s=15).configure(c)
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.JupyterHub.bind_url = "http://{head}:8000"
c.JupyterHub.hub_ip = "{head}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.allow_all = True
c.JupyterHub.services = [{{"name": "tests", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "tests", "services": ["tests"],
     "scopes": ["admin:users", "admin:servers", "access:servers"]}}
]
c.Spawner.notebook_dir = "/"
c.Spawner.environment = {{
    "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
    "SLURM_CONF": {slurm!r},
}}
c.Spawner.cmd = ["{bin}/jupyterhub-singleuser"]
c.SlurmSpawner.batchspawner_singleuser_cmd = "{bin}/batchspawner-singleuser"
c.SlurmSpawner.exec_prefix = "setpriv --reuid {{username}} --regid {{username}} --clear-groups"
c.SlurmSpawner.req_homedir = {home!r}
"""


class HubOnHead:
    """A hub on the head of a lab, whose servers are jobs on its node."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "hub"
        self.folder.mkdir()
        self.log = self.folder / "log"
        forbidden = cluster.shared / "forbidden.img"
        forbidden.write_bytes(b"of root")
        forbidden.chmod(0o600)
        table = {
            "photos": {"uri": cluster.volume, "users": ["ann"], "memory": "64MiB"},
            "forbidden": {"uri": str(forbidden), "users": ["ann"]},
            "other": {"uri": cluster.volume, "users": ["bob"]},
        }
        text = CONFIGURATION.format(
            package=str(ROOT / "deploy/jupyterhub"),
            table=table,
            bin=BIN,
            head=HEAD,
            proxy=str(PROXY),
            token=TOKEN,
            home=str(cluster.home("ann")),
            slurm=str(cluster.configuration),
        )
        (self.folder / "config.py").write_text(text)
        command = shlex.join([sys.executable, "-m", "jupyterhub", "-f", "config.py"])
        self._process = cluster.head.start(
            "sh", "-c", f"exec {command} >{self.log} 2>&1", cwd=self.folder
        )
        wait_for(lambda: self.call("GET", "") is not None, lambda: self.log.read_text()[-3000:])
        self.call("POST", "/users/ann")

    def call(self, method: str, path: str, base: str = "/hub/api") -> Any:
        """Call the API; returns None if it does not answer with success."""
        words = ["curl", "--silent", "--fail", "-X", method, "-H", f"Authorization: token {TOKEN}"]
        code, text = self.cluster.head.try_run(*words, f"http://{HEAD}:8000{base}{path}")
        return None if code else json.loads(text or "{}")

    def spawn(self) -> dict[str, str]:
        """Start ann's server, and return the environment of its processes."""
        assert self.call("POST", "/users/ann/server") is not None, self.log.read_text()[-5000:]

        def is_ready() -> bool:
            server = (self.call("GET", "/users/ann") or {}).get("servers", {}).get("", {})
            return bool(server.get("ready"))

        wait_for(is_ready, lambda: self.log.read_text()[-5000:] + self.output())
        for pid in self.cluster.nodes["n1"].processes("batchspawner-singleuser"):
            text = Path(f"/proc/{pid}/environ").read_bytes().decode()
            found = dict(each.partition("=")[::2] for each in text.split("\0") if each)
            if "DLFS_VOLUMES" in found and "SLURM_STEP_ID" in found:
                return found
        raise AssertionError(self.output())

    def output(self) -> str:
        """Return what the jobs of ann have printed."""
        logs = self.cluster.home("ann").glob("jupyterhub_slurmspawner_*.log")
        return "\n".join(log.read_text() for log in logs)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, as ann's server shows them."""
        shown = self.call("GET", folder, base="/user/ann/api/contents")
        assert shown is not None, folder
        return sorted(each["name"] for each in shown["content"])

    def despawn(self) -> None:
        """Stop ann's server, and wait until its job has ended."""
        self.call("DELETE", "/users/ann/server")
        wait_for(lambda: not self.cluster.head.run("squeue", "--noheader"), "the end of the job")

    def close(self) -> None:
        """End the hub."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def hub() -> Iterator[HubOnHead]:
    reason = lacks_slurm()
    if reason:
        pytest.skip(reason)
    with Cluster(nodes=1) as cluster:
        hub = HubOnHead(cluster)
        try:
            yield hub
        finally:
            hub.close()


def test_a_job_mounts_the_volumes_of_its_user(hub: HubOnHead) -> None:
    node = hub.cluster.nodes["n1"]
    hub.cluster.configure(node, VOLUME="")
    volumes = hub.spawn()["DLFS_VOLUMES"]
    assert volumes.startswith("/tmp/dlfs-volumes-")
    assert hub.names(volumes) == ["forbidden.NOT-MOUNTED.txt", "photos"]
    assert hub.names(f"{volumes}/photos/photos") == ["0", "1"]
    assert "dlfs: volume forbidden: not mounted: " in hub.output()
    hub.despawn()
    wait_for(lambda: not leftovers(hub), lambda: str(leftovers(hub)))


def test_a_job_finds_what_the_prolog_has_mounted(hub: HubOnHead) -> None:
    hub.cluster.configure(hub.cluster.nodes["n1"])
    found = hub.spawn()
    assert found["DLFS_VOLUMES"] == found["DLFS_MOUNT"]
    assert hub.names(found["DLFS_VOLUMES"]) == ["photos"]
    hub.despawn()
    hub.cluster.wait_until_clean()


def leftovers(hub: HubOnHead) -> list[str]:
    script = "ls -d /tmp/dlfs-volumes-* 2>/dev/null; grep fuse.dlfs /proc/self/mountinfo; true"
    node = hub.cluster.nodes["n1"]
    return [
        *node.processes("dlfs.mount").values(),
        *node.run("sh", "-c", script).splitlines(),
    ]
