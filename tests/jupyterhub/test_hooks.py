"""The hooks of the local spawner without a hub: keys, another account, many users, silent parts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from deploy.jupyterhub.dlfs_volumes import LocalVolumes, read_table
from tests.jupyterhub.hub import Hub, accounts
from tests.jupyterhub.spawners import spawner_of
from tests.jupyterhub.test_local import DLFS, mount_processes, read_as, sample, volume_of
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.jupyterhub, pytest.mark.root]

USERS = int(os.environ.get("DLFS_HUB_USERS", "20"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The folders of a hub, which does not run."""
    with Hub() as hub:
        yield hub


def local(hub: Hub, **entries: Any) -> LocalVolumes:
    table = {name: {"everyone": True, **entry} for name, entry in entries.items()}
    return LocalVolumes(read_table(table), directory=str(hub.mounts), dlfs=str(DLFS), wait_s=15)


async def start(volumes: LocalVolumes, *users: str) -> list[Any]:
    spawners = [spawner_of(user) for user in users]
    await asyncio.gather(*map(volumes.on_start, spawners))
    return spawners


def test_many_users_share_one_mount(hub: Hub) -> None:
    volumes = local(
        hub,
        photos={"uri": volume_of(hub.folder, "photos")},
        sounds={"uri": volume_of(hub.folder, "sounds")},
        away={"uri": str(hub.folder / "away.img")},
    )

    async def run(users: list[str]) -> None:
        before = time.monotonic()
        spawners = await start(volumes, *users)
        print(f"{USERS} users: {time.monotonic() - before:.2f} s")
        assert len(hub.mounted()) == 2 + 2 * USERS
        assert len(mount_processes(hub)) == 4  # a keeper and a server each
        for user, other in zip(users, [*users[1:], users[0]], strict=True):
            assert read_as(user, sample(hub, user, "photos")) == "of photos"
            with pytest.raises(PermissionError):
                read_as(other, sample(hub, user, "photos"))
        before = time.monotonic()
        for spawner in spawners:
            await volumes.on_stop(spawner)
        print(f"stopped: {time.monotonic() - before:.2f} s")

    with accounts(*(f"many{number}x" for number in range(USERS))) as users:
        asyncio.run(run(users))
    assert hub.mounted() == []


def test_a_mount_that_is_silent_delays_a_start_for_seconds_only(hub: Hub) -> None:
    volumes = local(
        hub,
        photos={"uri": volume_of(hub.folder, "photos")},
        sounds={"uri": volume_of(hub.folder, "sounds")},
    )

    async def run() -> None:
        (first,) = await start(volumes, "daemon")
        stopped = [pid for pid in mount_processes(hub) if b"photos" in logs_of(pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        before = time.monotonic()
        (second,) = await start(volumes, "bin")
        assert time.monotonic() - before < 60
        assert sorted(os.listdir(second.environment["DLFS_VOLUMES"])) == [
            "photos.NOT-MOUNTED.txt",
            "sounds",
        ]
        for spawner in (first, second):
            await volumes.on_stop(spawner)
        assert hub.mounted() == []
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    asyncio.run(run())
    wait_for(lambda: not mount_processes(hub), "the end of the servers of the mounts")


def logs_of(pid: int) -> bytes:
    """Return the names of the files that a process has open."""
    return b" ".join(os.fsencode(os.readlink(path)) for path in Path(f"/proc/{pid}/fd").iterdir())


def test_keys_are_with_the_server_of_the_mount_only(hub: Hub) -> None:
    keys = hub.folder / "keys"
    keys.mkdir(mode=0o700)
    volumes = local(hub, photos={"uri": volume_of(hub.folder, "photos"), "keys": str(keys)})

    async def run() -> None:
        (spawner,) = await start(volumes, "daemon")
        assert list(spawner.environment) == ["DLFS_VOLUMES"]
        for pid in mount_processes(hub):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"DLFS_KEYS={keys}".encode() in environment
            assert not any(each.startswith(b"CONFIGPROXY") for each in environment)
        await volumes.on_stop(spawner)

    os.environ["CONFIGPROXY_AUTH_TOKEN"] = "secret of the hub"
    try:
        asyncio.run(run())
    finally:
        del os.environ["CONFIGPROXY_AUTH_TOKEN"]


def test_an_account_without_rights_serves(hub: Hub) -> None:
    settings = Path("/etc/fuse.conf")
    if "\nuser_allow_other" not in f"\n{settings.read_text()}":
        pytest.skip("no user_allow_other in /etc/fuse.conf")
    if Path("/dev/fuse").stat().st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is not for every user")
    with accounts("serve", home=hub.home) as (account,):
        path = hub.home / account / "photos.img"
        dlfs.format_volume(str(path), size_bytes=16 << 20)
        os.chown(path, path.parent.stat().st_uid, -1)
        path.chmod(0o600)
        table = read_table({"photos": {"uri": str(path), "everyone": True}})
        volumes = LocalVolumes(
            table, directory=str(hub.mounts), dlfs=str(DLFS), account=account, wait_s=15
        )

        async def run() -> None:
            (spawner,) = await start(volumes, "daemon")
            assert os.listdir(spawner.environment["DLFS_VOLUMES"]) == ["photos"]
            for pid in mount_processes(hub):
                assert Path(f"/proc/{pid}").stat().st_uid == path.stat().st_uid
            await volumes.on_stop(spawner)

        asyncio.run(run())
        assert hub.mounted() == []


def test_a_name_of_another_volume_shows_that_one(hub: Hub) -> None:
    """Also if the earlier one is still in use, and whatever the umask of the hub is."""

    async def run() -> None:
        spawners = []
        for user, uri in (
            ("daemon", volume_of(hub.folder, "old")),
            ("bin", volume_of(hub.folder, "new")),
        ):
            volumes = LocalVolumes(
                read_table({"photos": {"uri": uri, "everyone": True}}),
                directory=str(hub.mounts / "of/hub"),
                dlfs=str(DLFS),
            )
            spawners += await start(volumes, user)
        for spawner, text in zip(spawners, ("of old", "of new"), strict=True):
            place = spawner.environment["DLFS_VOLUMES"]
            assert read_as(spawner.user.name, f"{place}/photos/texts/first") == text
            await volumes.on_stop(spawner)

    umask = os.umask(0o077)
    try:
        asyncio.run(run())
    finally:
        os.umask(umask)
    assert hub.mounted() == []
