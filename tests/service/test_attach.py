"""Volumes that come and go while a service runs: ``dlfs attach`` and ``dlfs detach``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

import dlfs
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DlfsError,
    ExistsError,
    NotFoundError,
    ServiceLostError,
)
from dlfs.mount.mountpoint import find_mount
from dlfs.service.client import attach, detach
from dlfs.service.protocol import (
    ChannelState,
    DatasetState,
    Detached,
    DetachVolume,
    OpenChannel,
    OpenDataset,
)
from tests.service.serving import Service, make_samples, make_volume
from tests.support.descriptors import open_names
from tests.support.scripts import hear, running, tell
from tests.support.waiting import wait_for

SAMPLES = make_samples(60)
OTHER = make_samples(60, seed=2)

_READER = """
import sys, dlfs
volume = dlfs.connect(sys.argv[1], volume=sys.argv[2], timeout_s=5)
dataset = volume.dataset("d")
dataset[0]
print("open", flush=True)
sys.stdin.readline()
try:
    while True:
        for index in range(len(dataset)):
            dataset[index]
except dlfs.DlfsError as error:
    print(type(error).__name__, error, flush=True)
"""

Serve = Callable[..., Service]


@pytest.fixture
def first(tmp_path: Path) -> str:
    return make_volume(tmp_path / "first.img", SAMPLES, label="first")


@pytest.fixture
def second(tmp_path: Path) -> str:
    return make_volume(tmp_path / "second.img", OTHER, label="second")


def names(service: Service) -> list[str]:
    return [volume["label"] for volume in service.snapshot()["volumes"]]


def read(service: Service, label: str) -> dict[bytes, bytes]:
    with dlfs.connect(service.uri, volume=label) as volume, volume.dataset("d") as dataset:
        return {dataset.path(index): dataset[index] for index in range(len(dataset))}


def open_descriptors(service: Service, path: str) -> int:
    return open_names(service.pid).count(path)


def test_an_attached_volume_is_served_until_it_is_detached(
    serve: Serve, first: str, second: str
) -> None:
    service = serve(first)
    for _ in range(3):
        done = attach(service.uri, second)
        assert (done.volume.label, done.mount) == ("second", None)
        assert names(service) == ["first", "second"]
        assert read(service, "second") == OTHER
        assert read(service, "first") == SAMPLES
        with pytest.raises(ExistsError, match="served already"):
            attach(service.uri, second)
        wait_for(lambda: not service.clients(), "the clients to go")
        assert detach(service.uri, "second") == done.volume
        assert names(service) == ["first"]
        assert open_descriptors(service, second) == 0
        with pytest.raises(NotFoundError, match="no such volume; there are: 'first'"):
            detach(service.uri, "second")
    service.stop()


def test_what_cannot_be_attached(serve: Serve, first: str, tmp_path: Path) -> None:
    service = serve(first)
    with pytest.raises(NotFoundError):
        attach(service.uri, str(tmp_path / "missing.img"))
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(1 << 20))
    with pytest.raises(DlfsError, match="this is no DLFS volume"):
        attach(service.uri, str(blank))
    assert names(service) == ["first"]
    assert open_descriptors(service, str(blank)) == 0
    service.stop()


@pytest.mark.root
def test_only_root_and_the_owner_may(serve: Serve, first: str, second: str) -> None:
    service = serve(first, options=("--allow-user", "nobody"))
    script = f"""
import os, dlfs
from dlfs.service.client import attach, detach
os.setuid(65534)
for call in (lambda: attach({service.uri!r}, {second!r}), lambda: detach({service.uri!r}, "first")):
    try:
        call()
    except dlfs.DeviceError as error:
        print(error.errno, flush=True)
