"""The CSI driver and a holder as processes, and a client of the driver's socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

from dlfs.mount.mountpoint import MOUNTINFO, parse_mountinfo
from dlfs.mount.supervise.holder import Held, list_held
from dlfs_csi.records import name_of
from dlfs_csi.wire import PACKAGE, SERVICES, Mode, messages
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
CALL_SECONDS = 60.0
PUBLISHES = int(os.environ.get("DLFS_CSI_PUBLISHES", "4"))
"""Volumes that are published at once, and room of the node."""


class Refused(Exception):
    """A call failed with a code of gRPC.

    Args:
        code: its name.
        details: the message.
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


def capability(mode: int = Mode.MULTI_NODE_READER_ONLY, **words: Any) -> Any:
    mount = messages.MountVolume(**words)
    return messages.VolumeCapability(mount=mount, access_mode=messages.AccessMode(mode=mode))


def invoke(path: Path, method: str, timeout_s: float = CALL_SECONDS, **words: Any) -> Any:
    """Call a method of the driver on a socket.

    Raises:
        Refused: it fails.
    """
    service = next(name for name, methods in SERVICES.items() if method in methods)
    with grpc.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(
            f"/{PACKAGE}.{service}/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=getattr(messages, f"{method}Response").FromString,
        )
        try:
            return call(getattr(messages, f"{method}Request")(**words), timeout=timeout_s)
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details()) from None


def error_of(target: Path) -> int:
    """Return the errno of a request to a mount; 0 if it answers."""
    try:
        os.statvfs(target)
    except OSError as error:
        return error.errno or 0
    return 0


def server_user() -> str:
    """Return a user without rights who can run this Python, or root, without capabilities."""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
    command += ["--", sys.executable, "-c", "import dlfs"]
    done = subprocess.run(command, cwd="/", capture_output=True, check=False)
    return "65534:65534" if done.returncode == 0 else "0:0"


class Plant:
    """A node: holder, driver, target paths, and their folder in memory.

    Args:
        user: the user that servers run as.
        arguments: of the driver, in which ``{folder}`` is that folder.
    """

    def __init__(self, user: str, *arguments: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlfs-csi-", dir="/dev/shm"))
        self.folder.chmod(0o755)
        self.targets = self.folder / "targets"
        self.targets.mkdir()
        self.holder_folder = self.folder / "holder"
        self.socket = self.folder / "csi.sock"
        self.log = self.folder / "driver.log"
        servers = [] if "--servers" in arguments else ["--servers", "processes"]
        given = [each.format(folder=self.folder) for each in arguments]
        self._arguments = ["--server-user", user, *servers, *given]
        self.holder = self.start_holder()
        self.driver = self.start()

    def _start(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        path = [str(ROOT / "deploy/kubernetes/csi"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=output, stderr=output, env=environment
            )

    def start_holder(self) -> subprocess.Popen[bytes]:
        log = self.folder / "holder.log"
        (self.holder_folder / "control.sock").unlink(missing_ok=True)
        folder = str(self.holder_folder)
        self.holder = self._start(log, "dlfs.mount.supervise.holder_process", folder)
        wait_for(lambda: (self.holder_folder / "control.sock").exists(), "the holder")
        return self.holder

    def start(self) -> subprocess.Popen[bytes]:
        """Start the driver, and wait until it answers."""
        self.socket.unlink(missing_ok=True)
        self.start_process()
        wait_for(self.socket.exists, lambda: f"the driver: {self.log.read_text()}")
        return self.driver

    def start_process(self) -> None:
        """Start the driver."""
        state, run = str(self.folder / "state"), str(self.folder / "run")
        self.driver = self._start(
            self.log,
            *("dlfs_csi", "--endpoint", f"unix:{self.socket}", "--node-id", "node-1"),
            *("--state", state, "--run", run, "--holder", str(self.holder_folder)),
            *self._arguments,
        )

    def kill(self) -> None:
        self.driver.kill()
        self.driver.wait()

    # ---- calls

    def call(self, method: str, timeout_s: float = CALL_SECONDS, **words: Any) -> Any:
        return invoke(self.socket, method, timeout_s, **words)

    def publish(
        self, target: Path, volumes: str, *, timeout_s: float = CALL_SECONDS, **words: Any
    ) -> None:
        attributes = {"volumes": volumes, **words.pop("attributes", {})}
        words = {"volume_capability": capability(), "volume_id": target.name, **words}
        self.call(
            "NodePublishVolume", timeout_s, target_path=str(target), volume_context=attributes,
            **words,
        )  # fmt: skip

    def unpublish(self, target: Path) -> None:
        self.call("NodeUnpublishVolume", volume_id=target.name, target_path=str(target))

    # ---- what there is

    def held(self, target: Path) -> Held:
        name = name_of(str(target))
        return next(held for held in list_held(self.holder_folder) if held.name == name)

    def left(self) -> list[str]:
        """Return what publishing leaves, and unpublishing removes."""
        run = self.folder / "run"
        files = [*self.targets.iterdir(), *(self.folder / "state" / "records").iterdir()]
        files += [*run.glob("keys/*"), *run.glob("servers/*")]
        mounts = [r.mountpoint for r in parse_mountinfo(MOUNTINFO.read_bytes())]
        inside = os.fsencode(self.folder)
        found = [*map(str, files), *(os.fsdecode(each) for each in mounts if inside in each)]
        found += [held.name for held in list_held(self.holder_folder)]
        found += [f"process {pid}" for pid in self.servers()]
        return found

    def servers(self, target: Path | None = None) -> list[int]:
        """Return the processes that serve a mount, or all mounts."""
        folder = str(self.holder_folder / "mounts")
        wanted = folder if target is None else f"{folder}/{name_of(str(target))}"
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if wanted.encode() in command and b"--holder" in command:
                found.append(int(process.name))
        return found

    def close(self) -> None:
        for process in (self.driver, self.holder):
            process.kill()
            process.wait()
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)
        mounts = [r.mountpoint for r in parse_mountinfo(MOUNTINFO.read_bytes())]
        for mount in reversed(mounts):
            if mount.startswith(os.fsencode(self.folder) + b"/"):
                subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.folder)
