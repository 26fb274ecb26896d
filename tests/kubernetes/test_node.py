"""The node service over its socket, with real mounts: the checks of csi-sanity, and more."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlfs.base.units import MIB
from dlfs.mount import native_server
from dlfs.mount.mountpoint import device_of
from dlfs_csi.failures import CallError, Code
from dlfs_csi.mounts import Questions
from dlfs_csi.node import Node
from dlfs_csi.service import _seconds_left
from dlfs_csi.wire import Mode
from tests.kubernetes.conftest import SAMPLES
from tests.kubernetes.driving import PUBLISHES, Plant, Refused, capability
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.authentication import Authentication
from tests.support.nvme.scripted import DEFAULT_NQN
from tests.support.volumes import new_volume, write_dataset
from tests.support.waiting import SECONDS_MAX, wait_for

pytestmark = [pytest.mark.root, pytest.mark.fuse]

GOOD = {
    "volume_id": "v",
    "target_path": "/dev/shm/dlfs-no-target",
    "volume_capability": capability(),
}


def attributes(**words: str) -> dict[str, Any]:
    return {"volume_context": {"volumes": "/no/volume.img", **words}}


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("NodePublishVolume", {}, "INVALID_ARGUMENT", "volume_id"),
    ("NodePublishVolume", {"volume_id": "v"}, "INVALID_ARGUMENT", "target_path"),
    ("NodePublishVolume", {"volume_id": "v", "target_path": "/t"}, "INVALID_ARGUMENT", "capabil"),
    ("NodePublishVolume", GOOD, "INVALID_ARGUMENT", "'volumes'"),
    ("NodePublishVolume", {**GOOD, "target_path": "a/b"}, "INVALID_ARGUMENT", "absolute"),
    ("NodePublishVolume", {**GOOD, "target_path": "/a/../b"}, "INVALID_ARGUMENT", "'..'"),
    ("NodePublishVolume", GOOD | attributes(memmory="1GiB"), "INVALID_ARGUMENT", "did you mean"),
    ("NodePublishVolume", GOOD | attributes(memory="much"), "INVALID_ARGUMENT", "'memory'"),
    ("NodePublishVolume", GOOD | attributes(mode="644"), "INVALID_ARGUMENT", "'mode'"),
    ("NodePublishVolume", GOOD | attributes(uid="-1"), "INVALID_ARGUMENT", "'uid'"),
    ("NodePublishVolume", GOOD | attributes(nested="yes"), "INVALID_ARGUMENT", "'nested'"),
    ("NodePublishVolume", GOOD | attributes(dataset="a/b"), "INVALID_ARGUMENT", "'dataset'"),
    ("NodePublishVolume", GOOD | attributes(volumes="nvme-tcp:x"), "INVALID_ARGUMENT", "'volumes'"),
    ("NodePublishVolume", GOOD | attributes(dataset="a", nested="true"), "INVALID_ARGUMENT", ""),
    ("NodePublishVolume", GOOD | attributes() | {"secrets": {"k": "DHHC-1:00:secret:"}},
     "INVALID_ARGUMENT", "k: read a key"),
    ("NodePublishVolume", GOOD | attributes() | {"secrets": {"a/b": "x"}},
     "INVALID_ARGUMENT", "names"),
    *(
        ("NodePublishVolume", GOOD | attributes() | {"volume_capability": capability(mode)},
         "INVALID_ARGUMENT", "ReadOnlyMany")
        for mode in (*(m for m in Mode if "WRITER" in m.name), Mode.UNKNOWN, 99)
    ),
    ("NodePublishVolume",
     GOOD | attributes() | {"volume_capability": capability(mount_flags=["noexec"])},
     "INVALID_ARGUMENT", "noexec"),
    ("NodePublishVolume",
     GOOD | attributes() | {"volume_capability": capability(fs_type="ext4")},
     "INVALID_ARGUMENT", "ext4"),
    ("NodeUnpublishVolume", {}, "INVALID_ARGUMENT", "volume_id"),
    ("NodeUnpublishVolume", {"volume_id": "v"}, "INVALID_ARGUMENT", "target_path"),
    ("NodeGetVolumeStats", {"volume_path": "p"}, "INVALID_ARGUMENT", "volume_id"),
    ("NodeGetVolumeStats", {"volume_id": "v"}, "INVALID_ARGUMENT", "volume_path"),
    ("NodeGetVolumeStats", {"volume_id": "v", "volume_path": "some/path"}, "NOT_FOUND", "v"),
]  # fmt: skip
"""Calls that fail: method, fields, code, and a part of the message."""


def test_wrong_calls_fail_with_their_codes_and_leave_nothing(plant: Plant) -> None:
    for method, words, code, part in WRONG:
        with pytest.raises(Refused) as refused:
            plant.call(method, **words)
        assert (refused.value.code, part in str(refused.value)) == (code, True), refused.value
        assert "secret:" not in str(refused.value)
    assert plant.left() == []


def test_says_what_it_is(plant: Plant) -> None:
    assert plant.call("GetPluginInfo").name == "csi.dlfs"
    assert plant.call("GetPluginCapabilities").capabilities == []
    assert plant.call("Probe").ready.value
    kinds = [each.rpc.type for each in plant.call("NodeGetCapabilities").capabilities]
    assert kinds == [2, 4]
    info = plant.call("NodeGetInfo")
    assert (info.node_id, info.max_volumes_per_node) == ("node-1", PUBLISHES)


def test_a_published_volume_is_read_and_a_call_again_changes_nothing(
    plant: Plant, target: Path, volume: Path
) -> None:
    for _ in range(2):
        plant.publish(target, str(volume))
    for path, data in SAMPLES.items():
        assert (target / "animals" / path).read_bytes() == data
    read_ahead = native_server.DEVICES / str(device_of(str(target))) / "read_ahead_kb"
    if os.access(read_ahead, os.W_OK):
        assert int(read_ahead.read_text()) == native_server.READ_AHEAD_KIB
    served = plant.servers(target)
    for words in ({"volume_id": "other"}, {"attributes": {"mode": "440"}}):
        with pytest.raises(Refused, match=r"ALREADY_EXISTS: .* is there"):
            plant.publish(target, str(volume), **words)
    mode = capability(Mode.SINGLE_NODE_READER_ONLY)
    with pytest.raises(Refused, match=r"ALREADY_EXISTS: .*access mode"):
        plant.publish(target, str(volume), volume_capability=mode)
    found = plant.call("NodeGetVolumeStats", volume_id=target.name, volume_path=str(target))
    assert not found.volume_condition.abnormal
    assert [usage.total >= usage.used > 0 for usage in found.usage] == [True, True]
    with pytest.raises(Refused, match="NOT_FOUND"):
        plant.call("NodeGetVolumeStats", volume_id="other", volume_path=str(target))
    with pytest.raises(Refused, match=r"NOT_FOUND: .*expected volume 'target'"):
        plant.call("NodeUnpublishVolume", volume_id="other", target_path=str(target))
    assert plant.servers(target) == served
    for pid in served:
        status = Path(f"/proc/{pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
    for _ in range(2):
        plant.unpublish(target)


def test_a_dataset_is_shown_at_the_target(plant: Plant, target: Path, volume: Path) -> None:
    with pytest.raises(Refused, match=r"NOT_FOUND: attribute 'dataset': .* 'plants'"):
        plant.publish(target, str(volume), attributes={"dataset": "plants"})
    assert plant.left() == []
    inline = {"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p"}
    words = {"dataset": "animals@1", "uid": "1234", "mode": "400", "memory": "16MiB", **inline}
    writer = capability(Mode.SINGLE_NODE_WRITER)  # as of every inline volume
    plant.publish(target, str(volume), attributes=words, volume_capability=writer, readonly=True)
    found = (target / "cat" / "0.txt").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (1234, 0o400)
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "new").touch()


def test_the_code_is_that_of_what_the_server_has_found(
    plant: Plant, target: Path, volume: Path
) -> None:
    with pytest.raises(Refused, match=r"NOT_FOUND: .*nowhere.img: no such file"):
        plant.publish(target, f"{plant.folder}/nowhere.img")
    junk = plant.folder / "junk.img"
    junk.write_bytes(bytes(MIB))
    with pytest.raises(Refused, match="DATA_LOSS"):
        plant.publish(target, str(junk))
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION: .*files in it"):
        plant.publish(target, str(volume))
    (target / "file").unlink()


def test_a_full_node_and_many_calls_at_once(plant: Plant, volume: Path) -> None:
    targets = [plant.targets / f"t{number}" for number in range(PUBLISHES)]

    def publish(target: Path) -> str:
        try:
            plant.publish(target, str(volume))
        except Refused as refused:
            return refused.code
        return (target / "animals/cat/0.txt").read_text()

    with ThreadPoolExecutor(2 * PUBLISHES) as pool:
        done = list(pool.map(publish, [*targets, *targets]))
    assert {done.count("first") >= PUBLISHES, set(done) <= {"first", "ABORTED"}} == {True}
    with pytest.raises(Refused, match=rf"RESOURCE_EXHAUSTED: .*at most {PUBLISHES} volumes"):
        plant.publish(plant.targets / "more", str(volume))
    with ThreadPoolExecutor(PUBLISHES) as pool:
        list(pool.map(plant.unpublish, targets))
    assert plant.left() == []


def test_a_call_ends_before_its_deadline_and_leaves_nothing(plant: Plant, target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        uri = f"nvme-tcp://127.0.0.1:{port}/{DEFAULT_NQN}?nsid=1&connect_ms=60000"
        with pytest.raises(Refused, match=r"DEADLINE_EXCEEDED: .*no server answered in time"):
            plant.publish(target, uri, timeout_s=3.0)
        wait_for(lambda: plant.left() == [], lambda: f"nothing left, got {plant.left()}")


def test_a_call_without_a_deadline_has_none() -> None:
    for told, seconds in ((9.2e18, None), (None, None), (119.5, 119.5)):
        assert _seconds_left(SimpleNamespace(time_remaining=lambda told=told: told)) == seconds


@pytest.fixture(scope="module")
def secured() -> Iterator[tuple[ScriptedTarget, str]]:
    """A storage node that demands a key, with a volume; and the key."""
    from dlfs.fabric.keys import generate_key

    namespace = Namespace(16 * MIB)
    terms = Authentication(generate_key())
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [namespace])]) as plain:
        new_volume(plain.uri())
        write_dataset(plain.uri(), "animals", SAMPLES)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [namespace], authentication=terms)]) as target:
        yield target, terms.host_key


def test_keys_reach_the_server_and_nothing_else(
    plant: Plant, target: Path, secured: tuple[ScriptedTarget, str]
) -> None:
    storage, key = secured
    uri = storage.uri(dhchap_key="host")
    with pytest.raises(Refused, match=r"UNAUTHENTICATED: .*the Secret of the volume lacks host"):
        plant.publish(target, uri)
    from dlfs.fabric.keys import generate_key

    wrong = generate_key()
    with pytest.raises(Refused, match="UNAUTHENTICATED") as refused:
        plant.publish(target, uri, secrets={"host": wrong})
    plant.publish(target, uri, secrets={"host": key + "\n"})
    assert (target / "animals/cat/0.txt").read_text() == "first"
    (file,) = (plant.folder / "run/keys").glob("*/*")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (key, 0o400)
    seen = [str(refused.value).encode(), *_texts(plant, file)]
    for secret in (key.split(":")[2], wrong.split(":")[2]):
        assert not [text for text in seen if secret.encode() in text]


def _texts(plant: Plant, key_file: Path) -> Iterator[bytes]:
    """Yield all files of a node but that of a key, and what the system shows of its processes."""
    for path in plant.folder.rglob("*"):
        if path.is_file() and path != key_file and path.suffix != ".img" and not path.is_mount():
            with contextlib.suppress(OSError):
                yield path.read_bytes()
    for pid in (plant.driver.pid, plant.holder.pid, *plant.servers()):
        for name in ("cmdline", "environ"):
            yield Path(f"/proc/{pid}/{name}").read_bytes()


def test_a_question_to_the_mount_of_an_attempt_before_is_waited_for() -> None:
    questions, ended = Questions(), threading.Event()
    assert questions.ask("stage", ended.wait) is not None
    launcher = SimpleNamespace(failure=lambda _name: None)
    node = SimpleNamespace(_questions=questions, _launcher=launcher, _stage=lambda _name: "stage")
    record = SimpleNamespace(name="n", target="/t")
    timer = threading.Timer(0.1, ended.set)
    timer.start()
    found = Node._await(node, record, lambda: 5, time.monotonic() + SECONDS_MAX)  # type: ignore[arg-type]
    assert found == 5
    timer.join()
    with pytest.raises(CallError, match="answered in time") as late:
        Node._await(node, record, lambda: 5, time.monotonic())  # type: ignore[arg-type]
    assert late.value.code is Code.DEADLINE_EXCEEDED
