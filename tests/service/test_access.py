"""Who may read which volume of a service: by rules for users, and through published sockets."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlfs
from dlfs._native.library import library
from dlfs.base.units import MIB
from dlfs.dataset import writer
from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    LimitError,
    NotFoundError,
    ServiceLostError,
    UsageError,
)
from dlfs.service.client import attach, detach, get_statistics, publish, unpublish
from dlfs.service.control import ControlConnection
from dlfs.service.protocol import (
    DatasetState,
    GetSegment,
    GetSteps,
    GetVolume,
    ListVolumes,
    Message,
    OpenDataset,
    OpenStep,
    Published,
    PublishSocket,
    Segment,
    Steps,
    Volumes,
    VolumeState,
)
from tests.service.serving import Service, make_samples, make_volume
from tests.support.arriving import leave_unfinished
from tests.support.namespaces import DETACH_OTHERS
from tests.support.processes import PROCESSES
from tests.support.waiting import wait_for

ALICE, BOB, CAROL, LAB = 54321, 54322, 54323, 54400
SAMPLES = make_samples(60)
OTHER = make_samples(60, seed=2)
LARGE = make_samples(1500, seed=3)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder that other users may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def volumes(tmp_path: Path) -> tuple[str, str]:
    """Make the volumes ``first`` and ``second``, with the datasets ``cats`` and ``dogs``."""
    return (
        make_volume(tmp_path / "first.img", SAMPLES, label="first", name="cats"),
        make_volume(tmp_path / "second.img", OTHER, label="second", name="dogs"),
    )


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Service]]:
    """Start services at one socket, with published sockets; ended with the test."""
    services: list[Service] = []

    def started(*uris: str, options: tuple[str, ...] = ()) -> Service:
        options = ("--sockets", str(folder / "published"), *options)
        services.append(Service(list(uris), folder / "s", *options))
        return services[-1].wait_ready()

    yield started
    for service in services:
        service.close()


def _be_user(talk: Connection, user: int, groups: tuple[int, ...]) -> None:
    library()  # while our files can be read
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)
    while (request := talk.recv()) is not None:
        call, arguments = request
        try:
            talk.send(call(*arguments))
        except DlfsError as error:
            talk.send(f"{type(error).__name__} {getattr(error, 'errno', 0)} {error}")


Call = Callable[..., object]


@contextmanager
def user(number: int, *groups: int) -> Iterator[Call]:
    """Yield what makes calls in a process of another user: their outcomes, or errors in words."""
    ours, theirs = PROCESSES.Pipe()
    with ours:
        with theirs:
            process = PROCESSES.Process(target=_be_user, args=(theirs, number, groups))
            process.start()

        def ask_user(call: Call, *arguments: object) -> object:
            ours.send((call, arguments))
            return ours.recv()

        yield ask_user
        ours.send(None)
    process.join()


def read(uri: str, label: str | None = None) -> dict[bytes, bytes]:
    with dlfs.connect(uri, volume=label, timeout_s=20) as volume, volume.dataset() as dataset:
        return {dataset.path(index): dataset[index] for index in range(len(dataset))}


def ask(path: str, requests: list[tuple[Message, type[Message], int]]) -> list[str]:
    """Return the names of the answers to requests, or of their errors with errno."""
    found = []
    with ControlConnection(path) as connection:
        for request, kind, count in requests:
            try:
                answer, descriptors = connection.request(request, kind, count)
                descriptors.close()
                found.append(type(answer).__name__)
            except DlfsError as error:
                found.append(f"{type(error).__name__} {getattr(error, 'errno', 0)}")
    return found


def everything_of(uri: str, label: str) -> list[tuple[Message, type[Message], int]]:
    """Return the requests for all that there is of a volume, by its UUIDs."""
    with dlfs.connect(uri, volume=label) as volume, volume.dataset() as dataset:
        ids = volume.uuid, dataset.uuid
        imports = [(volume.uuid, info.uuid, 0) for info in volume.unfinished()]
    return [
        (ListVolumes(label), Volumes, 0),
        (ListVolumes(str(ids[0])), Volumes, 0),
        (GetVolume(ids[0]), VolumeState, 1),
        (OpenDataset(*ids), DatasetState, 2),
        *((GetSegment(*ids, name), Segment, 1) for name in ("entries", "names", "attributes")),
        *((GetSteps(*step), Steps, 1) for step in imports),
        *((OpenStep(*step), DatasetState, 2) for step in imports),
    ]


@pytest.fixture
def alice() -> Iterator[Call]:
    """A process of a user."""
    with user(ALICE) as made:
        yield made


@pytest.mark.root
def test_users_read_the_volumes_whose_rules_name_them(
    start: Callable[..., Service], volumes: tuple[str, str], alice: Call
) -> None:
    rules = ("--allow", f"first=user:{ALICE}", "--allow", f"second=user:{BOB},group:{LAB}")
    with dlfs.open(volumes[1]) as second:
        leave_unfinished(second)
    service = start(*volumes, options=rules)
    path, uri = str(service.socket), service.uri
    assert read(uri, "first") == SAMPLES
    assert alice(read, uri) == SAMPLES
    refused = str(alice(read, uri, "second"))
    assert refused.startswith(f"DeviceError 13 read volume 'second': user {ALICE} may not (process")
    assert f"needed: 'dlfs serve --allow second=user:{ALICE}'" in refused
    assert f"of user {ALICE}, ListVolumes: read volume 'second'" in service.log.read_text()
    requests = everything_of(uri, "second")
    assert alice(ask, path, requests) == ["DeviceError 13"] * len(requests)
    with user(BOB) as bob, user(CAROL) as carol, user(CAROL, LAB) as member:
        assert bob(read, uri) == member(read, uri) == OTHER
        assert bob(ask, path, requests) == [kind.__name__ for _, kind, _ in requests]
        stranger = str(carol(read, uri))
        assert stranger.startswith(f"DeviceError 13 use the service: user {CAROL} may not")
    with dlfs.connect(uri, volume="second") as volume, volume.dataset() as dataset:
        dataset[0]
        seen = alice(get_statistics, uri)
        assert isinstance(seen, dict)
        assert [each["label"] for each in seen["volumes"]] == ["first"]
        assert {each["dataset"] for each in seen["datasets"]} == {"cats"}
        assert [each["uid"] for each in seen["clients"]] == [ALICE]
        assert seen["memory"]["held_bytes"] < service.snapshot()["memory"]["held_bytes"]
        for name in ("second", "dogs", str(volume.uuid), str(dataset.uuid), "sockets"):
            assert name not in json.dumps(seen)
    assert {each["dataset"] for each in service.snapshot()["datasets"]} == {"cats", "d", "dogs"}
    service.stop()


@pytest.mark.root
def test_a_volume_is_attached_with_its_rule(
    start: Callable[..., Service], volumes: tuple[str, str], alice: Call
) -> None:
    service = start(volumes[0])
    denied = f"DeviceError {errno.EACCES}"
    assert str(alice(read, service.uri)).startswith(denied)
    attach(service.uri, volumes[1], allow=f"user:{ALICE}", cache_bytes=4 * MIB)
    assert alice(read, service.uri) == OTHER
    assert str(alice(read, service.uri, "first")).startswith(denied)
    for call in (attach, detach, publish, unpublish):
        rest = (["second"],) if call is publish else ()
        assert str(alice(call, service.uri, "first", *rest)).startswith(denied)
    detach(service.uri, "second")
    assert str(alice(read, service.uri)).startswith(denied)
    with pytest.raises(LimitError, match=r"expected 1\.0 TiB of memory for its samples"):
        attach(service.uri, volumes[1], allow="user:root", cache_bytes=1 << 40)
    with pytest.raises(UsageError, match="expected a rule"):
        attach(service.uri, volumes[1], cache_bytes=4 * MIB)
    with pytest.raises(UsageError, match="expected user:NAME or group:NAME"):
        attach(service.uri, volumes[1], allow="alice")
    service.stop()


def arena_of(service: Service, label: str) -> int:
    """Return the inode of the memory that a client of a volume maps."""
    with dlfs.connect(service.uri, volume=label) as volume, volume.dataset() as dataset:
        ids = volume.uuid, dataset.uuid
    with closing(service.connection()) as connection:
        _, descriptors = connection.request(OpenDataset(*ids), DatasetState, 2)
        with descriptors:
            return os.fstat(descriptors[1]).st_ino


def test_a_volume_with_a_rule_has_memory_of_its_own(
    start: Callable[..., Service], volumes: tuple[str, str], tmp_path: Path
) -> None:
    others = [
        make_volume(tmp_path / f"{label}.img", {b"a": b"b"}, label=label)
        for label in ("third", "fourth")
    ]
    rules = ("--allow", "first=user:root", "--allow", "second=user:root")
    service = start(*volumes, *others, options=rules)
    inodes = [arena_of(service, label) for label in ("first", "second", "third", "fourth")]
    assert len(set(inodes)) == 3
    assert inodes[2] == inodes[3]
    detach(service.uri, "first")
    attach(service.uri, volumes[0], allow="user:root")
    assert arena_of(service, "first") not in inodes  # who has mapped the old one sees no more
    service.stop()


def test_a_volume_cannot_name_the_dataset_of_another(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = uuid.uuid4()
    monkeypatch.setattr(writer, "uuid4", lambda: same)
    uris = [
        make_volume(tmp_path / f"{label}.img", samples, label=label)
        for label, samples in (("first", SAMPLES), ("second", OTHER))
    ]
    service = start(*uris, options=("--allow", "first=user:root"))
    with dlfs.connect(service.uri, volume="first") as volume, volume.dataset("d") as dataset:
        assert dataset.uuid == same
        assert read(service.uri, "second") == OTHER
        assert dataset.read([5]).to_list() == list(SAMPLES.values())[5:6]
    service.stop()


def test_a_published_socket_is_the_right_to_read_its_volumes(
    start: Callable[..., Service], volumes: tuple[str, str], folder: Path
) -> None:
    service = start(volumes[0], options=("--allow", "first=user:root"))
    attach(service.uri, volumes[1], allow="user:root")
    path = publish(service.uri, "pod-1", ["second"], note="team/trainer-0")
    assert path == str(folder / "published" / "pod-1" / "dlfs.sock")
    assert stat.S_IMODE(os.stat(folder / "published").st_mode) == 0o700
    assert publish(service.uri, "pod-1", ["second"]) == path
    uri = f"unix:{path}"
    assert read(uri) == OTHER
    requests = everything_of(service.uri, "first")
    assert ask(path, requests) == ["DeviceError 13"] * len(requests)
    with pytest.raises(
        DeviceError, match=r"user \d+ behind socket pod-1 \(team/trainer-0\) may no"
    ):
        read(uri, "first")
    for change in (
        lambda: attach(uri, volumes[0]),
        lambda: detach(uri, "second"),
        lambda: publish(uri, "more", ["first"]),
        lambda: unpublish(uri, "pod-1"),
    ):
        with pytest.raises(DeviceError, match="at the service's own socket") as caught:
            change()
        assert caught.value.errno == errno.EACCES
    assert "behind socket pod-1 (team/trainer-0), ListVolumes" in service.log.read_text()
    assert read(service.uri, "first") == SAMPLES
    assert [each["label"] for each in get_statistics(uri)["volumes"]] == ["second"]
    assert {each["dataset"] for each in get_statistics(uri)["datasets"]} == {"dogs"}
    (socket,) = service.snapshot()["sockets"]
    assert (socket["name"], socket["note"]) == ("pod-1", "team/trainer-0")
    with pytest.raises(ExistsError, match="published for other volumes"):
        publish(service.uri, "pod-1", ["first", "second"])
    with pytest.raises(DeviceError, match="sockets are published for it: pod-1"):
        detach(service.uri, "second")
    unpublish(service.uri, "pod-1")
    detach(service.uri, "second")
    assert os.listdir(folder / "published") == [".lock"]
    with pytest.raises(NotFoundError, match="no such socket is published"):
        unpublish(service.uri, "pod-1")
    service.stop()


def test_readers_end_when_their_socket_is_unpublished(
    start: Callable[..., Service], volumes: tuple[str, str]
) -> None:
    service = start(*volumes, options=("--allow", "first=user:root"))
    uris = [f"unix:{publish(service.uri, f'pod-{n}', ['first'])}" for n in range(2)]
    expected = list(SAMPLES.values())
    opened = [dlfs.connect(uri, timeout_s=0.5).dataset("cats") for uri in uris]
    batches = [dataset.read(range(20)) for dataset in opened]
    epochs = [dataset.batches(5, seed=1) for dataset in opened]
    for epoch in epochs:
        next(epoch)
    unpublish(service.uri, "pod-0")
    assert len(service.clients()) > 0
    assert batches[0].to_list() == batches[1].to_list() == expected[:20]
    with pytest.raises(ServiceLostError):
        list(epochs[0])
    with pytest.raises(ServiceLostError):
        opened[0].read(range(40, 60))
    assert opened[1].read(range(20, 60)).to_list() == expected[20:60]
    assert sum(map(len, epochs[1])) == len(expected) - 5
    for dataset in opened:
        dataset.close()
    service.stop()


def test_the_next_service_listens_at_the_published_sockets(
    start: Callable[..., Service], volumes: tuple[str, str], folder: Path
) -> None:
    service = start(volumes[0])
    attach(service.uri, volumes[1], allow="user:root", cache_bytes=8 * MIB)
    uri = f"unix:{publish(service.uri, 'pod', ['second'], note='a pod')}"
    before = os.stat(folder / "published" / "pod").st_ino
    expected = list(OTHER.values())
    with dlfs.connect(uri, timeout_s=20) as volume, volume.dataset() as dataset:
        assert dataset.read(range(20)).to_list() == expected[:20]
        for end in (service.kill, None):
            if end is None:
                service.stop()
            else:
                end()
            service = start(volumes[0])
            wait_for(lambda: service.snapshot()["sockets"], "the record")  # noqa: B023
            assert os.stat(folder / "published" / "pod").st_ino == before
            with pytest.raises(ServiceLostError):  # the batch under way when the service ended
                dataset.read(range(20, 60))
            assert dataset.read(range(20, 60)).to_list() == expected[20:60]
    (socket,) = service.snapshot()["sockets"]
    assert socket["note"] == "a pod"
    with pytest.raises(ExistsError, match="a service uses it already"):
        _serve_here(volumes[0], folder)
    service.stop()
    os.rename(volumes[1], f"{volumes[1]}.away")
    service = start(volumes[0])
    wait_for(lambda: "is not back yet" in service.log.read_text(), "the first try")
    os.rename(f"{volumes[1]}.away", volumes[1])
    assert read(uri) == OTHER
    service.stop()


def test_a_socket_brings_its_volumes_and_takes_them_along(
    start: Callable[..., Service], volumes: tuple[str, str], folder: Path
) -> None:
    service = start(volumes[0], options=("--allow", "first=user:root"))
    other = folder / "other.img"
    other.symlink_to(volumes[1])
    one, two = (
        f"unix:{publish(service.uri, name, attach=uris, cache_bytes=4 * MIB)}"
        for name, uris in (("one", [volumes[1]]), ("two", [volumes[0], str(other)]))
    )
    with pytest.raises(NotFoundError):
        publish(service.uri, "three", ["none"], attach=[volumes[1]])
    assert read(one) == read(two, "second") == OTHER
    service.kill()
    service = start(volumes[0], options=("--allow", "first=user:root"))
    assert read(two, "first") == SAMPLES
    unpublish(service.uri, "one")
    assert read(two, "second") == OTHER
    unpublish(service.uri, "two")
    assert [each["label"] for each in service.snapshot()["volumes"]] == ["first"]
    with pytest.raises(NotFoundError):
        publish(service.uri, "three", ["none"], attach=[volumes[1]])
    assert [each["label"] for each in service.snapshot()["volumes"]] == ["first"]
    service.stop()


def _serve_here(uri: str, folder: Path) -> None:
    from dlfs.service.process import NodeOptions, NodeService

    NodeService(
        NodeOptions(volumes=[uri], socket=str(folder / "t"), sockets=str(folder / "published"))
    )


def test_a_greedy_client_leaves_the_memory_of_other_volumes_alone(
    start: Callable[..., Service], volumes: tuple[str, str], tmp_path: Path
) -> None:
    large = make_volume(tmp_path / "large.img", LARGE, label="large", name="large")
    service = start(
        large, volumes[0], options=("--cache", "6MiB", "--allow", "large=user:root",
                                    "--allow", "first=user:root"),
    )  # fmt: skip
    greedy = f"unix:{publish(service.uri, 'greedy', ['large'])}"
    other = f"unix:{publish(service.uri, 'other', ['first'])}"
    with dlfs.connect(greedy) as volume, volume.dataset() as dataset:
        held = [dataset.read(range(n, n + 50)) for n in range(0, len(LARGE) - 50, 50)]
        assert read(other) == SAMPLES
        assert read(other) == SAMPLES
        found = {each["dataset"]: each for each in service.snapshot()["datasets"]}
        assert found["cats"]["reader"]["private_batches"] == 0
        assert found["cats"]["cache_bytes"] > sum(map(len, SAMPLES.values()))
        assert found["large"]["cache_bytes"] <= 2 * MIB
        assert sum(len(batch.to_list()) for batch in held) == 50 * len(held)
    service.stop()


def test_a_hundred_sockets(
    start: Callable[..., Service], volumes: tuple[str, str], folder: Path
) -> None:
    service = start(*volumes, options=("--allow", "first=user:root"))
    names = [f"pod-{number}" for number in range(100)]
    with closing(service.connection()) as connection:
        for name in names:
            connection.request(PublishSocket(name, ("first",)), Published)
    service.kill()
    service = start(*volumes, options=("--allow", "first=user:root"))
    connections = [ControlConnection(str(folder / "published" / n / "dlfs.sock")) for n in names]
    for each in connections:
        (volume,) = each.request(ListVolumes(), Volumes)[0].volumes
        assert volume.label == "first"
    for name in names[:50]:
        unpublish(service.uri, name)
    for each in connections[:50]:
        with pytest.raises(ServiceLostError):
            each.request(ListVolumes(), Volumes)
    for each in connections[50:]:
        each.request(ListVolumes(), Volumes)
        each.close()
    assert len(service.snapshot()["sockets"]) == 50
    service.stop()
    assert len(list((folder / "published").glob("*/dlfs.sock"))) == 0


@pytest.fixture(scope="module")
def patient() -> Iterator[Service]:
    """A service that takes every request to publish a socket."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uri = make_volume(folder / "v.img", {b"a": b"b"}, label="v")
        options = ("--sockets", str(folder / "d"), "--allow", "v=user:root")
        with closing(Service([uri], folder / "s", *options)) as service:
            yield service.wait_ready()
            service.stop()


