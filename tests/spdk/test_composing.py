"""Composing on SPDK's nvmf_tgt: lvols are made, exported, resized, withdrawn and exported again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import parse_uri
from dlfs.block.uri import NvmeTcpDiscoverUri
from dlfs.errors import DeviceError, ExistsError, NotFoundError, SpaceError
from dlfs.fabric.composing import ComposingTarget, NamespaceRequest, open_target
from dlfs.fabric.discovery import DISCOVERY_NQN, discover
from dlfs.fabric.keys import KeyKind, generate_key, write_key
from tests.nvmet.guest import free_port
from tests.spdk.target import SpdkTarget
from tests.support.volumes import new_volume, write_dataset

HOST = "nqn.2024-01.org.example:trainer"
OTHER_HOST = "nqn.2024-01.org.example:other"
SAMPLES = {f"{number:02}": bytes([number]) * (1000 + 700 * number) for number in range(40)}

pytestmark = pytest.mark.spdk


@pytest.fixture
def disk(spdk_target: SpdkTarget, tmp_path: Path) -> Iterator[Path]:
    """A file that has the lvol store ``lvs``."""
    pytest.importorskip("spdk.rpc.client", reason="no client (pip install spdk)")
    path = tmp_path / "disk"
    path.write_bytes(bytes(256 * MIB))
    spdk_target.call("bdev_aio_create", name="disk", filename=str(path), block_size=4096)
    spdk_target.call("bdev_lvol_create_lvstore", bdev_name="disk", lvs_name="lvs")
    yield path
    spdk_target.call("bdev_aio_delete", name="disk")


@pytest.fixture
def target(spdk_target: SpdkTarget, disk: Path) -> Iterator[ComposingTarget]:
    with open_target(f"spdk:{spdk_target.rpc_path}") as opened:
        yield opened
        for each in opened.list():
            opened.withdraw(each.name)


def request(port: int, name: str = "a", **changes) -> NamespaceRequest:
    return request_in(changes.pop("store", "lvs"), port, name, **changes)


def request_in(store: str, port: int, name: str = "a", **changes) -> NamespaceRequest:
    return NamespaceRequest(
        **{
            "name": name,
            "size_bytes": 16 * MIB,
            "store": store,
            "address": "127.0.0.1",
            "allowed_hosts": (HOST,),
            "port": port,
            "discovery_port": port,
            **changes,
        }
    )


@pytest.fixture(params=["lvol", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An lvol store, and a folder."""
    if request.param == "lvol":
        return "lvs"
    folder = tmp_path / "store"
    folder.mkdir()
    return str(folder)


def test_a_volume_over_composed_namespaces(target: ComposingTarget, store: str) -> None:
    port = free_port()

    def request(port: int, name: str = "a", **changes) -> NamespaceRequest:
        return request_in(store, port, name, **changes)

    made = [target.create(request(port, name)) for name in ("a", "b")]
    assert target.list() == made
    assert target.create(request(port)) == made[0]
    with pytest.raises(ExistsError, match="exists with 16777216 bytes, not 33554432; resize"):
        target.create(request(port, size_bytes=32 * MIB))
    uris = new_volume([f"{each.uri}&hostnqn={HOST}" for each in made], label="pool")
    write_dataset(uris, "samples", SAMPLES)
    with dlfs.open(uris) as volume:
        dataset = volume["samples"]
        assert target.resize("a", 32 * MIB).size_bytes == 32 * MIB
        assert [dataset[i] for i in range(len(dataset))] == list(SAMPLES.values())
    target.withdraw("a")
    with pytest.raises(NotFoundError):
        dlfs.open(uris)
    again = target.create(request(port, size_bytes=32 * MIB))
    assert (again.uri, again.uuid) == (made[0].uri, made[0].uuid)
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []
    assert target.create(
        request(port, size_bytes=32 * MIB, allowed_hosts=(OTHER_HOST,))
    ).allowed_hosts == (OTHER_HOST,)
    with pytest.raises(dlfs.DlfsError, match="refused host"):
        dlfs.open(uris)
    for name in ("a", "b"):
        target.withdraw(name, delete=True)
    assert not store.startswith("/") or list(Path(store).iterdir()) == []


