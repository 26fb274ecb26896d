"""``dlfs discover``, and verbs on what was discovered."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import dlfs
from dlfs.fabric.discovery import DISCOVERY_NQN
from dlfs.fabric.keys import generate_key, write_key
from tests.support.files import write_at
from tests.support.nvme import DiscoveryRecord, ScriptedTarget, Subsystem
from tests.support.nvme.authentication import Authentication
from tests.support.nvme.tls import TlsProxy, lacks_openssl
from tests.unit.store.nodes import OddRecord, asking, empty, make_volume, nqn, serve, subsystem

HOST = "nqn.2024-01.org.example:trainer"


def test_table(run, tmp_path: Path) -> None:
    uuid, paths = make_volume(tmp_path, "pool", 2)
    spaces = [serve(paths[1], 1), empty(2)]
    with ScriptedTarget([subsystem("x", spaces, hosts=[HOST])]) as target:
        target.list_also([OddRecord(DiscoveryRecord(nqn("r"), "127.0.0.1", 1), {0: b"\1"})])
        done = run("discover", f"127.0.0.1:{target.port}", "--hostnqn", HOST)
        refused = run("discover", f"127.0.0.1:{target.port}")
    assert done.code == 0
    head, _, member, other = done.out.decode().splitlines()
    assert head.split() == ["size", "block", "volume", "member", "device"]
    device = f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid={{}}&hostnqn={HOST}"
    assert member.split() == [
        *("8", "MiB", "512", "B", str(uuid), "pool", "1", "of", "2", device.format(1)),
    ]
    assert other.split() == ["1", "MiB", "512", "B", "-", "-", device.format(2)]
    assert done.err == f"subsystem {nqn('r')}: reached by rdma only, not by tcp\n"
    assert (refused.code, refused.out) == (0, b"")
    assert "lists no namespace for this host" in refused.err
    assert nqn("x") in refused.err


def test_json(run, tmp_path: Path) -> None:
    uuid, paths = make_volume(tmp_path, "pool", 2)
    with ScriptedTarget([subsystem("x", [serve(paths[1])]), subsystem("y", [empty()])]) as target:
        record = DiscoveryRecord(nqn("d"), "127.0.0.1", target.port, referral=True)
        target.list_also([OddRecord(record, {0: b"\2"})])
        found = run("discover", f"127.0.0.1:{target.port}", "--json").json
    assert found["address"] == f"127.0.0.1:{target.port}"
    first, second = found["subsystems"]
    assert (first["nqn"], first["transports"], first["problem"]) == (nqn("x"), ["tcp"], None)
    assert first["paths"] == [f"127.0.0.1:{target.port}"]
    (namespace,) = first["namespaces"]
    assert namespace["identity"].startswith("uuid:")
    assert (namespace["nsid"], namespace["size_bytes"], namespace["block_bytes"]) == (
        *(1, 8 << 20, 512),
    )
    assert namespace["uri"] == f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid=1"
    assert namespace["volume"] == {
        "uuid": str(uuid),
        "label": "pool",
        "generation": 2,
        "member": 1,
        "member_count": 2,
    }
    (other,) = second["namespaces"]
    assert other["volume"] is None
    assert "no DLFS volume" in other["problem"]
    assert found["referrals"] == [
        {"address": f"127.0.0.1 {target.port}", "problem": "reached by fc only, not by tcp"}
    ]


def test_a_damaged_member_is_named(run, tmp_path: Path) -> None:
    _, (path,) = make_volume(tmp_path, "pool", 1)
    for copy in dlfs.open(str(path)).info().members[0].superblocks:
        write_at(path, copy.offset_bytes + 100, b"damage")
    with ScriptedTarget([subsystem("x", [serve(path)])]) as target:
        done = run("discover", f"127.0.0.1:{target.port}")
    assert (done.code, "expected a superblock in one of three places" in done.err) == (0, True)


def test_what_does_not_answer(run) -> None:
    with ScriptedTarget([]) as target:
        done = run("discover", f"127.0.0.1:{target.port}")
        assert (done.code, done.out) == (0, b"")
        assert "lists no namespace" in done.err
    done = run("discover", f"127.0.0.1:{target.port}")
    assert (done.code, done.out, len(done.err.splitlines())) == (7, b"", 1)
    assert f"127.0.0.1:{target.port}" in done.err


@pytest.mark.skipif(lacks_openssl() is not None, reason=str(lacks_openssl()))
def test_keys_that_authentication_generates(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))
    terms = Authentication(generate_key())
    write_key("trainer", terms.host_key)
    subsystems = [
        Subsystem(DISCOVERY_NQN, [], authentication=terms),
        subsystem("x", [empty()], authentication=terms),
    ]
    with (
        ScriptedTarget(subsystems) as target,
        TlsProxy(target.port, terms.generated, plain_port=target.port) as proxy,
    ):
        target.list_also([DiscoveryRecord(nqn("x"), "127.0.0.1", proxy.port)])
        options = ("--hostnqn", HOST, "--dhchap-key", "trainer")
        done = run("discover", f"127.0.0.1:{proxy.port}", *options, "--concat")
        alone = run("discover", f"127.0.0.1:{proxy.port}", "--concat")
    assert (done.code, done.err) == (0, "")
    assert f"{nqn('x')}?nsid=1&hostnqn={HOST}&dhchap_key=trainer&concat=1" in done.out.decode()
    assert proxy.handshakes >= 2
    assert (alone.code, "expected dhchap_key" in alone.err) == (2, True)


@pytest.mark.skipif(lacks_openssl() is not None, reason=str(lacks_openssl()))
def test_records_that_demand_a_secure_channel(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "keys"))
    terms = Authentication(generate_key())
    write_key("trainer", terms.host_key)
    discovery = Subsystem(DISCOVERY_NQN, [], authentication=terms)
    pools = [subsystem(name, [empty()], authentication=terms) for name in ("x", "y")]
    with ExitStack() as stack:
        logging, target = (
            stack.enter_context(ScriptedTarget(subsystems)) for subsystems in ([discovery], pools)
        )
        first, second, tls_only = (
            stack.enter_context(TlsProxy(port, terms.generated, plain_port=plain_port))
            for port, plain_port in (
                (logging.port, logging.port),
                (target.port, target.port),
                (target.port, None),
            )
        )
        logging.list_also(
            [
                DiscoveryRecord(nqn(name), "127.0.0.1", proxy.port, secure_channel=True)
                for name, proxy in (("x", second), ("y", tls_only))
            ]
        )
        options = ("--hostnqn", HOST, "--dhchap-key", "trainer")
        done = run("discover", f"127.0.0.1:{first.port}", *options, "--concat")
        without = run("discover", f"127.0.0.1:{first.port}", *options)
    listed = done.out.decode()
    assert nqn("y") not in listed
    assert f":{second.port}/{nqn('x')}?nsid=1&hostnqn={HOST}&dhchap_key=trainer&concat=1" in listed
    assert f"subsystem {nqn('y')}: " in done.err
    assert "demands TLS of every connection, also of the one on which" in done.err
    assert "or generate one with concat=1" in without.err


def test_odd_arguments(run) -> None:
    for arguments in (["a host"], ["127.0.0.1/x"], ["127.0.0.1", "--hostnqn", "trainer"], []):
        done = run("discover", *arguments)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, b"", 1)


def test_verbs_take_discovery(run, tmp_path: Path) -> None:
    _, paths = make_volume(tmp_path, "pool", 2)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_bytes(b"a cat")
    with (
        ScriptedTarget([subsystem("x", [serve(paths[1])])]) as a,
        ScriptedTarget([subsystem("y", [serve(paths[0])])]) as b,
    ):
        uri = asking(a, b)
        assert run("import", tmp_path / "photos", uri, "--name", "photos").code == 0
        assert run("cat", uri, "photos", "cat").out == b"a cat"
        assert run("verify", uri).code == 0
        members = [member["uri"] for member in run("info", uri, "--json").json["members"]]
        assert [f":{b.port}/" in members[0], f":{a.port}/" in members[1]] == [True, True]
        done = run("format", uri, "--force")
        assert (done.code, "dlfs discover" in done.err) == (2, True)
        b.kill()
        done = run("ls", uri)
        assert (done.code, f"127.0.0.1:{b.port}" in done.err) == (3, True)