"""
    with running(script) as process:
        assert [hear(process), hear(process)] == [str(errno.EACCES)] * 2
    assert names(service) == ["first"]


def test_a_volume_in_use_is_taken_by_force_only(serve: Serve, first: str, second: str) -> None:
    service = serve(first, second)
    with running(_READER, service.uri, "second") as process:
        assert hear(process) == "open"
        with pytest.raises(DeviceError, match=f"processes read it: {process.pid}") as caught:
            detach(service.uri, "second")
        assert caught.value.errno == errno.EBUSY
        assert names(service) == ["first", "second"]
        tell(process)
        detach(service.uri, "second", force=True)
        assert hear(process).split()[0] in ("ServiceLostError", "NotFoundError")
    assert names(service) == ["first"]
    assert open_descriptors(service, second) == 0
    assert read(service, "first") == SAMPLES
    attach(service.uri, second)
    assert read(service, "second") == OTHER
    service.stop()


def test_batches_keep_their_bytes_when_their_volume_is_taken(
    serve: Serve, first: str, second: str
) -> None:
    service = serve(first, second)
    expected = list(OTHER.values())
    with dlfs.connect(service.uri, volume="second", timeout_s=5) as volume:
        dataset = volume.dataset("d")
        batch = dataset.read(range(20))
        detach(service.uri, "second", force=True)
        assert batch.to_list() == expected[:20]
        with pytest.raises((ServiceLostError, NotFoundError)):
            dataset.read(range(20, 40))
        attach(service.uri, second)
        assert dataset.read(range(20, 40)).to_list() == expected[20:40]
        assert batch.to_list() == expected[:20]


@pytest.mark.fuse
def test_a_nested_mount_follows(serve: Serve, first: str, second: str, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service = serve(first, options=("--mount", str(mountpoint), "--nested"))
    assert os.listdir(mountpoint) == ["first"]
    path = b"class1/00001"
    for _ in range(2):
        done = attach(service.uri, second)
        assert done.mount == str(mountpoint / "second")
        assert sorted(os.listdir(mountpoint)) == ["first", "second"]
        assert (mountpoint / "second" / "d" / path.decode()).read_bytes() == OTHER[path]
        with (mountpoint / "second" / "d" / path.decode()).open("rb") as file:
            with pytest.raises(DeviceError, match=f"{os.getpid()}; close the files") as caught:
                detach(service.uri, "second")
            assert caught.value.errno == errno.EBUSY
            assert file.read() == OTHER[path]
        detach(service.uri, "second")
        assert os.listdir(mountpoint) == ["first"]
        assert open_descriptors(service, second) == 0
    attach(service.uri, second)
    descriptor = os.open(mountpoint / "second" / "d" / path.decode(), os.O_RDONLY)
    detach(service.uri, "second", force=True)
    with pytest.raises(OSError, match="Stale"):
        os.read(descriptor, 1)
    os.close(descriptor)
    assert (mountpoint / "first" / "d" / path.decode()).read_bytes() == SAMPLES[path]
    service.stop()
    assert os.listdir(mountpoint) == []
    assert find_mount(mountpoint) is None


@pytest.mark.fuse
def test_several_volumes_on_one_mount_point(serve: Serve, tmp_path: Path) -> None:
    """Labels that are empty, taken or no file names give way to the volume's UUID."""
    volumes = [
        make_volume(tmp_path / f"{number}.img", SAMPLES, label=label)
        for number, label in enumerate(("same", "same", "", "a/b", ".."))
    ]
    uuids = []
    for uri in volumes:
        with closing(dlfs.open(uri)) as volume:
            uuids.append(str(volume.uuid))
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service = serve(*volumes, options=("--mount", str(mountpoint)))
    assert sorted(os.listdir(mountpoint)) == sorted(["same", *uuids[1:]])
    for name in os.listdir(mountpoint):
        assert os.listdir(mountpoint / name) == ["d"]
    service.stop()
    assert os.listdir(mountpoint) == []


def test_requests_under_way_end_before_their_volume_is_closed(
    serve: Serve, first: str, second: str
) -> None:
    service = serve(first)
    ended = Event()
    refusals: list[DlfsError] = []

    def refresh() -> None:
        while not ended.is_set():
            try:
                with dlfs.connect(service.uri, volume="second", timeout_s=20) as volume:
                    while not ended.is_set():
                        volume.refresh()
            except DlfsError as error:
                refusals.append(error)

    clients = [Thread(target=refresh) for _ in range(2)]
    for each in clients:
        each.start()
    try:
        for _ in range(30):
            attach(service.uri, second)
            detach(service.uri, "second", force=True)
    finally:
        ended.set()
        for each in clients:
            each.join()
    assert {type(error) for error in refusals} == {NotFoundError}
    wait_for(lambda: not service.clients(), "the refused connections to be closed")
    assert open_descriptors(service, second) == 0
    service.stop()


def test_a_client_that_detaches_what_it_reads_gets_its_answer(
    serve: Serve, first: str, second: str
) -> None:
    service = serve(first, second)
    with dlfs.connect(service.uri, volume="second") as volume, volume.dataset("d") as dataset:
        uuids = volume.uuid, dataset.uuid
    with closing(service.connection()) as connection:
        for request, kind in (
            (OpenDataset(*uuids), DatasetState),
            (OpenChannel(uuids[1]), ChannelState),
        ):
            connection.request(request, kind, 2)[1].__exit__(None, None, None)
        with pytest.raises(DeviceError, match="processes read it"):
            connection.request(DetachVolume(uuids[0], False), Detached)
        connection.request(DetachVolume(uuids[0], True), Detached)
        assert names(service) == ["first"]
        with pytest.raises(ClosedError, match="has not opened it"):
            connection.request(OpenChannel(uuids[1]), ChannelState, 2)
    wait_for(lambda: not service.clients(), "the client to go")
    assert open_descriptors(service, second) == 0
    attach(service.uri, second)
    assert read(service, "second") == OTHER


def test_batches_of_a_closed_connection_do_not_stop_a_forced_detach(
    serve: Serve, first: str, second: str
) -> None:
    service = serve(first, second)
    expected = list(OTHER.values())
    with dlfs.connect(service.uri, volume="second", timeout_s=5) as volume:
        batch = volume.dataset("d").read(range(20))
    with pytest.raises(DeviceError, match="processes read it"):
        detach(service.uri, "second")
    detach(service.uri, "second", force=True, timeout_s=20)
    assert names(service) == ["first"]
    assert batch.to_list() == expected[:20]
    wait_for(lambda: not service.clients(), "the client to go")
    attach(service.uri, second)
    assert read(service, "second") == OTHER
