"""Volumes by discovery, over the scripted target: members in any order at any address."""

from __future__ import annotations

import pickle
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

import dlfs
from dlfs._native.checksums import crc32c
from dlfs.block import NvmeTcpDiscoverUri, NvmeTcpUri, parse_uri
from dlfs.errors import NotFoundError, UsageError, VersionError
from dlfs.fabric.discovery import discover
from dlfs.format.geometry import superblock_offsets
from dlfs.format.superblock import decode_superblock, encode_superblock
from dlfs.store.discovered import find_namespaces, resolve_uris
from tests.support.nvme import DiscoveryRecord, Namespace, ScriptedTarget
from tests.unit.store.nodes import (
    SAMPLES,
    OddRecord,
    asking,
    empty,
    make_volume,
    nqn,
    serve,
    subsystem,
)

HOST = "nqn.2024-01.org.example:trainer"


def check_samples(volume: dlfs.Volume) -> None:
    dataset = volume["small"]
    with dataset:
        assert {path: dataset.get(path) for path in SAMPLES} == SAMPLES


def discover_at(target: ScriptedTarget, options: str = ""):
    asked = parse_uri(asking(target, options=options))
    assert isinstance(asked, NvmeTcpDiscoverUri)
    return asked, discover(asked)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """Reserve a port of 127.0.0.1 on which no program listens."""
    with socket.socket() as reserved:  # bound, so that no other test is given the port
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


# ---- what is found -------------------------------------------------------------------------------


def test_members_are_found_wherever_they_are(tmp_path: Path) -> None:
    uuid, paths = make_volume(tmp_path, "pool", 3)
    one = [subsystem("x", [empty(1), serve(paths[2], 7)])]
    two = [subsystem("y", [serve(paths[1])]), subsystem("z", [serve(paths[0])])]
    with ScriptedTarget(one) as a, ScriptedTarget(two) as b:
        with dlfs.open(asking(a, b)) as volume:
            assert volume.uuid == uuid
            check_samples(volume)
            found = [parse_uri(member.uri) for member in volume.members]
            assert [(uri.port, uri.subsystem_nqn, uri.nsid) for uri in found] == [
                (b.port, nqn("z"), 1),
                (b.port, nqn("y"), 1),
                (a.port, nqn("x"), 7),
            ]
            uri = volume.uri
        with dlfs.open(uri) as again, pickle.loads(pickle.dumps(again)) as other:
            assert again.uri == other.uri == uri
            check_samples(other)
        assert a.violations == b.violations == []


def test_a_writer_writes_to_what_was_found(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 2)
    with (
        ScriptedTarget([subsystem("x", [serve(paths[1])])]) as a,
        ScriptedTarget([subsystem("y", [serve(paths[0])])]) as b,
    ):
        with dlfs.open(asking(a, b)) as volume:
            with volume.writer("more") as writer:
                writer.add("sample", b"written by discovery")
            volume.remove("small")
        with dlfs.open(asking(b, a)) as volume:
            assert volume["more"].get("sample") == b"written by discovery"
            assert "small" not in volume


