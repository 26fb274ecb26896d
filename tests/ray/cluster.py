"""A Ray cluster on this machine for tests: ``RayCluster``.

It has one node, ports that are free, and a token of its own, so that no one else can use it. The
node's processes belong to the one that this process starts, which ends them when it is terminated.

Threads: one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_for

RAY = Path(sys.executable).with_name("ray")
OBJECT_STORE_BYTES = 100 << 20
CPUS = 4
"""Processors that the node claims; they are shared with this machine."""


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class RayCluster:
    """A cluster of one node, which answers when the constructor returns.

    Attributes:
        address: its address, for ``ray.init``.
        client: its address for Ray Client.
        environment: environment of programs that use it.
    """

    def __init__(self) -> None:
        # Short: the names of its sockets begin with it.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        port, client_port = free_port(), free_port()
        token = self._folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        options = {
            "port": port,
            "ray-client-server-port": client_port,
            "num-cpus": CPUS,
            "object-store-memory": OBJECT_STORE_BYTES,
            "include-dashboard": "false",
            "dashboard-agent-listen-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "temp-dir": self._folder / "t",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [RAY, "start", "--head", "--block", "--disable-usage-stats", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            wait_for(self._is_up, lambda: f"the cluster: {self._log()}")
            current = self._folder / "t" / "ray_current_cluster"
            self.address = current.read_text().strip()
            self.client = f"ray://{self.address.rpartition(':')[0]}:{client_port}"
        except BaseException:
            self.close()
            raise

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log()
        return "--block" in self._log().split("Next steps")[-1] and "block forever" in self._log()

    def processes(self, *patterns: str) -> dict[int, str]:
        """Return the processes of the cluster's session: IDs and titles.

        Args:
            patterns: only those whose title has one of these texts.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                variables = (folder / "environ").read_bytes()
                ours = f"RAY_AUTH_TOKEN_PATH={self._folder}/token".encode()
                if ours in variables and (not patterns or any(each in text for each in patterns)):
                    found[int(folder.name)] = text
        return found

    def workers(self) -> dict[int, str]:
        """Return the processes that run a worker of an import."""
        return self.processes("ray::dlfs import-worker")

    def close(self) -> None:
        """End the cluster."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.processes(), "the end of the cluster's processes")
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
