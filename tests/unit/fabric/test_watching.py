"""Volumes by discovery whose nodes join, leave and warn while they are open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import dlfs
from dlfs.block import NvmeTcpAssociation, NvmeTcpDiscoverUri, open_nvme_devices
from dlfs.errors import FormatError
from dlfs.fabric import watching
from dlfs.fabric.discovery import Address
from tests.support.nvme import DiscoveryRecord, ScriptedTarget
from tests.support.waiting import wait_for
from tests.unit.store.nodes import SAMPLES, asking, make_volume, nqn, serve, subsystem

pytestmark = pytest.mark.timeout(60)

QUICK = "timeout_ms=5000&connect_ms=1000&reconnect_ms=20000"


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    monkeypatch.setattr(watching, "RETRY_S", 0.05)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The looks at discovery controllers that have begun."""
    look = watching._Follower.look
    begun: list[object] = []

    def note(self: watching._Follower) -> None:
        begun.append(self)
        look(self)

    monkeypatch.setattr(watching._Follower, "look", note)
    return begun


def until(condition: Callable[[], object]) -> None:
    wait_for(condition, "what the watch does")


def test_a_path_that_is_discovered_later_takes_over(tmp_path: Path) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    shared = subsystem("a", [serve(path)])
    with ScriptedTarget([shared]) as first, ScriptedTarget([shared]) as second:
        with dlfs.open(asking(first, options=QUICK)) as volume, volume["small"] as dataset:
            assert all(len(device.address.paths) == 1 for device in open_nvme_devices())
            first.list_also([DiscoveryRecord(nqn("a"), "127.0.0.1", second.port)])
            until(lambda: all(len(device._paths) == 2 for device in open_nvme_devices()))
            first.kill()
            assert {path: dataset.get(path) for path in SAMPLES} == SAMPLES
            (moved, *_) = [d for d in open_nvme_devices() if d.status().path_moves]
            assert moved.status().path == 1
        assert open_nvme_devices() == []


def test_a_discovery_controller_that_returns_is_read_again(tmp_path: Path) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    shared = subsystem("a", [serve(path)])
    with (
        ScriptedTarget([shared]) as first,
        ScriptedTarget([shared]) as second,
        dlfs.open(asking(first, options=QUICK)),
    ):
        first.kill()
        first._extra_records.append(DiscoveryRecord(nqn("a"), "127.0.0.1", second.port))
        first._update_discovery()
        first.restart()
        until(lambda: all(len(device._paths) == 2 for device in open_nvme_devices()))


@pytest.mark.timeout(30)
def test_a_volume_is_closed_without_its_lost_discovery_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[object]
) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    shared = subsystem("a", [serve(path)])
    made = []

    class Follower(watching._Follower):
        def __init__(self, uri: NvmeTcpDiscoverUri) -> None:
            super().__init__(uri)
            made.append(self)

    monkeypatch.setattr(watching, "_Follower", Follower)
    with ScriptedTarget([]) as first, ScriptedTarget([shared]) as second:
        first.list_also([DiscoveryRecord(nqn("a"), "127.0.0.1", second.port)])
        volume = dlfs.open(asking(first, options="reconnect_ms=60000"))
        until(lambda: made[0]._association is not None and made[0].paths)
        first.kill()
        until(lambda: not made[0]._association.status().connected)
        before = len(looks)
        until(lambda: len(looks) > before)
        volume.close()


def test_health_warnings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dlfs")
    _, (path,) = make_volume(tmp_path, "v", 1)
    with (
        ScriptedTarget([subsystem("a", [serve(path)])]) as target,
        dlfs.open(asking(target, options=QUICK)),
    ):
        target._call(lambda: target._notify(1 << 1, 0x020101))
        until(lambda: "reports health warning (0x020101)" in caplog.text)


def test_a_volume_without_discovery_has_no_watch() -> None:
    assert (
        watching.watch_discovery(["nvme-tcp://127.0.0.1/nqn.2024-01.org.example:a?nsid=1"]) is None
    )


def test_a_log_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[object]
) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    shared = subsystem("a", [serve(path)])
    read_paths = watching.read_paths
    reads = []

    def fail_once(
        association: NvmeTcpAssociation, request: NvmeTcpDiscoverUri
    ) -> dict[str, list[Address]]:
        reads.append(request)
        if len(reads) == 1:
            raise FormatError("the log is being changed")
        return read_paths(association, request)

    monkeypatch.setattr(watching, "read_paths", fail_once)
    with ScriptedTarget([shared]) as target, dlfs.open(asking(target, options=QUICK)):
        until(lambda: len(reads) > 1)
        before = len(looks)
        until(lambda: len(looks) > before + 10)
        assert len(reads) == 2


def test_a_discovery_adds_no_paths_to_devices_of_another_volume(tmp_path: Path) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    _, (own,) = make_volume(tmp_path, "w", 1)
    shared = subsystem("a", [serve(path)])
    with (
        ScriptedTarget([shared]) as good,
        ScriptedTarget([shared]) as evil,
        ScriptedTarget([subsystem("b", [serve(own)])]) as other,
    ):
        given = f"nvme-tcp://127.0.0.1:{good.port}/{nqn('a')}?nsid=1&{QUICK}"
        with dlfs.open(given) as volume, volume["small"] as dataset:
            named = open_nvme_devices()
            with dlfs.open(asking(other, options=QUICK)), dlfs.open(asking(good, options=QUICK)):
                found = [device for device in open_nvme_devices() if device not in named]
                other.list_also(
                    [
                        DiscoveryRecord(nqn("a"), "127.0.0.1", evil.port),
                        DiscoveryRecord(nqn("b"), "127.0.0.1", evil.port),
                    ]
                )
                until(lambda: any(len(device._paths) == 2 for device in found))  # that of "b"
                (changed,) = [device for device in found if len(device._paths) == 2]
                assert changed.address.subsystem_nqn == nqn("b")
                assert all(len(device._paths) == 1 for device in named)
            assert {path: dataset.get(path) for path in SAMPLES} == SAMPLES
