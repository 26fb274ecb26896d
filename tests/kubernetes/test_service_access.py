"""Volumes as sockets of the node service: real services, bind mounts, and clients behind them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlfs.fabric.keys import generate_key
from dlfs.service.client import unpublish
from dlfs.service.published import NEW_SOCKET_NAME
from dlfs_csi import sockets
from dlfs_csi.failures import CallError, Code
from dlfs_csi.mounts import SOCKET_PREFIX
from dlfs_csi.records import name_of
from dlfs_csi.sockets import ServiceSockets
from tests.kubernetes.driving import Plant, Refused
from tests.service.serving import Service, make_volume
from tests.service.test_access import OTHER, SAMPLES, be_pod, read, user
from tests.support.processes import PROCESSES
from tests.support.waiting import retried, wait_for

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ACCESS = {"access": "service"}
POD = {
    "csi.storage.k8s.io/pod.namespace": "team",
    "csi.storage.k8s.io/pod.name": "trainer-0",
    "csi.storage.k8s.io/serviceAccount.name": "default",
}
AS_USER = """
import os, sys
words = ["--reuid={0}", "--regid={0}", "--clear-groups", "--bounding-set=-all", "--"]
program = [sys.executable, "-m", "dlfs.cli", *sys.argv[1:]]
os.execvp("setpriv", ["setpriv", *words, *program])
"""
"""A program that becomes the command ``dlfs`` of another user."""


class Site:
    """A node with a driver and a node service of another user, and two volumes."""

    def __init__(self, server_user: str) -> None:
        self.uid = int(server_user.partition(":")[0])
        self.plant = Plant(server_user, "--service", "{folder}/service/control.sock")
        self.folder = self.plant.folder / "service"
        self.folder.mkdir(mode=0o700)
        os.chown(self.folder, self.uid, self.uid)
        self.control = self.folder / "control.sock"
        self.volumes = []
        for label, samples in (("first", SAMPLES), ("second", OTHER)):
            path = self.plant.folder / f"{label}.img"
            self.volumes.append(make_volume(path, samples, label=label))
            path.chmod(0o644)
        self.service: Service

    def start(self) -> Service:
        """Start a service as the user of servers, without volumes."""
        options = ("--sockets", str(self.folder / "sockets"), "--cache", "64MiB")
        program = ("-c", AS_USER.format(self.uid))
        self.service = Service([], self.control, *options, program=program)
        return self.service.wait_ready()

    def publish(self, target: Path, volume: int = 0, **words: Any) -> None:
        context = {**ACCESS, **POD, **words.pop("attributes", {})}
        self.plant.publish(target, self.volumes[volume], attributes=context, **words)

    def served(self) -> tuple[list[str], list[str]]:
        """Return the labels of the volumes, and the notes of the sockets, that the service has."""
        found = self.service.snapshot()
        labels = [each["label"] for each in found["volumes"]]
        return sorted(labels), [each["note"] for each in found["sockets"]]

    def left(self) -> list[str]:
        """Return what publishing leaves, and unpublishing removes."""
        files = os.listdir(self.folder / "sockets")
        return [*self.plant.left(), *(name for name in files if name != ".lock")]


@pytest.fixture(scope="module")
def site(user: str) -> Iterator[Site]:
    made = Site(user)
    try:
        made.start()
        yield made
        made.service.close()
    finally:
        made.plant.close()


def uri(target: Path) -> str:
    return f"unix:{target}/dlfs.sock"


@contextlib.contextmanager
def pod(target: Path, there: Path) -> Iterator[Callable[[], object]]:
    """Yield what reads in a mount namespace and as a user of its own, which has a target bound."""
    there.mkdir()
    ours, theirs = PROCESSES.Pipe()
    with ours:
        with theirs:
            process = PROCESSES.Process(target=be_pod, args=(theirs, str(target), str(there)))
            process.start()
        ours.recv()

        def read_there() -> object:
            ours.send(True)
            return ours.recv()

        yield read_there
        ours.send(False)
        process.join()
    there.rmdir()


def test_pods_read_what_their_sockets_were_published_for(site: Site) -> None:
    plant, service = site.plant, site.service
    first, again, second = (plant.targets / name for name in ("first", "again", "second"))
    for _ in range(2):
        site.publish(first, attributes={"memory": "16MiB"})
        site.publish(again)
        site.publish(second, 1)
    assert site.served() == (["first", "second"], ["team/trainer-0 (default)"] * 3)
    assert service.snapshot()["pid"] == service.pid
    assert os.statvfs(first).f_flag & os.ST_RDONLY
    assert os.listdir(first) == ["dlfs.sock"]
    assert (first / "dlfs.sock").stat().st_uid == site.uid
    with pod(first, plant.folder / "pod") as read_there:
        assert read_there() == SAMPLES
    assert read(uri(again)) == SAMPLES
    with user(54321) as trainer:
        assert trainer(read, uri(second)) == OTHER
        assert "behind socket csi-" in str(trainer(read, uri(second), "first"))
    assert "(team/trainer-0 (default)), ListVolumes: read volume 'first'" in service.log.read_text()
    found = plant.call("NodeGetVolumeStats", volume_id="first", volume_path=str(first))
    assert (found.volume_condition.abnormal, list(found.usage)) == (False, [])
    for words in ({"attributes": {"memory": "8MiB"}}, {"volume": 1}):
        with pytest.raises(Refused, match=r"ALREADY_EXISTS: .*attributes"):
            site.publish(first, **words)
    for target in (first, first, second):
        plant.unpublish(target)
    assert site.served()[0] == ["first"]
    plant.unpublish(again)
    assert site.served() == ([], [])
    assert site.left() == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attributes": {"dataset": "d", "uid": "1"}}, "attributes 'dataset', 'uid': expected none"),
    ({"attributes": {"podMemory": "1Gi"}}, "attributes 'podMemory': expected none"),
    ({"attributes": {"access": "sockets"}}, "attribute 'access': expected 'files' or 'service'"),
    ({"attributes": {
        "volumes": "nvme-tcp://h:4420/nqn.2024-01.a:b?nsid=1&dhchap_key=host",
        "csi.storage.k8s.io/ephemeral": "true",
     }}, "got key host; .* only a PersistentVolume may name them"),
]  # fmt: skip


def test_what_a_socket_cannot_have_is_refused(site: Site, plant: Plant) -> None:
    target = site.plant.targets / "wrong"
    for words, part in WRONG:
        with pytest.raises(Refused, match=f"INVALID_ARGUMENT: .*{part}"):
            site.publish(target, **words)
    with pytest.raises(Refused, match=r"INVALID_ARGUMENT: secrets: .* Secret, dlfs-service-keys"):
        site.publish(target, secrets={"host": generate_key()})
    with pytest.raises(Refused, match=r"NOT_FOUND: .*no such file"):
        site.publish(target, attributes={"volumes": "/no/volume.img"})
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION: .*--service PATH"):
        plant.publish(plant.targets / "wrong", site.volumes[0], attributes=ACCESS)
    assert site.left() == []


def test_pods_read_on_when_service_and_driver_die(site: Site) -> None:
    plant = site.plant
    target = plant.targets / "target"
    site.publish(target)
    with pod(target, plant.folder / "pod") as read_there:
        assert read_there() == SAMPLES
        site.service.close()
        plant.kill()
        plant.start()
        site.start()
        assert read_there() == SAMPLES
        site.publish(target)
        assert read_there() == SAMPLES
    unpublish(site.service.uri, SOCKET_PREFIX + name_of(str(target)))  # as if it had lost it
    assert retried(lambda: read(uri(target)), OSError) == SAMPLES
    site.service.close()
    directory = site.control.parent / "sockets" / (SOCKET_PREFIX + name_of(str(target)))
    (directory / NEW_SOCKET_NAME).touch()  # of a service that was killed as it began to listen
    plant.unpublish(target)
    assert site.left() == []
    site.start()
    assert site.served() == ([], [])


def test_a_killed_call_leaves_nothing(site: Site) -> None:
    plant = site.plant
    target = plant.targets / "target"
    os.kill(site.service.pid, signal.SIGSTOP)

    def publish() -> None:
        with contextlib.suppress(Refused):
            site.publish(target)

    call = threading.Thread(target=publish)
    call.start()
    wait_for(lambda: any((plant.folder / "state/records").iterdir()), "a call under way")
    plant.kill()
    call.join()
    os.kill(site.service.pid, signal.SIGCONT)
    plant.start()
    wait_for(lambda: site.left() == [], lambda: f"nothing left, got {site.left()}")
    wait_for(lambda: site.served() == ([], []), "the end of the volume")
    shutil.copytree(plant.folder / "state", plant.folder / "before")
    site.publish(target)
    plant.kill()
    shutil.rmtree(plant.folder / "state")  # and the record of what is published
    (plant.folder / "before").rename(plant.folder / "state")
    plant.start()
    plant.unpublish(target)
    wait_for(lambda: site.left() == [], lambda: f"nothing left, got {site.left()}")
    assert site.served() == ([], [])


def test_a_service_that_does_not_answer_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "SERVICE_SECONDS", 0.2)
    target = site.plant.targets / "target"
    site.publish(target)
    there = ServiceSockets(str(site.control))
    os.kill(site.service.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallError) as caught:
            there.withdraw(name_of(str(target)))
        assert caught.value.code is Code.UNAVAILABLE
    finally:
        os.kill(site.service.pid, signal.SIGCONT)
    site.plant.unpublish(target)
    assert site.left() == []


def test_links_of_the_services_user_are_not_followed(site: Site, tmp_path: Path) -> None:
    name = name_of("/a")
    (tmp_path / "sockets").mkdir()
    (tmp_path / "sockets" / (SOCKET_PREFIX + name)).symlink_to("/etc")
    there = ServiceSockets(str(tmp_path / "control.sock"))
    with pytest.raises(CallError, match="expected the directory of the service's socket"):
        there.bind(name, str(tmp_path / "stage"))
    assert not os.path.ismount(tmp_path / "stage")
