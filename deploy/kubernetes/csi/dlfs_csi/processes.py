"""Servers as processes of this machine: for machines without a cluster, and for tests.

Each is the leader of a session of its own, without capabilities and new privileges, of a user
without rights, so that it outlives the driver. A file has its process ID and the time of its start,
by which a later driver finds it; another one its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from dlfs.errors import NotFoundError
from dlfs_csi.context import MountSpec
from dlfs_csi.failures import CallError, Code
from dlfs_csi.launching import Launch, ended

STOP_SECONDS = 5.0
"""Time for a server to end after SIGTERM, in seconds; SIGKILL follows."""
_OUTPUT_BYTES = 8192
_START_TIME = 19
"""Field of /proc/PID/stat, counted from the process's state."""


class ProcessLauncher:
    """Starts servers as processes.

    Args:
        folder: directory of their files, which is made.
        uid: the user that they run as. ``gid`` likewise.

    Raises:
        NotFoundError: ``setpriv`` is not installed.
    """

    def __init__(self, folder: Path, uid: int, gid: int) -> None:
        program = shutil.which("setpriv")
        if program is None:
            raise NotFoundError("start servers: expected setpriv (package util-linux) on the PATH")
        self._drop = [
            *(program, f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
            *("--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--"),
        ]
        self._folder = folder
        self._lock = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)

    def check(self, spec: MountSpec) -> None:
        """Accept any volume."""

    def _file(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}.{suffix}"

    def start(self, launch: Launch) -> None:
        """Start a server, unless it runs."""
        if self._pid(launch.name):
            return
        command = [
            *(*self._drop, sys.executable, "-P", "-m", "dlfs.cli", "mount"),
            *("--holder", launch.folder, *launch.spec.arguments()),
        ]
        environment = {
            key: value
            for key, value in os.environ.items()
            if key in ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")
        }
        environment |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        if launch.keys is not None:
            environment["CREDENTIALS_DIRECTORY"] = str(launch.keys)
        try:
            with self._file(launch.name, "log").open("wb") as output:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
            with self._lock:
                self._children[launch.name] = child
            words = {"pid": child.pid, "start": _start_time(child.pid)}
            temporary = self._file(launch.name, "new")
            temporary.write_text(json.dumps(words))
            temporary.rename(self._file(launch.name, "pid"))
        except OSError as error:
            raise CallError(
                Code.RESOURCE_EXHAUSTED, f"start a server: {error.strerror or error}"
            ) from error

    def _pid(self, name: str) -> int:
        """Return the process ID of a server that runs; 0 if none does."""
        with self._lock:
            child = self._children.get(name)
            if child is not None:
                return 0 if child.poll() is not None else child.pid
        try:
            words = json.loads(self._file(name, "pid").read_text())
            found = _start_time(words["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return int(words["pid"]) if found and found == words["start"] else 0

    def failure(self, name: str) -> CallError | None:
        """Return why a server of this driver has ended; None if it runs, or is unknown."""
        with self._lock:
            child = self._children.get(name)
            status = None if child is None else child.poll()
        if status is None:
            return None
        output = b""
        with contextlib.suppress(OSError), self._file(name, "log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _OUTPUT_BYTES))
            output = file.read()
        return ended(status, output.decode(errors="replace"))

    def stop(self, name: str) -> None:
        """Stop a server and its children, and forget it."""
        pid = self._pid(name)
        if pid:
            _signal_group(pid, signal.SIGTERM)
            _await_end(pid, STOP_SECONDS)
            _signal_group(pid, signal.SIGKILL)
            if not _await_end(pid, STOP_SECONDS):
                raise CallError(Code.UNAVAILABLE, f"stop server {pid}: it does not end")
        with self._lock:
            child = self._children.pop(name, None)
        if child is not None:
            child.wait()
        for suffix in ("pid", "new", "log"):
            self._file(name, suffix).unlink(missing_ok=True)

    def names(self) -> set[str]:
        """Return the names of all mounts that have a server, or had one."""
        return {path.name.partition(".")[0] for path in self._folder.iterdir()}


def _start_time(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[_START_TIME])


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _await_end(pid: int, seconds: float) -> bool:
    """Wait for the end of a process. Returns True if it has ended."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(file)