def test_discovery_that_answers_listed_hosts(
    target: ComposingTarget, spdk_target: SpdkTarget
) -> None:
    """Recipes of exports with TLS have it so."""
    port = free_port()
    spdk_target.call("nvmf_subsystem_allow_any_host", nqn=DISCOVERY_NQN, allow_any_host=False)
    try:
        made = [target.create(request(port, name)) for name in ("a", "b")]
        asked = parse_uri(f"nvme-tcp+discover://127.0.0.1:{port}?hostnqn={HOST}")
        assert isinstance(asked, NvmeTcpDiscoverUri)
        found = discover(asked)
        assert {one.nqn for one in found.subsystems} >= {one.nqn for one in made}
    finally:
        spdk_target.call("nvmf_subsystem_allow_any_host", nqn=DISCOVERY_NQN, allow_any_host=True)


def test_refusals(target: ComposingTarget, spdk_target: SpdkTarget, tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(NotFoundError, match="expected an lvol store, got 'no'; there are: lvs"):
        target.create(request(port, store="no"))
    with pytest.raises(SpaceError, match="bdev_lvol_create"):
        target.create(request(port, size_bytes=1 << 40))
    with pytest.raises(DeviceError, match="nvmf_subsystem_add_listener"):
        target.create(request(port, address="192.0.2.1"))
    with pytest.raises(NotFoundError, match="/no/such: there is no such folder"):
        target.create(request(port, store="/no/such"))
    target.create(request(port, store=str(tmp_path)))
    with pytest.raises(ExistsError, match="a is composed already"):
        target.create(request(port, nqn="nqn.2024-01.org.example:other"))
    target.withdraw("a", delete=True)
    assert target.list() == []
    with spdk_target.subsystem("nqn.2024-01.org.example:foreign") as foreign:
        with pytest.raises(ExistsError, match="was not composed"):
            target.create(request(port, nqn=foreign))
        assert target.list() == []


@pytest.mark.parametrize("tls", [False, True])
def test_hosts_need_their_keys(
    target: ComposingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))
    for name in ("host", "node"):
        write_key(name, generate_key())
    write_key("psk", generate_key(KeyKind.TLS))
    names = {"tls_psk": "psk"} if tls else {"dhchap_key": "host", "dhchap_ctrl_key": "node"}
    wanted = request(free_port(), **names, discovery_port=free_port())
    made = target.create(wanted)
    assert made.authenticated_hosts == (() if tls else (HOST,))
    uri = f"{made.uri}{wanted.key_options}&hostnqn={HOST}"
    dlfs.format_volume([uri])
    with pytest.raises(dlfs.AuthenticationError):
        dlfs.open(f"{made.uri}&hostnqn={HOST}")
    if not tls:
        write_key("other", generate_key())
        with pytest.raises(dlfs.AuthenticationError):
            dlfs.open(uri.replace("dhchap_key=host", "dhchap_key=other"))
        write_key("host", generate_key(), replace=True)
        dlfs.open(uri).close()  # nvmf_tgt has read the file again
    assert target.create(wanted) == made
    dlfs.open(uri).close()


def test_two_creates_at_once(spdk_target: SpdkTarget, target: ComposingTarget) -> None:
    port = free_port()

    def create(name: str, barrier: threading.Barrier) -> str:
        with open_target(f"spdk:{spdk_target.rpc_path}") as own:
            barrier.wait()
            try:
                own.create(request(port, name))
            except ExistsError as error:
                return str(error)
            return "made"

    for number in range(10):
        barrier = threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(create, [f"race{number}"] * 2, [barrier] * 2))
        assert "made" in ends
        assert not any("{" in end for end in ends)
        assert f"race{number}" in [each.name for each in target.list()]
        target.withdraw(f"race{number}", delete=True)


def test_delete_frees_the_space(target: ComposingTarget) -> None:
    port = free_port()
    for _ in range(3):
        target.create(request(port, size_bytes=200 * MIB))
        target.withdraw("a", delete=True)
