"""Runs containers of the project's image by podman, in a store of images of their own.

Nothing is taken from a registry: ``make test-containers`` names the archive that ``make image`` has
built in ``DLFS_CONTAINERS``. Containers have no network. runc and the file system ``vfs`` work also
where the kernel has no overlay or the machine is itself a container.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.waiting import wait_for

ARCHIVE_VARIABLE = "DLFS_CONTAINERS"
PROGRAMS = ("podman", "runc", "jq")
ENGINE_PROFILE = Path("/usr/share/containers/seccomp.json")
URING_CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")


def lacks_containers() -> str | None:
    """Return what this machine lacks for containers, or None."""
    archive = os.environ.get(ARCHIVE_VARIABLE)
    if not archive:
        return "takes minutes: make test-containers"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    if not Path(archive).is_file():
        return f"no image {archive} (make image)"
    return None if os.geteuid() == 0 else "not root"


class Podman:
    """A store with the image, and the containers that are made of it.

    Args:
        folder: an empty directory.
    """

    def __init__(self, folder: Path) -> None:
        store = (
            "--root",
            folder / "store",
            "--runroot",
            folder / "run",
            "--tmpdir",
            folder / "tmp",
        )
        engine = ("--runtime", "runc", "--cgroup-manager", "cgroupfs", "--storage-driver", "vfs")
        self._command = ["podman", *map(str, store), *engine, "--events-backend", "none"]
        self._containers: list[Container] = []
        archive = Path(os.environ[ARCHIVE_VARIABLE])
        self.image = self._load(archive)
        """Name of the image, with its version."""
        self.driver_image = self._load(archive.with_name("dlfs-csi.tar"))
        """Name of the image with the CSI driver."""

    def _load(self, archive: Path) -> str:
        loaded = self("load", "--quiet", "--input", archive)
        return loaded.stdout.rpartition(" ")[2].strip()

    def __call__(
        self, *words: object, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of podman; return its output."""
        options = {"capture_output": True, "text": True} | options
        done = subprocess.run([*self._command, *map(str, words)], check=False, **options)
        if check and done.returncode != 0:
            raise AssertionError(f"podman {' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
        return done

    def options(
        self,
        *,
        user: int | None = None,
        root_for_mounts: bool = False,
        privileged: bool = False,
        network: str = "none",
    ) -> list[str]:
        """Return the options of all containers, which have no capabilities by default.

        Args:
            user: ID of the user; by default that of the image.
            root_for_mounts: True for root with what a container needs that mounts by itself.
            privileged: True for all rights.
            network: ``none``, or ``host`` for that of this machine.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        given = [f"--network={network}", "--no-healthcheck"]
        given.append("--privileged" if privileged else "--cap-drop=all")
        given += [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=1000:1000"]
        if root_for_mounts:
            given += ["--user", "0", "--device", "/dev/fuse"]
            given += [f"--cap-add={name}" for name in ("SYS_ADMIN", "DAC_OVERRIDE")]
        elif user is not None:
            given += ["--user", f"{user}:{user}"]
        return given

    def run(
        self, *words: object, options: Sequence[object] = (), check: bool = True, **who: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container until it ends."""
        arguments = [*self.options(**who), *options]
        return self("run", "--rm", *arguments, self.image, *words, check=check, timeout=600)

    def python(
        self, code: str, *, options: Sequence[object] = (), check: bool = True, **who: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in Python in a container until it ends."""
        options = [*options, "--entrypoint", "python"]
        return self.run("-c", code, options=options, check=check, **who)

    def start(
        self, *words: object, options: Sequence[object] = (), image: str = "", **who: Any
    ) -> Container:
        """Start a container in the background."""
        arguments = [*self.options(**who), *options, image or self.image]
        done = self("run", "--detach", *arguments, *words)
        container = Container(self, done.stdout.strip())
        self._containers.append(container)
        return container

    def close(self) -> None:
        """Remove all containers and the image."""
        self("rm", "--all", "--force", "--time", "0", check=False)
        self("rmi", "--all", "--force", check=False)


class Container:
    """A container in the background.

    Args:
        podman: its store.
        name: its ID.
    """

    def __init__(self, podman: Podman, name: str) -> None:
        self._podman = podman
        self.name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._podman("rm", "--force", "--time", "0", self.name, check=False)

    def do(self, verb: str, *options: object) -> None:
        """Run a verb of podman on the container: pause, unpause, kill, start."""
        self._podman(verb, *options, self.name)

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return self._podman("exec", self.name, *words, check=check, timeout=600)

    def logs(self) -> str:
        """Return what the container has printed."""
        done = self._podman("logs", self.name)
        return done.stdout + done.stderr

    def inspect(self) -> dict[str, Any]:
        """Return podman's description of the container."""
        (found,) = json.loads(self._podman("inspect", self.name).stdout)
        return dict(found)

    @property
    def state(self) -> dict[str, Any]:
        """Its state, such as ``Running``, ``ExitCode``, ``OOMKilled`` and ``Pid``."""
        return dict(self.inspect()["State"])

    def wait_running(self, *words: object) -> None:
        """Wait until a command succeeds in the container; fail when the container ends."""

        def ready() -> bool:
            if not self.state["Running"]:
                raise AssertionError(f"the container ended:\n{self.logs()}")
            return self.run(*words, check=False).returncode == 0

        wait_for(ready, lambda: f"{words} in the container:\n{self.logs()}")


def allow_uring(path: Path) -> Path:
    """Write the engine's seccomp profile with io_uring allowed, as docs/kubernetes.md has it."""
    profile = json.loads(ENGINE_PROFILE.read_text())
    profile["syscalls"].append({"names": [*URING_CALLS], "action": "SCMP_ACT_ALLOW"})
    path.write_text(json.dumps(profile))
    return path


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent is a process, as this machine numbers them."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