NAMES = st.text() | st.sampled_from(
    ["", ".", "..", "../s", "/etc/x", ".lock", ".v.json", "a/b", "x" * 65, "ok", "a\0b", "-x"]
)


@given(
    NAMES, st.lists(st.sampled_from(["v", "w", ""]) | st.text(max_size=5), max_size=3), st.text()
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_publishing_makes_nothing_outside_its_directory(
    patient: Service, name: str, volumes: list[str], note: str
) -> None:
    folder = patient.socket.parent
    before = sorted(os.listdir(folder))
    try:
        path = publish(patient.uri, name, volumes, note=note)
    except (UsageError, NotFoundError, ExistsError):
        assert sorted(os.listdir(folder / "d")) == [".lock"]
    else:
        assert path == str(folder / "d" / name / "dlfs.sock")
        assert set(os.listdir(folder / "d")) == {f".{name}.json", ".lock", name}
        unpublish(patient.uri, name)
    assert sorted(os.listdir(folder)) == before


def be_pod(talk: Connection, source: str, target: str) -> None:
    """Read through a socket that is bound to another place, as a user who may not reach its own."""
    library()
    ctypes.CDLL(None, use_errno=True).unshare(0x20000)  # CLONE_NEWNS
    for options in (["--make-rprivate", "/"], ["--bind", source, target],
                    ["-o", "remount,bind,ro", target]):  # fmt: skip
        subprocess.run(["mount", *options], check=True)
    subprocess.run(["sh", "-ec", DETACH_OTHERS], check=True)
    os.setgroups([])
    os.setgid(ALICE)
    os.setuid(ALICE)
    talk.send(os.access(source, os.F_OK))
    while talk.recv():
        talk.send(read(f"unix:{target}/dlfs.sock"))


@pytest.mark.root
def test_a_socket_that_is_bound_into_a_pod(
    start: Callable[..., Service], volumes: tuple[str, str], folder: Path
) -> None:
    """Its directory is bound to another place, read-only, for any user; the service restarts."""
    service = start(*volumes, options=("--allow", "first=user:root"))
    path = publish(service.uri, "pod", ["first"])
    there = folder / "there"
    there.mkdir()
    ours, theirs = PROCESSES.Pipe()
    with ours:
        with theirs:
            arguments = theirs, os.path.dirname(path), str(there)
            pod = PROCESSES.Process(target=be_pod, args=arguments)
            pod.start()
        assert ours.recv() is False
        for _ in range(2):
            ours.send(True)
            assert ours.recv() == SAMPLES
            service.kill()
            service = start(*volumes, options=("--allow", "first=user:root"))
        ours.send(False)
        pod.join()
    assert os.listdir(there) == []
    service.stop()
