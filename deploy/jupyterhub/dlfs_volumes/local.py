"""Volumes for servers that are processes of the hub's machine.

The hub, as root, mounts each volume once for all users, where only root and the account that serves
it can reach it, and binds this mount into a directory of each user who may read the volume::

    DIRECTORY/volumes             mode 0700
    DIRECTORY/volumes/NAME        the mount, by ``dlfs mount``: one server, one memory for samples
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
import os
import pwd
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
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
        self._volumes = {volume.name: volume for volume in volumes}
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
            volumes = volumes_of(self._volumes.values(), spawner)
            for volume in volumes:
                messages.add(f"Volume {volume.name}: mounting")
            self._wanted.update(volume.name for volume in volumes)
            try:
                reasons = await asyncio.gather(*map(self._mounted, volumes))
                shown = {v.name: reason for v, reason in zip(volumes, reasons, strict=True)}
                place = self._show(name, uid, shown)
            finally:
                self._wanted.subtract(volume.name for volume in volumes)
            spawner.environment = {**spawner.environment, VARIABLE: place}
            for volume_name, reason in shown.items():
                if reason is None:
                    messages.add(f"Volume {volume_name}: {place}/{volume_name}")
                else:
                    messages.add(f"Volume {volume_name}: not mounted: {reason}")
                    spawner.log.warning(
                        "dlfs: %s: volume %s: not mounted: %s", name, volume_name, reason
                    )
        finally:
            messages.complete()

    async def on_stop(self, spawner: Any) -> None:
        """Remove the user's mounts, unless another server of the user needs them."""
        user = spawner.user
        others = [each for each in user.spawners.values() if each is not spawner]
        if not any(each.active for each in others):
            place = self._place(user.name)
            self._hide(place, keep=())
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(place)
        self._unmount_unused()

    # ---- users' directories ----------------------------------------------------------------------

    def _place(self, user: str) -> str:
        """Return the directory of a user; no name leads elsewhere."""
        escaped = quote(user, safe="")
        return f"{self._users}/{escaped.replace('.', '%2E') if escaped[:1] == '.' else escaped}"

    def _show(self, user: str, uid: int, reasons: dict[str, str | None]) -> str:
        """Bind volumes into the directory of a user, and return it.

        Args:
            user: the name of the user.
            uid: ID of the user.
            reasons: of the volumes that the user may read; None of each that is mounted, and else
                why it is not.
        """
        place = self._place(user)
        os.makedirs(self._users, mode=0o711, exist_ok=True)
        os.makedirs(place, mode=0o700, exist_ok=True)
        open_to_user(place, uid)
        self._hide(place, keep=reasons)  # another server of the user may have one that is silent
        for name, reason in reasons.items():
            if reason is None:
                self._bind(name, f"{place}/{name}")
            else:
                with open(f"{place}/{name}{REASON_SUFFIX}", "w", encoding="utf-8") as file:
                    os.fchmod(file.fileno(), 0o644)
                    file.write(f"{name}: not mounted: {reason}\n{ADVICE}\n")
        return place

    def _bind(self, name: str, target: str) -> None:
        """Show a mounted volume in a user's directory; replace a bind of an earlier mount."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(target, 0o755)  # makedirs would look at what is mounted there
        mounts = mounts_below(self._directory)
        origin = f"{self._origins}/{name}"
        device = mounts.get(target)
        if device is not None and device != mounts.get(origin):
            detach(target)
            device = None
        if device is None:
            bind(origin, target)

    def _hide(self, place: str, keep: Iterable[str]) -> None:
        """Remove what a user's directory has, but for some volumes."""
        kept = {f"{place}/{name}" for name in keep}
        for path in mounts_below(place):
            if path not in kept:
                detach(path)
        with contextlib.suppress(FileNotFoundError):
            for entry in list(os.scandir(place)):
                if entry.path not in kept:
                    os.rmdir(entry.path) if entry.is_dir() else os.unlink(entry.path)

    # ---- mounts ----------------------------------------------------------------------------------

    async def _mounted(self, volume: Volume) -> str | None:
        """Wait until a volume is mounted. Returns None, or why it is not."""
        attempt = self._attempts.get(volume.name)
        if attempt is None or attempt.done():
            attempt = asyncio.ensure_future(self._mount(volume))
            self._attempts[volume.name] = attempt
        try:
            return await asyncio.shield(attempt)
        except OSError as error:  # such as a full disk
            return str(error)

    async def _mount(self, volume: Volume) -> str | None:
        origin = f"{self._origins}/{volume.name}"
        device = mounts_below(self._directory).get(origin)
        if device is not None:
            # It is asked in a process, which can be killed if the mount does not answer.
            status, message = await self._run(
                ["stat", "--file-system", origin], ANSWER_S, root=True
            )
            if status != 1:
                return None if status == 0 else message
            detach(origin)
        os.makedirs(self._directory, mode=0o711, exist_ok=True)
        os.makedirs(self._origins, mode=0o700, exist_ok=True)
        os.makedirs(origin, mode=0o700, exist_ok=True)
        for path in (self._origins, origin):
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
            self._replace_binds(volume.name, device)
        return None

    def _replace_binds(self, name: str, device: str) -> None:
        """Bind a volume that was mounted anew where users have the mount that died."""
        for path, found in mounts_below(self._users).items():
            if found == device:
                self._bind(name, path)

    def _unmount_unused(self) -> None:
        """Unmount the volumes that no user has, and for which no server waits."""
        mounts = mounts_below(self._directory)
        used = {device for path, device in mounts.items() if path.startswith(self._users)}
        for path, device in mounts.items():
            name = os.path.basename(path)
            if path != f"{self._origins}/{name}" or device in used or self._wanted[name] > 0:
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
