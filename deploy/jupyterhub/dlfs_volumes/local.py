"""Volumes for servers that are processes of the hub's machine.

The hub, as root, mounts each volume once for all users, where only root and the account that serves
it can reach it, and binds this mount into a directory of each user who may read the volume::

    DIRECTORY/volumes             mode 0700
    DIRECTORY/volumes/NAME.DIGEST the mount, by ``dlfs mount``: one server, one memory for samples
    DIRECTORY/users/USER          root's; an access control list lets one user in
    DIRECTORY/users/USER/NAME     a bind of the mount

So a thousand binds cost one server. Keys are read by the server alone. What is mounted is the only
state: a hub that was killed and started again finds it in /proc/self/mountinfo.

A volume is mounted by the first start of a server whose user may read it, and unmounted when no
user has it any more. A user's directory goes with the last server of the user. A volume that is
away costs a start at most ``wait_s``, however many servers start at once: they wait for one
attempt. The others are there; a file says why this one is not. ``dlfs mount`` has a keeper, which
starts a server that dies anew. If both are dead, the next start of a server of any user mounts the
volume anew, for all users.

Threads: the hub's event loop. Between two looks at what is mounted nothing else runs there, so that
no start and stop of servers meet in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pwd
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .messages import messages_of
from .mounts import bind, detach, mounts_below, open_to_user
from .table import VARIABLE, TableError, Volume, check_keys, volumes_of

DIRECTORY = "/run/dlfs/jupyterhub"
WAIT_S = 20.0
"""Longest time for which the start of a server waits for volumes, in seconds."""
ANSWER_S = 5.0
"""Longest time for the answer of a volume that is mounted, in seconds."""
REASON_SUFFIX = ".NOT-MOUNTED.txt"
"""End of the name of the file that says why a volume is not there."""
ADVICE = "The next start of a server tries again."


class LocalVolumes:
    """Mounts volumes for users of this machine, by hooks of JupyterHub.

    Args:
        volumes: from ``read_table``.
        directory: directory of all mounts, on a file system with access control lists.
        dlfs: the program, a name on the PATH or an absolute path.
        account: account of this machine that serves the volumes; /etc/fuse.conf must have
            ``user_allow_other`` unless it is root.
        wait_s: longest time for which the start of a server waits for volumes, in seconds.

    Raises:
        TableError: an argument is not what is expected, or this process does not run as root.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        *,
        directory: str = DIRECTORY,
        dlfs: str = "dlfs",
        account: str = "root",
        wait_s: float = WAIT_S,
    ) -> None:
        if os.geteuid() != 0:
            raise TableError(f"local volumes: expected a hub of root, got user {os.geteuid()}")
        program = shutil.which(dlfs)
        if program is None:
            raise TableError(f"local volumes: dlfs: expected a program, got {dlfs!r}")
        if not os.path.isabs(directory):
            raise TableError(
                f"local volumes: directory: expected an absolute path, got {directory!r}"
            )
        self._dlfs = os.path.abspath(program)
        self._account = _account(account)
        for volume in volumes:
            check_keys(volume, {0, self._account.pw_uid})
        self._volumes = list(volumes)
        self._wait_s = wait_s
        self._directory = os.path.realpath(directory)
        self._origins = f"{self._directory}/volumes"
        self._users = f"{self._directory}/users"
        self._attempts: dict[str, asyncio.Task[str | None]] = {}
        self._wanted: Counter[str] = Counter()

    def configure(self, c: Any) -> None:
        """Set the hooks in the configuration ``c`` of JupyterHub."""
        c.Spawner.pre_spawn_hook = self.on_start
        c.Spawner.post_stop_hook = self.on_stop

    async def on_start(self, spawner: Any) -> None:
        """Show the user of a spawner the volumes that the user may read, and no others.

        Raises:
            TableError: the user has no account on this machine.
            OSError: the system refuses a directory or a bind.
        """
        messages = messages_of(spawner)
        try:
            name = spawner.user.name
            uid = _account(name).pw_uid
            volumes = volumes_of(self._volumes, spawner)
            for volume in volumes:
                messages.add(f"Volume {volume.name}: mounting")
            self._wanted.update(map(self._origin, volumes))
            try:
                reasons = await asyncio.gather(*map(self._mounted, volumes))
                shown = dict(zip(volumes, reasons, strict=True))
                place = self._show(name, uid, shown)
            finally:
                self._wanted.subtract(map(self._origin, volumes))
            spawner.environment = {**spawner.environment, VARIABLE: place}
            for volume, reason in shown.items():
                found = f"not mounted: {reason}" if reason else f"{place}/{volume.name}"
                messages.add(f"Volume {volume.name}: {found}")
                if reason:
                    spawner.log.warning("dlfs: %s: volume %s: %s", name, volume.name, found)
        finally:
            messages.complete()

    async def on_stop(self, spawner: Any) -> None:
        """Remove the user's mounts, unless another server of the user needs them."""
        user = spawner.user
        others = [each for each in user.spawners.values() if each is not spawner]
        if not any(each.active for each in others):
            place = self._place(user.name)
            self._hide(place, kept=frozenset())
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(place)
        self._unmount_unused()

    # ---- users' directories ----------------------------------------------------------------------

    def _place(self, user: str) -> str:
        """Return the directory of a user; no name leads elsewhere."""
        escaped = quote(user, safe="")
        return f"{self._users}/{escaped.replace('.', '%2E') if escaped[:1] == '.' else escaped}"

    def _show(self, user: str, uid: int, reasons: Mapping[Volume, str | None]) -> str:
        """Bind volumes into the directory of a user, and return it.

        Args:
            user: the name of the user.
            uid: ID of the user.
            reasons: of the volumes that the user may read; None of each that is mounted, and else
                why it is not.
        """
        place = self._place(user)
        self._make_directories()
        _make_directory(place, 0o700)
        open_to_user(place, uid)
        mounts = mounts_below(self._directory)
        origins = {f"{place}/{volume.name}": self._origin(volume) for volume in reasons}
        # Another server of the user may have a volume that is silent now.
        kept = {path for path, at in origins.items() if mounts.get(path, "") == mounts.get(at)}
        self._hide(place, kept)
        for volume, reason in reasons.items():
            path = f"{place}/{volume.name}"
            if reason is not None:
                with open(f"{path}{REASON_SUFFIX}", "w", encoding="utf-8") as file:
                    os.fchmod(file.fileno(), 0o644)
                    file.write(f"{volume.name}: not mounted: {reason}\n{ADVICE}\n")
            elif path not in kept:
                os.mkdir(path)
                bind(origins[path], path)
        return place

    def _hide(self, place: str, kept: Set[str]) -> None:
        """Remove what a user's directory has, but for some paths."""
        for path in mounts_below(place):
            if path not in kept:
                detach(path)
        with contextlib.suppress(FileNotFoundError):
            for entry in list(os.scandir(place)):
                if entry.path not in kept:
                    os.rmdir(entry.path) if entry.is_dir() else os.unlink(entry.path)

    # ---- mounts ----------------------------------------------------------------------------------

    def _origin(self, volume: Volume) -> str:
        """Return where a volume is mounted. A name that is given to another one is elsewhere."""
        settings = (volume.uri, volume.memory, volume.options, volume.keys)
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()
        return f"{self._origins}/{volume.name}.{digest[:12]}"

    def _make_directories(self) -> None:
        """Make the directories above the users' ones, whatever the umask of the hub."""
        for parent in (*reversed(Path(self._directory).parents), Path(self._directory)):
            _make_directory(str(parent), 0o755)
        _make_directory(self._users, 0o711)

    async def _mounted(self, volume: Volume) -> str | None:
        """Wait until a volume is mounted. Returns None, or why it is not."""
        attempt = self._attempts.get(self._origin(volume))
        if attempt is None or attempt.done():
            attempt = asyncio.ensure_future(self._mount(volume))
            self._attempts[self._origin(volume)] = attempt
        try:
            return await asyncio.shield(attempt)
        except OSError as error:  # such as a full disk
            return str(error)

    async def _mount(self, volume: Volume) -> str | None:
        origin = self._origin(volume)
        device = mounts_below(self._directory).get(origin)
        if device is not None:
            # It is asked in a process, which can be killed if the mount does not answer.
            status, message = await self._run(
                ["stat", "--file-system", origin], ANSWER_S, root=True
            )
            if status != 1:
                return None if status == 0 else message
            detach(origin)
        self._make_directories()
        for path in (self._origins, origin):
            _make_directory(path, 0o700)
            os.chown(path, self._account.pw_uid, self._account.pw_gid)
        words = [self._dlfs, "--quiet", "mount", "--allow-other", "--no-uring"]
        words += ["--log", f"{origin}.log"]
        words += ["--memory", volume.memory] if volume.memory else []
        words += [*volume.options, "--", volume.uri, origin]
        status, message = await self._run(words, self._wait_s, keys=volume.keys)
        if status != 0:
            _remove_mountpoint(origin)
            return message
        if device is not None:
            for path, found in mounts_below(self._users).items():
                if found == device:  # a user's bind of the mount that died
                    detach(path)
                    bind(origin, path)
        return None

    def _unmount_unused(self) -> None:
        """Unmount the volumes that no user has, and for which no server waits."""
        mounts = mounts_below(self._directory)
        used = {device for path, device in mounts.items() if path.startswith(f"{self._users}/")}
        for path, device in mounts.items():
            is_origin = os.path.dirname(path) == self._origins
            if not is_origin or device in used or self._wanted[path] > 0:
                continue
            detach(path)  # then the server ends by itself
            _remove_mountpoint(path)

    async def _run(
        self, words: Sequence[str], seconds: float, *, root: bool = False, keys: str | None = None
    ) -> tuple[int | None, str]:
        """Run a program within a time, without the hub's environment.

        Returns:
            The exit status, None if the time was over, and what it said in the end.
        """
        account = self._account
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        environment |= {"HOME": account.pw_dir} | ({"DLFS_KEYS": keys} if keys else {})
        as_account: dict[str, Any] = {}
        if not root and account.pw_uid != 0:
            groups = os.getgrouplist(account.pw_name, account.pw_gid)
            as_account = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
            **as_account,
        )
        try:
            _, error = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            return None, f"no answer within {seconds:g} s"
        finally:
            if process.returncode is None:
                process.kill()  # a dlfs mount that is killed leaves no mount behind
        lines = error.decode(errors="replace").strip().splitlines()
        return process.returncode, lines[-1] if lines else f"exit status {process.returncode}"


def _make_directory(path: str, mode: int) -> None:
    """Make a directory with a mode, if it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, mode)


def _remove_mountpoint(path: str) -> None:
    """Remove the directory on which a volume is not mounted any more, and its log."""
    with contextlib.suppress(OSError):  # a server that was given up is still ending there
        os.rmdir(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.log")


def _account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except (KeyError, ValueError) as error:  # the latter for a name with a zero
        raise TableError(
            f"local volumes: expected an account of this machine, got {name!r}"
        ) from error
