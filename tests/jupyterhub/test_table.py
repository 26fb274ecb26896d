"""The table of volumes, and what the hooks make of it, without a hub."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.jupyterhub.dlfs_volumes import (
    KubernetesVolumes,
    LocalVolumes,
    SlurmVolumes,
    TableError,
    read_table,
    readable_volumes,
)
from deploy.jupyterhub.dlfs_volumes.mounts import mounts_below
from tests.jupyterhub.spawners import spawner_of

DISK = "/dev/nvme0n1"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "expected a dict with 'uri' and 'users' or 'groups', got []"),
        ({"users": ["ann"]}, "expected 'uri', the URIs of its members; got none"),
        ({"uri": DISK}, "expected names in 'users' or 'groups', or 'everyone': True; got none"),
        ({"uri": DISK, "users": "ann"}, "users: expected a list of names, got 'ann'"),
        ({"uri": DISK, "groups": [1]}, "groups: expected a list of names, got [1]"),
        ({"uri": DISK, "everyone": "no"}, "everyone: expected True or False, got 'no'"),
        ({"uri": DISK, "everyone": True, "memory": "4G"}, "memory: expected a size such as 4GiB"),
        ({"uri": "photos.img", "everyone": True}, "uri: expected URIs or absolute paths"),
        ({"uri": f"{DISK}\nx", "everyone": True}, "uri: expected a line of text, got"),
        ({"uri": DISK, "user": ["ann"]}, "expected keys of uri, users, groups, everyone, memory"),
        ({"uri": DISK, "everyone": True, "attributes": {"a": 1}}, "expected a dict of texts"),
    ],
)
def test_a_bad_entry_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(TableError) as raised:
        read_table({"photos": entry})
    assert str(raised.value).startswith("volume 'photos': ")
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["", "..", "a/b", "Photos", "-a", "a-", "a\n", "a" * 43, 7])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(TableError, match="expected a name of 1 to 42 small letters"):
        read_table({name: {"uri": DISK, "everyone": True}})


def test_rights_are_those_of_users_and_of_groups() -> None:
    volumes = read_table(
        {
            "a": {"uri": DISK, "users": ["ann"]},
            "b": {"uri": DISK, "groups": ["vision", "ann"]},
            "c": {"uri": DISK, "everyone": True},
        }
    )

    def names(user: str, *groups: str) -> str:
        return "".join(volume.name for volume in readable_volumes(volumes, user, groups))

    assert names("ann") == "ac"
    assert names("bob", "vision", "sound") == "bc"
    assert names("vision") == "c"  # a user is no group of the same name


def test_pods_have_the_volumes_of_their_users() -> None:
    volumes = KubernetesVolumes(
        read_table(
            {
                "open": {"uri": "mem:{x}://", "groups": ["vision"], "memory": "1GiB"},
                "closed": {"uri": DISK, "users": ["ann"], "secret": "dlfs-{username}"},
            }
        )
    )
    home = {"name": "home", "emptyDir": {}}
    spawner = spawner_of("bob", "vision", volumes=[home], volume_mounts=[])
    asyncio.run(volumes.on_start(spawner))
    source = {"driver": "csi.dlfs", "readOnly": True}
    source["volumeAttributes"] = {"volumes": "mem:{{x}}://", "memory": "1GiB"}
    assert spawner.volumes == [home, {"name": "dlfs-open", "csi": source}]
    mount = {"name": "dlfs-open", "mountPath": "/volumes/open", "readOnly": True}
    assert spawner.volume_mounts == [mount]
    assert spawner.environment == {"DLFS_VOLUMES": "/volumes"}

    profiles = volumes.profile_list(
        [{"display_name": "all"}, {"display_name": "one", "dlfs_volumes": ["closed"]}]
    )
    for user, shown in (("bob", ["all"]), ("ann", ["all", "one"])):
        spawner = spawner_of(user, volumes={}, volume_mounts={})
        found = asyncio.run(profiles(spawner))  # type: ignore[arg-type]
        assert [profile["display_name"] for profile in found] == shown
    one = found[1]["kubespawner_override"]["volumes"]["dlfs-closed"]
    assert one["csi"]["nodePublishSecretRef"] == {"name": "dlfs-{username}"}


def test_a_wrong_profile_or_key_of_pods_is_refused(tmp_path: Path) -> None:
    volumes = read_table({"a": {"uri": DISK, "everyone": True}})
    with pytest.raises(TableError, match=r"profile 0 \('x'\): dlfs_volumes: expected a list of a;"):
        KubernetesVolumes(volumes).profile_list([{"display_name": "x", "dlfs_volumes": ["b"]}])
    keyed = read_table({"a": {"uri": DISK, "everyone": True, "keys": str(tmp_path)}})
    with pytest.raises(TableError, match="keys: expected none for pods, got"):
        KubernetesVolumes(keyed)


DLFS = """#!/bin/sh
# Notes how it is called; the second volume does not answer, and the third is refused.
echo "$@" >>"$0.calls"
case $* in
*second*) exec sleep 60 ;;
*third*) echo "dlfs: open /third: no such device" >&2; exit 1 ;;
esac
"""


def test_a_job_mounts_volumes_before_its_server(tmp_path: Path) -> None:
    program = tmp_path / "dlfs"
    program.write_text(DLFS)
    program.chmod(0o755)
    volumes = read_table(
        {
            "one": {"uri": "/a b,/c'd", "users": ["ann"], "options": ["--nested"]},
            "two": {"uri": "/second", "users": ["ann"], "memory": "1GiB"},
            "three": {"uri": "/third", "users": ["ann"]},
            "four": {"uri": "/fourth", "users": ["bob"]},
        }
    )
    spawner = spawner_of("ann", req_prologue="module load x\n", req_keepvars_extra="LANG")
    hook = SlurmVolumes(volumes, dlfs=str(program), wait_s=1).on_start
    asyncio.run(hook(spawner))
    assert spawner.req_keepvars_extra == "LANG,DLFS_VOLUMES"
    commands, _, rest = spawner.req_prologue.partition("dlfs_volumes_ready\n")
    assert rest == "module load x\n"
    show = 'echo "$DLFS_VOLUMES"; cd "$DLFS_VOLUMES"; head *.txt; ls'
    environment = {name: value for name, value in os.environ.items() if name != "DLFS_MOUNT"}
    done = run_script(f"set -eu\n{commands}dlfs_volumes_ready\n{show}", environment)
    assert done.returncode == 0, done.stderr
    folder, *shown = done.stdout.split("\n")
    assert "no answer within 1 s" in shown
    assert "dlfs: open /third: no such device" in shown
    assert shown[-4:-1] == ["one", "three.NOT-MOUNTED.txt", "two.NOT-MOUNTED.txt"]
    assert "dlfs: volume three: not mounted: dlfs: open /third: no such device" in done.stderr
    calls = Path(f"{program}.calls").read_text().splitlines()
    assert f"--quiet mount --no-uring --nested -- /a b,/c'd {folder}/one" in calls
    assert f"--quiet mount --no-uring --memory 1GiB -- /second {folder}/two" in calls
    assert not Path(folder).exists()

    environment["DLFS_MOUNT"] = str(tmp_path)  # of the prolog
    done = run_script(f"{commands}dlfs_volumes_ready\n{show}", environment)
    assert done.stdout.startswith(f"{tmp_path}\n"), done.stderr
    assert Path(f"{program}.calls").read_text().splitlines() == calls


def run_script(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash"], input=script, capture_output=True, text=True, env=environment
    )


@pytest.mark.root
def test_local_volumes_check_their_arguments(tmp_path: Path) -> None:
    volumes = read_table({"a": {"uri": DISK, "everyone": True, "keys": str(tmp_path)}})
    tmp_path.chmod(0o750)
    with pytest.raises(TableError, match=r"'a': keys: expected a directory of mode 0700 .* 0750"):
        LocalVolumes(volumes, dlfs="true")
    tmp_path.chmod(0o700)
    LocalVolumes(volumes, dlfs="true")
    with pytest.raises(TableError, match="dlfs: expected a program, got 'no-such-dlfs'"):
        LocalVolumes(volumes, dlfs="no-such-dlfs")
    with pytest.raises(TableError, match="expected an account of this machine, got 'no such'"):
        LocalVolumes(volumes, dlfs="true", account="no such")
    for user in ("no such", "..", "a\0b"):
        local = LocalVolumes(volumes, dlfs="true", directory=str(tmp_path / "mounts"))
        with pytest.raises(TableError, match="expected an account of this machine"):
            asyncio.run(local.on_start(spawner_of(user)))
        asyncio.run(local.on_stop(spawner_of(user)))
    assert not mounts_below(str(tmp_path))
    assert tmp_path.is_dir()