def test_options_go_to_the_members(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    options = f"hostnqn={HOST}&hdgst=1&ddgst=1&timeout_ms=7000&reconnect_ms=9000"
    with ScriptedTarget([subsystem("x", [serve(paths[0])], hosts=[HOST])]) as target:
        (uri,) = resolve_uris([asking(target, options=options)])
        expected = parse_uri(f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid=1&{options}")
        assert parse_uri(uri) == expected
        with dlfs.open(uri) as volume:
            check_samples(volume)


def test_single_devices_and_discovery_together(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 2)
    _, others = make_volume(tmp_path, "other", 1)
    with ScriptedTarget([subsystem("x", [serve(others[0], 1), serve(paths[1], 2)])]) as target:
        with dlfs.open([str(paths[0]), asking(target)]) as volume:
            check_samples(volume)
            uri = volume.members[1].uri
        assert resolve_uris([asking(target), uri, str(paths[0])]) == (uri, str(paths[0]))
        with pytest.raises(NotFoundError, match="missing: 0"):
            resolve_uris([str(paths[1]), asking(target)])
    assert resolve_uris([str(paths[0]), "mem:1MiB"]) == (str(paths[0]), "mem:1MiB")


def test_a_member_with_a_newer_generation_of_unknown_features_is_not_left_out(
    tmp_path: Path,
) -> None:
    _, paths = make_volume(tmp_path, "pool", 2, replicas=2)
    with open(paths[1], "r+b") as file:
        for offset in superblock_offsets(paths[1].stat().st_size):
            file.seek(offset)
            block = bytearray(file.read(4096))
            (generation,) = struct.unpack_from("<Q", block, 104)
            if generation == 2:
                struct.pack_into("<Q", block, 16, 1 | 8)
                struct.pack_into("<Q", block, 104, 3)
                struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
                file.seek(offset)
                file.write(block)
    namespaces = [serve(path, number) for number, path in enumerate(paths, 1)]
    expected = pytest.raises(VersionError, match="got 0x9; a newer dlfs")
    with ScriptedTarget([subsystem("x", namespaces)]) as target, expected:
        resolve_uris([asking(target)])
    with pytest.raises(VersionError, match="got 0x9; a newer dlfs"):
        dlfs.open(paths)


def test_one_of_several_volumes_is_chosen(tmp_path: Path) -> None:
    volumes = {name: make_volume(tmp_path, name, 2) for name in ("dogs", "cats")}
    spaces = [serve(path) for _, paths in volumes.values() for path in paths]
    listed = [subsystem(f"disk{number}", [space]) for number, space in enumerate(spaces)]
    with ScriptedTarget(listed) as target:
        with pytest.raises(UsageError, match="volume=UUID to choose one") as caught:
            dlfs.open(asking(target))
        for name, (uuid, _) in volumes.items():
            assert f"{uuid} '{name}', 2 of 2 members" in str(caught.value)
            with dlfs.open(asking(target, options=f"volume={uuid}")) as volume:
                assert volume.label == name
                check_samples(volume)
        other = "99999999-9999-4999-8999-999999999999"
        with pytest.raises(NotFoundError, match=f"find volume {other} by discovery"):
            dlfs.open(asking(target, options=f"volume={other}"))
        both = [asking(target, options=f"volume={uuid}") for uuid, _ in volumes.values()]
        with pytest.raises(UsageError, match="expected one volume"):
            dlfs.open(both)


# ---- what is missing -----------------------------------------------------------------------------


def test_a_node_that_is_down_is_named(tmp_path: Path, dead_port: int) -> None:
    _, paths = make_volume(tmp_path, "pool", 2)
    with ScriptedTarget([subsystem("x", [serve(paths[0], 1), empty(2)])]) as target:
        with dlfs.open(str(paths[1]) + "," + asking(target)) as volume:
            missing = volume.members[1].uuid
        with pytest.raises(NotFoundError) as caught:
            dlfs.open(f"{asking(target)},nvme-tcp+discover://127.0.0.1:{dead_port}")
    for said in (
        f"missing: 1 ({missing})",
        f"127.0.0.1:{dead_port}",
        "nsid=2: this is no DLFS volume",
    ):
        assert said in str(caught.value)


def test_copies_make_up_for_a_node_that_is_down(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 3, replicas=2)
    with (
        ScriptedTarget([subsystem("x", [serve(paths[2])])]) as a,
        ScriptedTarget([subsystem("y", [serve(paths[0])]), subsystem("z", [serve(paths[1])])]) as b,
    ):
        uris = asking(a, b)
        a.kill()
        with dlfs.open(uris) as volume:
            assert [member.state for member in volume.members] == ["current", "current", "missing"]
            check_samples(volume)
        b.kill()
        a.restart()
        with pytest.raises(NotFoundError, match=r"got 1; missing: 0 .*, 1 .*; passed over: "):
            dlfs.open(uris)


def test_repair_takes_discovery(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 2, replicas=2)
    old, new = [serve(path) for path in paths], Namespace(8 << 20, nsid=2)
    with ScriptedTarget([subsystem("x", [old[0], new])]) as target:
        uri = target.uri(nqn("x"), nsid=2)
        dlfs.repair(asking(target), replacements={1: uri})
        with dlfs.open(asking(target)) as volume:
            assert [member.state for member in volume.members] == ["current", "current"]
            assert volume.members[1].uri == uri
            check_samples(volume)


def test_a_member_that_was_replaced_is_passed_over(tmp_path: Path) -> None:
    """It comes back when its node does, and must not be taken for its successor."""
    _, paths = make_volume(tmp_path, "pool", 2)
    old = tmp_path / "old.img"
    shutil.copy(paths[1], old)
    with old.open("r+b") as file:
        for offset in superblock_offsets(old.stat().st_size):
            file.seek(offset)
            data = file.read(4096)
            superblock = decode_superblock(data, "old")
            uuids = (superblock.member_uuids[0], uuid4())
            file.seek(offset)
            file.write(encode_superblock(replace(superblock, member_uuids=uuids, generation=1)))
    with ScriptedTarget([subsystem("x", [serve(old, 1), serve(paths[1], 2)])]) as target:
        (uri,) = resolve_uris([asking(target), str(paths[0])])[1:]
        assert "nsid=2" in uri
        with pytest.raises(NotFoundError, match=r"nsid=1: it was member 1 until generation 1"):
            resolve_uris([asking(target)])


def test_nothing_but_foreign_namespaces() -> None:
    with (
        ScriptedTarget([subsystem("x", [empty()])]) as target,
        pytest.raises(NotFoundError, match=r"there is none; passed over: .*no DLFS volume"),
    ):
        dlfs.open(asking(target))


def test_a_target_that_is_down_has_no_volume(dead_port: int) -> None:
    with pytest.raises(NotFoundError, match="there is none; passed over"):
        dlfs.open(f"nvme-tcp+discover://127.0.0.1:{dead_port}")


def test_a_host_that_is_not_allowed_is_reported(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    with (
        ScriptedTarget([subsystem("x", [serve(paths[0])], hosts=[HOST])]) as target,
        pytest.raises(NotFoundError, match=f"subsystem {nqn('x')}"),
    ):
        dlfs.open(asking(target))


def test_a_volume_is_not_formatted_by_discovery() -> None:
    with (
        ScriptedTarget([subsystem("x", [empty()])]) as target,
        pytest.raises(UsageError, match="dlfs discover"),
    ):
        dlfs.format_volume(asking(target))


# ---- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.2", "0.0.0.0"])
def test_an_address_that_does_not_answer_is_that_of_the_host_asked(
    tmp_path: Path, address: str
) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    hidden = subsystem("hidden", [serve(paths[0])])
    with ScriptedTarget([hidden]) as behind, ScriptedTarget([]) as target:
        target.list_also([DiscoveryRecord(nqn("hidden"), address, behind.port)])
        (uri,) = resolve_uris([asking(target)])
    assert parse_uri(uri) == NvmeTcpUri("127.0.0.1", behind.port, nqn("hidden"), 1)


def test_the_port_that_was_asked_may_be_all_that_is_forwarded(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    with ScriptedTarget([subsystem("x", [serve(paths[0])])]) as target:
        target.records = lambda: [DiscoveryRecord(nqn("x"), "127.0.0.2", 4420)]  # type: ignore[method-assign]
        target.list_also([])
        (uri,) = resolve_uris([asking(target)])
        assert parse_uri(uri) == NvmeTcpUri("127.0.0.1", target.port, nqn("x"), 1)


def test_two_controllers_of_one_namespace_are_two_paths(tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    shared = [subsystem("x", [serve(paths[0])])]
    with ScriptedTarget(shared) as a, ScriptedTarget(shared) as b:
        with dlfs.open(asking(a, b)) as volume:
            uri = volume.uri
            assert f"path=127.0.0.1:{b.port}" in uri
        a.kill()
        with dlfs.open(uri) as volume:
            check_samples(volume)
        a.restart()
        a.list_also(b.records())
        _, found = discover_at(a)
        (listed,) = found.subsystems
        assert [path.port for path in listed.paths] == [a.port, b.port]
        a.kill()


def test_namespaces_of_one_name_that_are_not_one_stay_apart(tmp_path: Path) -> None:
    """A recipe copied from node to node, with its NQN: nothing may be mixed up."""
    _, paths = make_volume(tmp_path, "pool", 2)
    with (
        ScriptedTarget([subsystem("same", [serve(paths[0])])]) as a,
        ScriptedTarget([subsystem("same", [serve(paths[1])])]) as b,
    ):
        uris = [parse_uri(uri) for uri in resolve_uris(asking(b, a).split(","))]
        assert [(uri.port, uri.alternatives) for uri in uris] == [(a.port, ()), (b.port, ())]


def test_referrals_are_followed_once(tmp_path: Path, dead_port: int) -> None:
    _, paths = make_volume(tmp_path, "pool", 1)
    with (
        ScriptedTarget([subsystem("x", [serve(paths[0])])]) as node,
        ScriptedTarget([]) as far,
        ScriptedTarget([]) as near,
    ):
        name = "nqn.2014-08.org.nvmexpress.discovery"

        def refer(target: ScriptedTarget, port: int) -> None:
            target.list_also([DiscoveryRecord(name, "127.0.0.1", port, referral=True)])

        refer(far, node.port)
        refer(far, far.port)
        refer(far, dead_port)
        refer(far, dead_port)
        refer(near, far.port)
        with dlfs.open(asking(far)) as volume:
            check_samples(volume)
        _, found = discover_at(far)
        listed = [(referral.address, referral.problem is None) for referral in found.referrals]
        assert listed == [(f"127.0.0.1 {node.port}", True), (f"127.0.0.1 {dead_port}", False)]
        with pytest.raises(NotFoundError, match="there is none"):
            dlfs.open(asking(near))


# ---- what is only listed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({0: b"\x01"}, "reached by rdma only"),
        ({0: b"\x4d"}, "reached by 77 only"),
        ({3: b"\x01"}, "only connections with TLS 1.3"),
        ({512: b"storage-a\0"}, "no address of NVMe/TCP"),
        ({32: b"http\0"}, "no address of NVMe/TCP"),
        ({32: b"70000\0"}, "no address of NVMe/TCP"),
        ({256: b"\x1b[2Jx\0"}, "NQN"),
        ({256: b"nqn.2024-01.org.example:gone\0"}, "gone"),
    ],
)
def test_subsystems_that_cannot_be_reached_are_listed(changes: dict[int, bytes], says: str) -> None:
    with ScriptedTarget([subsystem("x", [empty()])]) as target:
        record = DiscoveryRecord(nqn("odd"), "127.0.0.1", target.port)
        target.list_also([OddRecord(record, changes)])
        asked, found = discover_at(target)
        good, odd = found.subsystems
        assert (good.problem, len(good.namespaces)) == (None, 1)
        assert says in str(odd.problem)
        assert (odd.namespaces, odd.nqn.isprintable()) == ((), True)
        (namespace,) = find_namespaces([(asked, found)])
        assert "no DLFS volume" in str(namespace.content.problem)


def test_a_discovery_controller_that_is_none() -> None:
    with ScriptedTarget([]) as target:
        target.kill()
        with pytest.raises((dlfs.DeviceError, NotFoundError), match=str(target.port)):
            discover_at(target)
