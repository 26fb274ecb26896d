"""Servers as pods: one a mount, on the node of this driver, without any rights.

A mount pod fulfils the Pod Security standard "restricted" but for its ``hostPath`` volumes: the
folder of its mount at the holder, the identity of the node as a host of NVMe, and the keys of its
mount, if it has any. It reaches no other mount, and no API. Its container is restarted by kubelet
for ever; a pod that was evicted or deleted is made again by ``Node.look_after``.

Keys are in a directory in the node's memory that only this pod's user reads (``keys``). They are
neither in an object of the API, which a Secret of the pod's own would be, nor handed over once,
which a container that is restarted could not ask for again.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlfs.base.units import MIB
from dlfs.block import FileUri, MemoryUri, SpdkUri, parse_uri, split_members
from dlfs_csi import DRIVER_NAME
from dlfs_csi.cluster import Cluster
from dlfs_csi.context import MountSpec, invalid
from dlfs_csi.failures import CallError, Code
from dlfs_csi.launching import Launch, ended

LABELS = {"app.kubernetes.io/name": "dlfs-mount", "app.kubernetes.io/managed-by": DRIVER_NAME}
MOUNT_LABEL = f"{DRIVER_NAME}/mount"
PREFIX = "dlfs-mount-"
GRACE_SECONDS = 5
"""Time for a server to end, in seconds."""
OTHER_MEMORY_BYTES = 512 * MIB
"""Memory of a server beside that for samples: the program, directories, open files."""
LIST_SECONDS = 30.0
"""Time between two lists of the pods of the node, in seconds."""
LOOK_SECONDS = 0.5
"""Time between two looks at a pod that starts, in seconds."""
STOP_SECONDS = 20.0
"""Longest wait for the end of a pod, in seconds."""

_HOLDER, _KEYS, _IDENTITY = "/run/dlfs/mount", "/run/dlfs/keys", "/etc/nvme"
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
_ABSENT = ("ErrImagePull", "ImagePullBackOff", "CreateContainerError", "RunContainerError")
_FULL = ("OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage")


@dataclass(frozen=True)
class PodOptions:
    """Options that all mount pods of a driver have in common.

    Attributes:
        node: name of the node.
        image: image of the servers, whose entry point is ``dlfs``.
        uid: user of the servers. ``gid`` likewise.
        identity: folder of the node with the files of ``/etc/nvme``.
        memory: memory limit where the attributes of a volume have none. ``memory_request``,
            ``cpu``, ``cpu_request`` likewise; empty: none.
        priority_class: priority class; empty: the cluster's default.
    """

    node: str
    image: str
    uid: int
    gid: int
    identity: Path
    memory: str = "1Gi"
    memory_request: str = ""
    cpu: str = ""
    cpu_request: str = "100m"
    priority_class: str = ""


def make_pod(launch: Launch, options: PodOptions) -> dict[str, Any]:
    """Return the pod of a server, as the API takes it."""
    volumes = [
        _host_path("holder", launch.folder),
        _host_path("identity", str(options.identity)),
        {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]
    places = [("holder", _HOLDER), ("identity", _IDENTITY)]
    environment = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    if launch.keys is not None:
        volumes.append(_host_path("keys", str(launch.keys)))
        places.append(("keys", _KEYS))
        environment["CREDENTIALS_DIRECTORY"] = _KEYS
    words = launch.spec.arguments()
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in places]
    container = {
        "name": "server",
        "image": options.image,
        "imagePullPolicy": "IfNotPresent",
        # Kubernetes replaces $(NAME) in arguments, and $$ by $.
        "args": ["mount", "--holder", _HOLDER, *(w.replace("$", "$$") for w in words)],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": _resources(launch.spec, options),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    spec: dict[str, Any] = {
        "nodeName": options.node,
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.uid,
            "runAsGroup": options.gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    labels = {**LABELS, MOUNT_LABEL: launch.name}
    metadata = {"name": PREFIX + launch.name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _host_path(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}


def _resources(spec: MountSpec, options: PodOptions) -> dict[str, Any]:
    """Return the resources of a server; memory for samples that is given adds to the program's."""
    needed = f"{(spec.memory_bytes + OTHER_MEMORY_BYTES) // MIB}Mi" if spec.memory_bytes else ""
    limits = {
        "memory": spec.pod_memory or needed or options.memory,
        "cpu": spec.pod_cpu or options.cpu,
    }
    requests = {
        "memory": spec.pod_memory_request or needed or options.memory_request,
        "cpu": spec.pod_cpu_request or options.cpu_request,
    }
    found = {"limits": limits, "requests": requests}
    return {
        kind: {name: value for name, value in values.items() if value}
        for kind, values in found.items()
    }


