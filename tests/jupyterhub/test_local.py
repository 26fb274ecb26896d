"""Servers that are processes of the hub's machine: mounts, rights, and the death of each part."""

from __future__ import annotations

import errno
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from tests.jupyterhub.hub import Hub, accounts
from tests.support.waiting import retried, wait_for

pytestmark = [pytest.mark.jupyterhub, pytest.mark.root]

DLFS = Path(sys.executable).with_name("dlfs")

WAIT_S = 8
"""Longest wait for volumes, in seconds: on a busy machine a mount takes three."""


def volume_of(folder: Path, name: str) -> str:
    """Make a volume that only root may read, with one dataset, and return its path."""
    path = folder / f"{name}.img"
    dlfs.format_volume(str(path), size_bytes=16 << 20, label=name)
    path.chmod(0o600)
    with dlfs.open(str(path)) as volume, volume.writer("texts") as writer:
        writer.add("first", f"of {name}".encode())
    return str(path)


def read_as(user: str, path: str) -> str:
    """Read a file as a user; raises OSError by what ``cat`` says."""
    done = subprocess.run(
        ["cat", path], user=pwd.getpwnam(user).pw_uid, group=65534, extra_groups=[],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        codes = {os.strerror(code): code for code in errno.errorcode}
        reason = done.stderr.strip().rpartition(": ")[2]
        raise OSError(codes[reason], reason)
    return done.stdout


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Hub, str, str]]:
    """A hub and two users. ann may read photos and one that is silent, bob may read sounds."""
    with Hub() as hub, accounts("ann", "bob", home=hub.home) as (ann, bob), socket.socket() as dumb:
        dumb.bind(("127.0.0.1", 0))
        dumb.listen()
        silent = (
            f"nvme-tcp://127.0.0.1:{dumb.getsockname()[1]}/nqn.2024-01.org.example:silent?nsid=1"
        )
        hub.configure(
            f"""
class Spawner(VolumeProgress, LocalProcessSpawner):
    pass

c.JupyterHub.spawner_class = Spawner
LocalVolumes(read_table({{
    "photos": {{"uri": {volume_of(hub.folder, "photos")!r}, "users": [{ann!r}], "memory": "64MiB"}},
    "sounds": {{"uri": {volume_of(hub.folder, "sounds")!r}, "groups": ["listeners"]}},
    "silent": {{"uri": {silent!r}, "users": [{ann!r}]}},
}}), directory={str(hub.mounts)!r}, dlfs={str(DLFS)!r}, wait_s={WAIT_S}).configure(c)
c.JupyterHub.load_groups = {{"listeners": {{"users": [{bob!r}]}}}}
c.Authenticator.allowed_users = {{{ann!r}, {bob!r}}}
"""
        )
        hub.start()
        yield hub, ann, bob


@pytest.fixture
def hub(world: tuple[Hub, str, str]) -> Iterator[Hub]:
    yield world[0]
    for user in world[1:]:
        for server in list(world[0].call("GET", f"/users/{user}")["servers"]):
            world[0].despawn(user, server)


@pytest.fixture
def ann(world: tuple[Hub, str, str]) -> str:
    return world[1]


@pytest.fixture
def bob(world: tuple[Hub, str, str]) -> str:
    return world[2]


def sample(hub: Hub, user: str, volume: str) -> str:
    return f"{hub.mounts}/users/{user}/{volume}/texts/first"


def test_each_user_reads_the_volumes_of_the_table_only(hub: Hub, ann: str, bob: str) -> None:
    said = "\n".join(hub.spawn(ann))
    hub.spawn(bob)
    assert f"Volume photos: {hub.mounts}/users/{ann}/photos" in said
    (reason,) = re.findall(r"Volume silent: not mounted: (.*no answer.*)", said)
    assert f"volume silent: not mounted: {reason}" in hub.log.read_text()
    assert read_as(ann, sample(hub, ann, "photos")) == "of photos"
    assert read_as(bob, sample(hub, bob, "sounds")) == "of sounds"
    assert sorted(os.listdir(hub.mounts / "users" / ann)) == ["photos", "silent.NOT-MOUNTED.txt"]
    assert os.listdir(hub.mounts / "users" / bob) == ["sounds"]
    note = read_as(ann, f"{hub.mounts}/users/{ann}/silent.NOT-MOUNTED.txt")
    assert note.startswith(f"silent: not mounted: {reason}\n")
    for path in (sample(hub, ann, "photos"), f"{hub.mounts}/volumes/photos/texts/first"):
        with pytest.raises(PermissionError):
            read_as(bob, path)
    shown = hub.call("GET", f"{hub.mounts}/users/{ann}/photos", base=f"/user/{ann}/api/contents")
    assert [entry["name"] for entry in shown["content"]] == ["texts"]
    environment = [
        Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in servers_of(ann)
    ]
    assert environment
    assert all(b"DLFS_VOLUMES=%s/users/%s" % (str(hub.mounts).encode(), ann.encode()) in each
               for each in environment)  # fmt: skip
    for user in (ann, bob):
        hub.despawn(user)
    assert hub.mounted() == []
    assert os.listdir(hub.mounts / "users") == os.listdir(hub.mounts / "volumes") == []
    wait_for(lambda: not mount_processes(hub), "the end of the servers of the mounts")


