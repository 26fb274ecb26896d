"""Runs the driver: ``python -m dlfs_csi --help``."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before gRPC is loaded: nothing forks

from dlfs.errors import DlfsError, LockedError, UsageError
from dlfs_csi import DRIVER_NAME
from dlfs_csi.cluster import ACCOUNT, Cluster
from dlfs_csi.controller import Controller
from dlfs_csi.failures import CallError
from dlfs_csi.keys import KeyFolders, Redactor
from dlfs_csi.launching import Launcher
from dlfs_csi.node import Node
from dlfs_csi.pods import PodLauncher, PodOptions, write_identity
from dlfs_csi.pools import read_pools
from dlfs_csi.processes import ProcessLauncher
from dlfs_csi.records import Records
from dlfs_csi.service import ControllerService, Identity, NodeService, Watch, make_server
from dlfs_csi.sockets import ServiceSockets

_STOP_SECONDS = 5
_LOCK_SECONDS = 0.1

_log = logging.getLogger("dlfs_csi")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dlfs-csi", description=(__doc__ or "").splitlines()[0])
    variables = os.environ
    add = parser.add_argument
    add("--endpoint", default=variables.get("CSI_ENDPOINT", ""), metavar="unix:PATH",
        help="the socket on which to answer [$CSI_ENDPOINT]")  # fmt: skip
    add("--node-id", default=variables.get("NODE_NAME", socket.gethostname()), metavar="NAME",
        help="name of this node [$NODE_NAME, or the host's]")  # fmt: skip
    add("--state", default=f"/var/lib/kubelet/plugins/{DRIVER_NAME}", metavar="FOLDER",
        help="records of what is published [%(default)s]")  # fmt: skip
    add("--run", default="/run/dlfs/csi", metavar="FOLDER",
        help="keys and servers' files, in memory [%(default)s]")  # fmt: skip
    add("--holder", default="/run/dlfs/holder", metavar="FOLDER",
        help="the folder of 'dlfs hold' [%(default)s]")  # fmt: skip
    add("--servers", choices=("pods", "processes"), default="pods",
        help="what serves mounts [%(default)s]")  # fmt: skip
    add("--server-user", default="65534:65534", metavar="UID:GID",
        help="the user that servers run as [%(default)s]")  # fmt: skip
    add("--service", default="", metavar="PATH",
        help="the control socket of the node service, whose --sockets is the directory 'sockets' "
        "next to it: for volumes with access: service")  # fmt: skip
    add("--volumes-max", type=int, default=64, metavar="N",
        help="most volumes on this node [%(default)s]")  # fmt: skip
    add("--services", choices=("node", "controller", "both"), default="node",
        help="what to answer besides the identity service [%(default)s]")  # fmt: skip
    add("--pools", default="/etc/dlfs/pools.json", metavar="FILE",
        help="the pools of the controller [%(default)s]")  # fmt: skip
    pods = parser.add_argument_group("pods of servers")
    add = pods.add_argument
    add("--image", default="", help="their image, whose entry point is dlfs")
    add("--namespace", default=variables.get("POD_NAMESPACE", ""),
        help="their namespace [$POD_NAMESPACE, or the driver's]")  # fmt: skip
    add("--api", default="", metavar="URL", help="the API server [as a pod finds it]")
    add("--account", default=str(ACCOUNT), metavar="FOLDER", help="the service account")
    add("--pod-memory", default="1Gi", metavar="QUANTITY", help="memory limit [%(default)s]")
    add("--pod-memory-request", default="", metavar="QUANTITY", help="memory request")
    add("--pod-cpu", default="", metavar="QUANTITY", help="processor limit")
    add("--pod-cpu-request", default="100m", metavar="QUANTITY",
        help="processor request [%(default)s]")  # fmt: skip
    add("--priority-class", default="", metavar="NAME", help="their priority class")
    return parser


def _node(options: argparse.Namespace) -> Node:
    uid, gid = _user(options.server_user)
    run = Path(options.run)
    launcher = _launcher(options, run, uid, gid)
    return Node(
        records=Records(Path(options.state) / "records"),
        keys=KeyFolders(run / "keys", uid, gid),
        launcher=launcher,
        sockets=ServiceSockets(options.service),
        stages=run / "stages",
        holder=options.holder,
        server_uid=uid,
        volumes_max=options.volumes_max,
    )


def _user(text: str) -> tuple[int, int]:
    uid, _, gid = text.partition(":")
    if not (uid.isdecimal() and gid.isdecimal()):
        raise UsageError(f"--server-user: expected UID:GID, got {text!r}")
    return int(uid), int(gid)


def _launcher(options: argparse.Namespace, run: Path, uid: int, gid: int) -> Launcher:
    if options.servers == "processes":
        return ProcessLauncher(run / "servers", uid, gid)
    if not options.image:
        raise UsageError("--servers pods: expected --image, got none")
    write_identity(run / "identity")
    pods = PodOptions(
        node=options.node_id,
        image=options.image,
        uid=uid,
        gid=gid,
        identity=run / "identity",
        memory=options.pod_memory,
        memory_request=options.pod_memory_request,
        cpu=options.pod_cpu,
        cpu_request=options.pod_cpu_request,
        priority_class=options.priority_class,
    )
    return PodLauncher(Cluster(options.namespace, options.api, Path(options.account)), pods)


def _lock(state: Path, ended: threading.Event) -> int:
    """Wait for the end of a driver before this one, which may still answer calls while it ends.

    Returns:
        A descriptor, which holds the lock.

    Raises:
        LockedError: SIGTERM came meanwhile.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not told:
                _log.info("waiting for the end of another driver, which has %s", state)
                told = True
        if ended.wait(_LOCK_SECONDS):
            raise LockedError(f"wait for another driver, which has {state}: ended by a signal")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the driver until SIGTERM or SIGINT; what is published stays."""
    parser = _parser()
    options = parser.parse_args(arguments)
    path = options.endpoint.removeprefix("unix:")
    if not path:
        parser.error("expected --endpoint unix:PATH")
    redactor = Redactor()
    handler = logging.StreamHandler()
    handler.addFilter(redactor)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        node, controller, lock = None, None, -1
        if options.services != "controller":
            lock = _lock(Path(options.state), ended)
            node = _node(options)
        if options.services != "node":
            controller = Controller(read_pools(Path(options.pools)))
        services: dict[str, object] = {"Identity": Identity(node, controller)}
        if controller is not None:
            services["Controller"] = ControllerService(controller)
        if node is not None:
            services["Node"] = NodeService(node, options.node_id, redactor)
        watch = None if node is None else Watch(node)
        if watch is not None:
            watch.look()
        server = make_server(path, services)
    except (DlfsError, CallError, OSError) as error:
        sys.exit(f"dlfs-csi: {error}")
    server.start()
    if watch is not None:
        watch.start()
    _log.info("answering on %s", path)
    ended.wait()
    server.stop(_STOP_SECONDS).wait()
    if watch is not None:
        watch.stop()
        os.close(lock)


if __name__ == "__main__":
    main()
