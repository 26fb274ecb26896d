"""Tests sessions over a pair of sockets: errors are answered and leave no resources."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import copy
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import pytest
import trio
import trio.testing

import dlfs
from dlfs.base.units import GIB
from dlfs.connection.connection import LocalVolume, OpenOptions
from dlfs.dataset.dataset import Dataset
from dlfs.errors import DeviceError
from dlfs.format.superblock import Superblock
from dlfs.service.dataset_cache import DatasetCache, ServedVolume
from dlfs.service.generation_file import read_generation
from dlfs.service.protocol import (
    ANSWERS,
    HEADER,
    PROTOCOL_VERSION,
    ChannelState,
    DatasetState,
    Failure,
    GetStatistics,
    GetVolume,
    Hello,
    Message,
    OpenChannel,
    OpenDataset,
    OpenStep,
    Pending,
    Statistics,
    Welcome,
    body_bytes,
    decode,
    encode,
)
from dlfs.service.session import Session
from dlfs.service.sockets import Peer
from dlfs.service.state import ServerState
from dlfs.store.transaction import load_generation
from tests.service.serving import make_volume
from tests.support.arriving import leave_unfinished


@pytest.fixture
def cache() -> Iterator[DatasetCache]:
    with closing(DatasetCache(GIB)) as made:
        yield made


@pytest.fixture
def volume(tmp_path: Path, cache: DatasetCache) -> Iterator[ServedVolume]:
    uri = make_volume(tmp_path / "v.img", {b"a": b"b"})
    with ServedVolume(uri, cache, OpenOptions()) as opened:
        yield opened


class Talk:
    """A client's end."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own

    def ask(self, message: Message) -> Message:
        """Send a request; return its answer."""
        self.send(message)
        while isinstance(answer := self.hear(), Pending):
            pass
        return answer

    def hear(self) -> Message:
        """Return the next message."""
        length = body_bytes(self._receive(HEADER.size))
        return decode(self._receive(length), ANSWERS)

    def send(self, message: Message) -> None:
        self._own.sendall(encode(message))

    def hears_the_end(self) -> bool:
        """Return True if the connection ends next. Waits for it."""
        return self._own.recv(1) == b""

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more, descriptors, _, _ = socket.recv_fds(self._own, count - len(data), 8)
            for descriptor in descriptors:
                os.close(descriptor)
            assert more
            data += more
        return data


def state_of(*volumes: ServedVolume) -> ServerState:
    return ServerState({volume.uuid: volume for volume in volumes}, volumes[0]._cache)


@contextmanager
def session(
    volume: ServedVolume,
    snapshot: Callable[[], Any] = dict,
    *,
    state: ServerState | None = None,
) -> Iterator[Talk]:
    """Talk to a session that has greeted this client; it ends well when this does."""
    ours, theirs = socket.socketpair()
    used = state or state_of(volume)
    used.snapshot = lambda _viewer: snapshot()

    async def run() -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        await Session(used, stream, Peer(os.getpid(), os.getuid(), frozenset(), "process 1")).run()

    thread = Thread(target=trio.run, args=[run])
    thread.start()
    try:
        with ours:
            talk = Talk(ours)
            assert isinstance(talk.ask(Hello(PROTOCOL_VERSION, "test")), Welcome)
            yield talk
    finally:
        thread.join()


def test_a_dataset_that_cannot_be_shared_is_given_back(
    cache: DatasetCache, volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dataset,) = volume.datasets()

    def fail(*_: object) -> None:
        raise DeviceError("make a share: no memory", errno.ENOMEM)

    with session(volume) as talk:
        with monkeypatch.context() as patched:
            patched.setattr("dlfs.service.state.Share", fail)
            answer = talk.ask(OpenDataset(volume.uuid, dataset.uuid))
        assert answer == Failure("DeviceError", str(DeviceError("make a share: no memory")), 12)
        assert [entry["users"] for entry in cache.statistics()] == [0]
        assert isinstance(talk.ask(OpenDataset(volume.uuid, dataset.uuid)), DatasetState)
        assert [entry["users"] for entry in cache.statistics()] == [1]
    assert [entry["users"] for entry in cache.statistics()] == [0]


def test_an_unexpected_error_ends_the_session_and_frees_its_resources(
    cache: DatasetCache, volume: ServedVolume, caplog: pytest.LogCaptureFixture
) -> None:
    (dataset,) = volume.datasets()

    def fail() -> dict[str, Any]:
        raise RuntimeError("a bug")

    with session(volume, snapshot=fail) as talk:
        assert isinstance(talk.ask(OpenDataset(volume.uuid, dataset.uuid)), DatasetState)
        assert isinstance(talk.ask(OpenChannel(dataset.uuid)), ChannelState)
        talk.send(GetStatistics())
        assert talk.hears_the_end()
    assert [entry["users"] for entry in cache.statistics()] == [0]
    assert "a bug" in caplog.text