def servers_of(user: str) -> list[int]:
    """Return the processes of a user that are servers of Jupyter."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            if path.stat().st_uid == pwd.getpwnam(user).pw_uid and b"singleuser" in words:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def mount_processes(hub: Hub) -> list[int]:
    """Return the keepers and servers of a hub's mounts: they have their logs open."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path).startswith(f"{hub.mounts}/volumes/"):
                found.add(int(path.parts[2]))
        except OSError:
            continue
    return sorted(found)


def test_servers_of_one_user_share_mounts(hub: Hub, bob: str) -> None:
    hub.spawn(bob)
    hub.spawn(bob, "gpu")
    hub.despawn(bob)
    assert read_as(bob, sample(hub, bob, "sounds")) == "of sounds"
    hub.despawn(bob, "gpu")
    assert hub.mounted() == []


def test_mounts_outlive_the_hub_and_their_servers(hub: Hub, bob: str) -> None:
    hub.spawn(bob)
    before = hub.mounted()
    for pid in mount_processes(hub)[1:]:  # not the keeper, which was there first
        os.kill(pid, signal.SIGKILL)
    assert read_as(bob, sample(hub, bob, "sounds")) == "of sounds"
    hub.kill()
    assert read_as(bob, sample(hub, bob, "sounds")) == "of sounds"
    hub.start()
    wait_for(lambda: hub.call("GET", f"/users/{bob}")["servers"][""]["ready"], "bob's server")
    assert hub.mounted() == before
    hub.spawn(bob, "second")
    assert hub.mounted() == before
    hub.despawn(bob)
    hub.despawn(bob, "second")
    assert hub.mounted() == []


def test_a_server_that_died_while_the_hub_was_down_leaves_nothing(hub: Hub, bob: str) -> None:
    hub.spawn(bob)
    hub.kill()
    for pid in servers_of(bob):
        os.kill(pid, signal.SIGKILL)
    hub.start()
    wait_for(lambda: hub.mounted() == [], hub.mounted)


def test_a_mount_without_processes_is_made_anew_for_all_users(hub: Hub, bob: str) -> None:
    hub.spawn(bob)
    for pid in mount_processes(hub):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not mount_processes(hub), "their end")
    with pytest.raises(OSError, match="not connected"):
        read_as(bob, sample(hub, bob, "sounds"))
    said = hub.spawn(bob, "second")
    assert read_as(bob, sample(hub, bob, "sounds")) == "of sounds", said


def test_a_right_that_is_withdrawn_ends_with_the_next_start(hub: Hub, bob: str) -> None:
    hub.spawn(bob)
    hub.call("DELETE", "/groups/listeners/users", {"users": [bob]})
    try:
        hub.spawn(bob, "second")
        with pytest.raises(FileNotFoundError):
            read_as(bob, sample(hub, bob, "sounds"))
    finally:
        hub.call("POST", "/groups/listeners/users", {"users": [bob]})


def test_a_deleted_user_leaves_nothing(hub: Hub) -> None:
    with accounts("eve", home=hub.home) as (eve,):
        hub.call("POST", f"/users/{eve}")
        hub.call("POST", "/groups/listeners/users", {"users": [eve]})
        hub.spawn(eve)
        assert read_as(eve, sample(hub, eve, "sounds")) == "of sounds"
        hub.call("DELETE", f"/users/{eve}")
        retried(lambda: hub.call("GET", "/users"), AssertionError)
        wait_for(lambda: hub.mounted() == [], hub.mounted)
        assert not (hub.mounts / "users" / eve).exists()
