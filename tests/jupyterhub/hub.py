"""A real JupyterHub on this machine for tests: ``Hub``, and real ``accounts``.

The hub runs as root with PAM, npm's configurable-http-proxy, and ports of 127.0.0.1 that were free.
Everything it has lies in a folder of its own, which users may enter. ``close`` ends the hub, its
proxy and all processes of the accounts, and unmounts what is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from deploy.jupyterhub.dlfs_volumes.mounts import detach, mounts_below
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
PROXY = ROOT / "build/jupyterhub/node_modules/.bin/configurable-http-proxy"
CHROMIUM = "/usr/bin/chromium"
TOKEN = "token-of-the-tests"
PASSWORD = "only-of-this-test"

_CONFIGURATION = """\
import sys

sys.path.insert(0, {package!r})
from dlfs_volumes import *
from jupyterhub.spawner import LocalProcessSpawner

c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie_secret"
c.JupyterHub.allow_named_servers = True
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 0}}
c.JupyterHub.services = [{{"name": "tests", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "tests", "services": ["tests"],
     "scopes": ["admin:users", "admin:servers", "access:servers", "groups", "admin:groups"]}}
]
c.PAMAuthenticator.open_sessions = False
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
c.Spawner.notebook_dir = "/"
c.Spawner.ip = "127.0.0.1"
c.LocalProcessSpawner.interrupt_timeout = 1
c.Spawner.environment = {{
    "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
    "JUPYTER_PLATFORM_DIRS": "1",
}}
"""


def lacks_hub() -> str | None:
    """Return what this machine lacks for a hub, or None."""
    packages = ("jupyterhub", "jupyterlab", "batchspawner", "kubespawner", "playwright")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    missing += [path for path in (str(PROXY), CHROMIUM) if not Path(path).exists()]
    if missing:
        return f"no {', '.join(missing)} (make test-jupyterhub)"
    return None if os.geteuid() == 0 else "not root"


@contextlib.contextmanager
def accounts(*names: str, home: Path | None = None) -> Iterator[list[str]]:
    """Make accounts of this machine, with a home and ``PASSWORD`` if ``home`` is given.

    Yields:
        Their names, which are ``names`` and the process ID.
    """
    made = []
    try:
        for name in names:
            user = f"{name}{os.getpid()}"
            homes = ["--create-home", "--home-dir", str(home / user)] if home else ["-M"]
            _command("useradd", *homes, "--shell", "/bin/bash", user)
            made.append(user)
        if home:
            subprocess.run(
                ["chpasswd"],
                input="".join(f"{user}:{PASSWORD}\n" for user in made),
                text=True,
                check=True,
            )
        yield made
    finally:
        for user in made:
            kill_processes_of(user)
            subprocess.run(["userdel", "--force", user], capture_output=True)


def kill_processes_of(user: str) -> None:
    """Kill the processes of an account that a test has made."""
    with contextlib.suppress(KeyError):
        uid = pwd.getpwnam(user).pw_uid
        while found := processes_of(uid):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(uid: int) -> list[int]:
    """Return the processes of a user, but for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == uid and os.readlink(path / "exe"):
                found.append(int(path.name))
    return found


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nothing listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Hub:
    """A JupyterHub.

    Attributes:
        folder: its folder, which users may enter.
        home: directory for the homes of users.
        mounts: directory for its mounts, in /run.
        url: its URL.
        log: file of what it says.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlfs-hub-", dir="/tmp"))
        self.folder.chmod(0o711)
        self.mounts = Path(tempfile.mkdtemp(prefix="dlfs-test-", dir="/run"))
        self.mounts.chmod(0o711)
        self.home = self.folder / "home"
        self.home.mkdir(mode=0o711)
        self._ports = free_ports(3)
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def configure(self, settings: str) -> None:
        """Write the configuration.

        Args:
            settings: its last lines. Everything of ``dlfs_volumes`` is imported there.
        """
        text = _CONFIGURATION.format(
            package=str(ROOT / "deploy/jupyterhub"),
            ports=self._ports,
            proxy=str(PROXY),
            folder=self.folder,
            token=TOKEN,
            python=sys.executable,
        )
        (self.folder / "jupyterhub_config.py").write_text(text + settings)

    def start(self) -> None:
        """Start the hub, and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", self.folder / "jupyterhub_config.py"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self._answers, lambda: f"the hub: {self.log.read_text()[-3000:]}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/hub/health", timeout=5).close()
            return True
        return False

    def kill(self) -> None:
        """Kill the hub; its proxy and the servers go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the hub, which ends its servers and its proxy."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)

    def close(self) -> None:
        """End everything."""
        self.stop()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self.folder / "jupyterhub-proxy.pid").read_text()), signal.SIGKILL)
        for path in reversed(self.mounted()):
            detach(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.mounts, ignore_errors=True)

    def mounted(self) -> list[str]:
        """Return what is mounted below ``mounts``."""
        return list(mounts_below(str(self.mounts)))

    def call(self, method: str, path: str, body: Any = None, base: str = "/hub/api") -> Any:
        """Call the hub's REST API, or that of a user's server, and return what it answers."""
        request = urllib.request.Request(
            f"{self.url}{base}{path}",
            method=method,
            headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
            data=None if body is None else json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            said = f"{error.read().decode()}\n{self.log.read_text()[-6000:]}"
            raise AssertionError(f"{method} {path}: {error.code} {said}") from error
        return json.loads(text) if text else None

    def spawn(self, user: str, server: str = "") -> list[str]:
        """Start a server, wait until it is ready, and return what its progress says."""
        self.call("POST", f"/users/{user}/servers/{server}")
        request = urllib.request.Request(
            f"{self.url}/hub/api/users/{user}/servers/{server}/progress",
            headers={"Authorization": f"token {TOKEN}"},
        )
        said = []
        with urllib.request.urlopen(request, timeout=90) as events:
            for line in events:
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    said.append(event["message"])
                    assert not event.get("failed"), (said, self.log.read_text()[-3000:])
                    if event.get("ready"):
                        return said
        raise AssertionError(said)

    def despawn(self, user: str, server: str = "") -> None:
        """Stop a server, and wait for its end."""
        with contextlib.suppress(KeyError):
            self.call("DELETE", f"/users/{user}/servers/{server}")
            wait_for(
                lambda: server not in self.call("GET", f"/users/{user}")["servers"],
                f"the end of {user}'s server {server!r}",
            )