def test_a_client_is_told_that_its_request_is_worked_on(
    volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlfs.service.session.PENDING_S", 0.01)
    answered = Event()

    def snapshot() -> dict[str, Any]:
        answered.wait()
        return {}

    with session(volume, snapshot=snapshot) as talk:
        talk.send(GetStatistics())
        try:
            assert [talk.hear() for _ in range(3)] == [Pending()] * 3
        finally:
            answered.set()
        while isinstance(answer := talk.hear(), Pending):
            pass
        assert answer == Statistics({})


def test_an_answer_that_is_too_long_is_refused(volume: ServedVolume) -> None:
    with session(volume, snapshot=lambda: {"clients": "x" * (1 << 20)}) as talk:
        for _ in range(2):
            answer = talk.ask(GetStatistics())
            assert isinstance(answer, Failure)
            assert answer.error == "LimitError"
            assert "send Statistics: expected at most 1048576 bytes" in answer.message


def test_steps_of_imports_count_until_they_are_closed(
    volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dlfs.open(volume.volume.uri) as own:
        leave_unfinished(own)
        (unfinished,) = (info.uuid for info in own.unfinished())
    state = state_of(volume)
    with session(volume, state=state) as talk, session(volume, state=state) as other:
        steps = [OpenStep(volume.uuid, unfinished, number) for number in range(2)]
        talk.ask(GetVolume(volume.uuid))
        sizes = [volume.imports.step_bytes(unfinished, number) for number in range(2)]
        monkeypatch.setattr("dlfs.service.session.MEMORY_BYTES_MAX", sum(sizes) - 1)
        assert isinstance(talk.ask(steps[0]), DatasetState)
        refused = other.ask(steps[1])
        assert isinstance(refused, Failure)
        assert refused.error == "LimitError"
        assert "of names and locations in one process" in refused.message
        assert set(state.step_bytes.values()) == {sizes[0]}
        assert isinstance(other.ask(OpenStep(volume.uuid, unfinished, 99)), Failure)
        monkeypatch.setattr("dlfs.service.session.MEMORY_BYTES_MAX", sum(sizes))
        assert isinstance(other.ask(steps[1]), DatasetState)
        assert set(state.step_bytes.values()) == {sum(sizes)}
        (found,) = volume._cache.statistics()
        assert (found["dataset"], found["version"], found["users"]) == ("d", 0, 2)
    assert not state.step_bytes
    assert [entry["users"] for entry in volume._cache.statistics()] == [0]


def test_statistics_leave_out_datasets_closed_meanwhile(
    cache: DatasetCache, volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dataset,) = volume.datasets()
    stats = Dataset.stats

    def close_first(self: Dataset) -> dict[str, int]:
        self.close()
        return stats(self)

    with volume.acquire(dataset.uuid):
        assert len(cache.statistics()) == 1
        monkeypatch.setattr(Dataset, "stats", close_first)
        assert cache.statistics() == []


def test_a_volume_that_does_not_answer_leaves_threads_to_others(volume: ServedVolume) -> None:
    """More requests than trio has threads hang in one volume, and another one's are answered."""
    released = Event()
    hanging, healthy = volume, copy(volume)
    healthy.uuid = uuid4()

    async def crowd(state: ServerState) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(state.run_for_volume, hanging, released.wait)
                nursery.start_soon(state.close, released.wait)
            await trio.testing.wait_all_tasks_blocked()
            try:
                with trio.fail_after(30):
                    assert await state.run_for_volume(healthy, lambda: "an answer") == "an answer"
                    assert await trio.to_thread.run_sync(lambda: "the mount") == "the mount"
            finally:
                released.set()

    async def main() -> None:
        await crowd(state_of(hanging, healthy))

    trio.run(main)


def test_a_refresh_while_a_volume_is_described_does_not_mix_generations(
    volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    superblock = LocalVolume.superblock.fget
    assert superblock is not None
    refreshes: list[LocalVolume] = []

    def then_refresh(opened: LocalVolume) -> Superblock:
        found: Superblock = superblock(opened)
        if refreshes:
            return found
        refreshes.append(opened)
        with dlfs.open(volume.volume.uri) as other, other.writer("more") as writer:
            writer.add("x", b"x")
        opened.generation = load_generation(opened.generation.devices)
        refreshes.clear()
        return found

    with session(volume) as talk:
        talk.ask(GetVolume(volume.uuid))  # loads what the service did not have
        monkeypatch.setattr(LocalVolume, "superblock", property(then_refresh))
        talk.send(GetVolume(volume.uuid))
        header, descriptors, _, _ = socket.recv_fds(talk._own, HEADER.size, 1)
        talk._receive(body_bytes(header))
        read_generation(descriptors[0], "the service")  # raises FormatError if they are mixed
        os.close(descriptors[0])


def test_volumes_are_kept_current_until_they_are_detached(
    volume: ServedVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that cannot be read is left alone; one that is closed meanwhile is no failure."""
    monkeypatch.setattr("dlfs.service.state.IDLE_SECONDS", 0.001)
    looks: list[str] = []

    def fail() -> None:
        looks.append("failed")
        raise DeviceError("a node is away", errno.EIO)

    def close() -> None:
        looks.append("closed")
        volume.close()
        volume.generation()

    async def look() -> None:
        state = state_of(volume)
        with trio.move_on_after(0.1):
            await state.keep_current()

    monkeypatch.setattr(volume, "keep_current", fail)
    trio.run(look)
    assert looks == ["failed"]
    monkeypatch.setattr(volume, "keep_current", close)
    trio.run(look)
    assert looks == ["failed", "closed"]