class PodLauncher:
    """Starts servers as pods.

    Args:
        cluster: the API server.
        options: what the pods have in common.
    """

    def __init__(self, cluster: Cluster, options: PodOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._lock = threading.Lock()
        self._looked_s: dict[str, float] = {}
        self._names: set[str] = set()
        self._listed_s = float("-inf")

    def check(self, spec: MountSpec) -> None:
        """Refuse volumes on files and disks, which a pod without rights does not see."""
        for member in (member for volume in spec.volumes for member in split_members(volume)):
            if isinstance(parse_uri(member), FileUri | MemoryUri | SpdkUri):
                raise invalid(
                    "attribute 'volumes': expected nvme-tcp: or nvme-tcp+discover: URIs, since the "
                    f"server's pod has no disks of the node, got {member!r}"
                )

    def start(self, launch: Launch) -> None:
        """Create the pod of a server, or again if it has been evicted or deleted."""
        with self._lock:
            self._names.add(launch.name)
            self._looked_s.pop(launch.name, None)
        if self._cluster.create(make_pod(launch, self._options)):
            return
        found = self._cluster.pod(PREFIX + launch.name)
        if found is not None and found["status"].get("phase") in ("Failed", "Succeeded"):
            self._cluster.delete(PREFIX + launch.name, 0)  # the next call makes it anew

    def failure(self, name: str) -> CallError | None:
        """Return why the server of a pod has ended, or why it cannot start."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._looked_s.get(name, float("-inf")) < LOOK_SECONDS:
                return None
            self._looked_s[name] = now_s
        try:
            found = self._cluster.pod(PREFIX + name)
        except CallError as error:
            return error if error.code is not Code.UNAVAILABLE else None
        return None if found is None else failure_of(found["status"])

    def stop(self, name: str) -> None:
        """Delete the pod of a server, and wait for its end."""
        deadline_s = time.monotonic() + STOP_SECONDS
        if self._cluster.delete(PREFIX + name, GRACE_SECONDS):
            while self._cluster.pod(PREFIX + name) is not None:
                if time.monotonic() > deadline_s:
                    raise CallError(Code.UNAVAILABLE, f"pod {PREFIX}{name}: it does not end")
                time.sleep(LOOK_SECONDS)
        with self._lock:
            self._names.discard(name)
            self._looked_s.pop(name, None)

    def names(self) -> set[str]:
        """Return the names of the mounts that have a pod on this node, as listed last."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._listed_s < LIST_SECONDS:
                return set(self._names)
            self._listed_s = now_s
        labels = ",".join(f"{key}={value}" for key, value in LABELS.items())
        pods = self._cluster.pods(labels, self._options.node)
        with self._lock:
            self._names |= {pod["metadata"]["labels"].get(MOUNT_LABEL, "") for pod in pods} - {""}
            return set(self._names)


def failure_of(status: Any) -> CallError | None:
    """Return why a pod of this status has no server, and may get none; None if it may."""
    reason = status.get("reason", "")
    if status.get("phase") == "Failed":
        code = Code.RESOURCE_EXHAUSTED if reason in _FULL else Code.UNAVAILABLE
        return CallError(code, f"the server's pod has failed: {reason}: {status.get('message')}")
    for container in status.get("containerStatuses", ()):
        for state in (container.get("state", {}), container.get("lastState", {})):
            terminated = state.get("terminated")
            if terminated is not None:
                return ended(int(terminated.get("exitCode", 1)), terminated.get("message") or "")
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in (*_HOPELESS, *_ABSENT):
            text = f"{waiting['reason']}: {waiting.get('message', '')}"
            return CallError(Code.UNAVAILABLE, f"the server's container cannot start: {text}")
    return None


def write_identity(folder: Path) -> None:
    """Write the files of ``/etc/nvme`` by which mount pods connect as this node.

    Raises:
        UsageError: the node has no identity.
    """
    from dlfs.block.host import host_identity

    nqn, host_id = host_identity(None, None)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, text in (("hostnqn", nqn), ("hostid", str(host_id))):
        temporary = folder / f".{name}.new"
        temporary.write_text(text + "\n")
        os.chmod(temporary, 0o644)
        temporary.rename(folder / name)
