"""Composing on a folder like configfs: what is made, made again, changed, withdrawn and refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.errors import DeviceLostError, ExistsError, NotFoundError, UsageError
from dlfs.fabric.composing import ComposedNamespace, NamespaceRequest, open_target
from dlfs.fabric.composing.nvmet import NvmetTarget
from dlfs.fabric.keys import generate_key, write_key
from dlfs.fabric.recipes import Export, nvmet_script
from tests.unit.fabric.configfs import FakeConfigfs

HOST = "nqn.2024-01.org.example:trainer"
OTHER_HOST = "nqn.2024-01.org.example:other"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def target(configfs: FakeConfigfs, monkeypatch: pytest.MonkeyPatch) -> NvmetTarget:
    for name, value in configfs.environment(os.environ).items():
        monkeypatch.setenv(name, value)
    opened = open_target("nvmet")
    assert isinstance(opened, NvmetTarget)
    return opened


def request(store: Path | str = "/srv/dlfs", /, **changes) -> NamespaceRequest:
    return NamespaceRequest(
        **{
            "name": "a",
            "size_bytes": 2 * MIB,
            "store": str(store),
            "address": "10.0.0.11",
            "allowed_hosts": (HOST,),
            **changes,
        }
    )


# ---- what is made --------------------------------------------------------------------------------


def test_create_exports_an_empty_file(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    wanted = request(store)
    made = target.create(wanted)
    file = store / "a.namespace"
    assert made == ComposedNamespace(
        name="a",
        nqn=wanted.nqn,
        uuid=wanted.uuid,
        size_bytes=2 * MIB,
        backing=str(file),
        listeners=("10.0.0.11:4420", "10.0.0.11:8009"),
        allowed_hosts=(HOST,),
    )
    assert made.uri == f"nvme-tcp://10.0.0.11:4420/{wanted.nqn}?nsid=1"
    assert target.list() == [made]
    assert file.read_bytes() == bytes(2 * MIB)
    assert file.stat().st_blocks * 512 >= 2 * MIB, "the space must be reserved"
    assert file.stat().st_mode & 0o777 == 0o600
    content = configfs.content()
    inside = f"subsystems/{wanted.nqn}"
    assert content[f"{inside}/attr_allow_any_host"] == "0"
    assert content[f"{inside}/namespaces/1/enable"] == "1"
    assert content[f"{inside}/allowed_hosts/{HOST}"] == f"-> hosts/{HOST}"


def test_create_again_changes_nothing(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    made = target.create(request(store))
    (store / "a.namespace").write_bytes(b"x" * 2 * MIB)
    before = configfs.content()
    assert target.create(request(store)) == made
    assert configfs.content() == before
    assert (store / "a.namespace").read_bytes() == b"x" * 2 * MIB


def test_create_again_replaces_the_hosts(target: NvmetTarget, store: Path) -> None:
    target.create(request(store))
    made = target.create(request(store, allowed_hosts=(OTHER_HOST,)))
    assert made.allowed_hosts == (OTHER_HOST,)


def test_create_after_a_restart_keeps_bytes_and_uuid(
    target: NvmetTarget, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = target.create(request(store))
    (store / "a.namespace").write_bytes(b"x" * 2 * MIB)
    (tmp_path / "restarted").mkdir()
    fresh = FakeConfigfs(tmp_path / "restarted")
    monkeypatch.setenv("NVMET_CONFIGFS", str(fresh.root))
    assert target.list() == []
    assert target.create(request(store)) == made
    assert (store / "a.namespace").read_bytes() == b"x" * 2 * MIB


def test_create_completes_what_an_earlier_run_began(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    """A run that is killed leaves some of its steps undone; the next one does them."""
    made = target.create(request(store))
    whole = configfs.content()
    space = configfs.root / "subsystems" / made.nqn
    (space / "namespaces" / "1" / "enable").write_text("0\n")
    (configfs.root / "ports" / "8009" / "subsystems" / made.nqn).unlink()
    (space / "allowed_hosts" / HOST).unlink()
    assert target.create(request(store)) == made
    assert configfs.content() == whole
    target.withdraw("a")
    subprocess.run(["mkdir", str(space)], check=True)  # the first step alone
    assert target.list() == []
    assert target.create(request(store)) == made
    assert configfs.content() == whole


def test_several_namespaces_share_ports_and_hosts(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    empty = configfs.content()
    names = ("c", "a", "b")
    for name in names:
        target.create(request(store, name=name))
    assert [each.name for each in target.list()] == ["a", "b", "c"]
    for name in names:
        target.withdraw(name, delete=True)
    assert configfs.content() == empty
    assert list(store.iterdir()) == []


# ---- changing ------------------------------------------------------------------------------------


def test_resize_grows_and_tells_the_kernel(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    made = target.create(request(store))
    (store / "a.namespace").write_bytes(b"x" * 2 * MIB)
    assert target.resize("a", 5 * MIB).size_bytes == 5 * MIB
    assert (store / "a.namespace").read_bytes() == b"x" * 2 * MIB + bytes(3 * MIB)
    assert configfs.content()[f"subsystems/{made.nqn}/namespaces/1/revalidate_size"] == "1"
    with pytest.raises(UsageError, match=r"at least 5\.0 MiB, its size, got 1\.0 MiB"):
        target.resize("a", MIB)
    assert target.resize("a", MIB, shrink=True).size_bytes == MIB


def test_withdraw_keeps_the_bytes(target: NvmetTarget, configfs: FakeConfigfs, store: Path) -> None:
    empty = configfs.content()
    target.create(request(store))
    target.withdraw("a")
    assert configfs.content() == empty
    assert (store / "a.namespace").stat().st_size == 2 * MIB
    with pytest.raises(NotFoundError, match="got 'a'; there are: none"):
        target.withdraw("a")


# ---- what is refused -----------------------------------------------------------------------------


def test_create_refuses_another_size(target: NvmetTarget, store: Path) -> None:
    target.create(request(store))
    with pytest.raises(ExistsError, match="a exists with 2097152 bytes, not 1048576; resize"):
        target.create(request(store, size_bytes=MIB))


def test_create_refuses_a_twin_in_another_store(
    target: NvmetTarget, store: Path, tmp_path: Path
) -> None:
    target.create(request(store))
    (tmp_path / "other").mkdir()
    with pytest.raises(ExistsError, match="a is composed already"):
        target.create(request(tmp_path / "other"))


def test_foreign_exports_are_never_changed(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(4096))
    export = Export(
        device=str(disk),
        address="10.0.0.11",
        allowed_hosts=(HOST,),
        nqn="nqn.2024-01.org.example:foreign",
    )
    assert configfs.run(nvmet_script(export), "start").code == 0
    before = configfs.content()
    assert target.list() == []
    with pytest.raises(ExistsError, match="exported already, and was not composed"):
        target.create(request(store, nqn=export.nqn))
    target.create(request(store))
    target.withdraw("a")
    assert configfs.content() == before


def test_a_failed_create_leaves_no_export(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path
) -> None:
    target.create(request(store, name="first"))
    before = configfs.content()
    with pytest.raises(OSError, match=r"port 4420 is in use at 10\.0\.0\.11, not at 10\.0\.0\.12"):
        target.create(request(store, address="10.0.0.12"))
    assert configfs.content() == before


def test_a_full_store(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = configfs.content()
    with pytest.raises(OSError, match="has no room for"):
        target.create(request(store, size_bytes=1 << 60))
    assert configfs.content() == before
    assert list(store.iterdir()) == []


def test_a_missing_store(target: NvmetTarget, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="missing: there is no such folder"):
        target.create(request(tmp_path / "missing"))
    with pytest.raises(UsageError, match="absolute path of a folder"):
        target.create(request("lvs0"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "../a"}, "expected a name"),
        ({"name": ""}, "expected a name"),
        ({"name": "a" * 64}, "expected a name"),
        ({"size_bytes": 0}, "multiple of 1 MiB"),
        ({"size_bytes": MIB + 1}, "multiple of 1 MiB"),
        ({"store": "/srv/$(reboot)"}, "absolute path of a folder"),
        ({"store": "/srv/../etc"}, "absolute path of a folder"),
        ({"store": ""}, "absolute path of a folder"),
        ({"address": "storage-a"}, "IP address"),
        ({"allowed_hosts": ()}, "each host that may connect"),
        ({"allowed_hosts": ("a b",)}, "expected an NQN"),
        ({"port": 0}, "port 1..65535"),
    ],
)
def test_refused_requests(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        request(**changes)


@pytest.mark.parametrize(
    "where",
    [
        "", "nvmet:", "nvmet+ssh://", "nvmet+ssh://-oProxyCommand=x", "nvmet+ssh://-x@host",
        "nvmet+ssh://host/path", "nvmet+ssh://root:secret@host", "nvmet+ssh://host:port",
        "spdk://host", "spdk://storage-a:5260", "spdk:socket", "unix:/x",
    ],
)  # fmt: skip
def test_refused_targets(where: str) -> None:
    with pytest.raises(UsageError, match="compose"):
        open_target(where)


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))
    for name in ("host", "node"):
        write_key(name, generate_key())
    return tmp_path / "keys"


def test_hosts_need_their_keys(
    target: NvmetTarget, configfs: FakeConfigfs, store: Path, keys: Path
) -> None:
    wanted = request(store, dhchap_key="host", dhchap_ctrl_key="node")
    assert wanted.key_options == "&dhchap_key=host&dhchap_ctrl_key=node"
    made = target.create(wanted)
    assert made.authenticated_hosts == (HOST,)
    content = configfs.content()
    assert content[f"hosts/{HOST}/dhchap_key"] == (keys / "host").read_text()
    assert content[f"hosts/{HOST}/dhchap_ctrl_key"] == (keys / "node").read_text()
    write_key("host", generate_key(), replace=True)
    assert target.create(wanted) == made
    assert configfs.content()[f"hosts/{HOST}/dhchap_key"] == (keys / "host").read_text()


def test_keys_that_cannot_be_used(target: NvmetTarget, store: Path, keys: Path) -> None:
    with pytest.raises(NotFoundError, match="read key none"):
        target.create(request(store, dhchap_key="none"))
    with pytest.raises(UsageError, match="expected a dhchap_key with"):
        request(store, dhchap_ctrl_key="node")
    with pytest.raises(UsageError, match="needs tlshd"):
        target.create(request(store, tls_psk="host"))
    (keys / "host").write_text("DHHC-1:00:secret:")
    with pytest.raises(UsageError) as caught:
        target.create(request(store, dhchap_key="host"))
    assert "secret" not in str(caught.value)
    assert target.list() == []


# ---- over ssh ------------------------------------------------------------------------------------


def test_ssh_gets_the_script_on_its_standard_input(
    target: NvmetTarget, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nshift 3\nexec "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("DLFS_SSH", str(ssh))
    remote = open_target("nvmet+ssh://root@storage-a:2222")
    made = remote.create(request(store))
    assert target.list() == [made]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.rpartition(" ")[0] for call in calls} == {"-p 2222 root@storage-a sh -s"}


def test_an_unreachable_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'Connection refused' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("DLFS_SSH", str(ssh))
    with pytest.raises(DeviceLostError, match="nvmet of storage-a: Connection refused"):
        open_target("nvmet+ssh://storage-a").list()
    monkeypatch.setenv("DLFS_SSH", str(tmp_path / "missing"))
    with pytest.raises(DeviceLostError, match="No such file"):
        open_target("nvmet+ssh://storage-a").list()


def test_an_unreachable_nvmf_tgt(tmp_path: Path) -> None:
    pytest.importorskip("spdk.rpc.client", reason="no client (pip install spdk)")
    with pytest.raises(DeviceLostError, match="is nvmf_tgt running"):
        open_target(f"spdk:{tmp_path}/no.sock")
