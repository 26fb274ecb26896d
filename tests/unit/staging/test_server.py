"""The server of a staging area and its clients, in one process."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import trio

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import (
    DeviceError,
    LockedError,
    NotFoundError,
    UsageError,
)
from dlfs.staging import client, server
from dlfs.staging.client import connect_area
from dlfs.staging.protocol import REQUEST_BYTES_MAX, SealOptions, SealStatus
from dlfs.staging.sealer import Sealer
from dlfs.staging.server import SealServer
from tests.support.files import write_files


class Running:
    """A server in a thread, with a volume and a staging area of its own."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "volume.img")
        dlfs.format_volume(path, size_bytes=16 * MIB)
        self.area = folder / "area"
        self.volume = dlfs.open(path)
        self.server = SealServer(self.volume, str(self.area))
        self.sealed = 0
        self.server.on_sealed = self._count
        self._ready = threading.Event()
        self._end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._ready.wait(30)

    def _count(self) -> None:
        self.sealed += 1

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            token = trio.lowlevel.current_trio_token()
            self.call = lambda function: trio.from_thread.run_sync(function, trio_token=token)
            self._end = lambda: self.call(nursery.cancel_scope.cancel)
            try:
                await nursery.start(self.server.run)
            finally:
                self._ready.set()

    def connect(self) -> socket.socket:
        return connect_area(str(self.area), "test")

    def begin(self, name: str, **files: bytes) -> Path:
        (self.area / name).mkdir()
        return write_files(self.area / name, files)

    def seal(self, name: bytes, connection: socket.socket | None = None) -> SealStatus:
        return client.seal(connection or self.connect(), name, SealOptions(), lambda _: None)

    def close(self) -> None:
        if self._thread.is_alive():
            self._end()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.volume.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


def test_sealing_listing_and_discarding(running: Running) -> None:
    running.begin("x", a=b"aa", b=b"b")
    running.begin("odd\udcff", a=b"a")
    found = client.list_incoming(running.connect())
    assert [(one.name, one.contents.files, one.status.state) for one in found] == [
        ("odd\udcff", 1, "open"),
        ("x", 2, "open"),
    ]
    assert (running.seal(b"x").version, running.sealed) == (1, 1)
    with pytest.raises(UsageError, match="is not UTF-8"):
        running.seal(b"odd\xff")
    (left,) = client.list_incoming(running.connect())
    assert "is not UTF-8" in (left.status.error or "")
    client.discard(running.connect(), b"odd\xff")
    assert client.list_incoming(running.connect()) == []
    for action in (running.seal, lambda name: client.discard(running.connect(), name)):
        with pytest.raises(NotFoundError, match="is no directory"):
            action(b"x")


@pytest.mark.root
def test_a_connection_has_the_rights_of_its_user(running: Running) -> None:
    running.begin("x", a=b"a")
    of_nobody = running.call(lambda: running.server.connect(65534))
    with pytest.raises(DeviceError, match="belongs to user 0") as caught:
        running.seal(b"x", of_nobody)
    assert caught.value.errno == errno.EACCES
    assert running.seal(b"x", running.call(lambda: running.server.connect(0))).version == 1


def test_one_request_for_a_dataset_at_a_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.begin("x", a=b"a")
    running.begin("y", a=b"a")
    begun, go_on, plain = threading.Event(), threading.Event(), Sealer.seal

    def wait(sealer: Sealer, seal: object) -> SealStatus:
        begun.set()
        assert go_on.wait(30)
        return plain(sealer, seal)  # type: ignore[arg-type]

    monkeypatch.setattr(Sealer, "seal", wait)
    states: list[str] = []
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(running.seal(b"x"))),
        threading.Thread(
            target=lambda: results.append(
                client.seal(
                    running.connect(), b"y", SealOptions(), lambda now: states.append(now.state)
                )
            )
        ),
    ]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    with pytest.raises(LockedError, match="'x': it is being sealed"):
        running.seal(b"x")
    with pytest.raises(LockedError, match="discard 'x': it is being sealed"):
        client.discard(running.connect(), b"x")
    while "waiting" not in states:
        threads[1].join(0.01)
    listed = {one.name: one.status.state for one in client.list_incoming(running.connect())}
    assert listed == {"x": "sealing", "y": "waiting"}
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert sorted(os.listdir(running.area)) == [".dlfs"]
    assert [status.state for status in results] == ["sealed"] * 2


def test_a_seal_goes_on_without_its_client(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.begin("x", a=b"a")
    begun, gone, ended, plain = *(threading.Event() for _ in range(3)), Sealer.seal

    def wait(sealer: Sealer, seal: object) -> SealStatus:
        begun.set()
        assert gone.wait(30)
        status = plain(sealer, seal)  # type: ignore[arg-type]
        ended.set()
        return status

    monkeypatch.setattr(Sealer, "seal", wait)
    with running.connect() as connection:
        connection.sendall(b'{"action": "seal", "name": "x"}\n')
        assert begun.wait(30)
    gone.set()
    assert ended.wait(30)
    assert running.volume["x"].info.sample_count == 1


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b'{"action": "x"}\n', b'{"action": "seal", "name": "\\ud800"}\n',
     b"x" * (REQUEST_BYTES_MAX + 1)],
)  # fmt: skip
def test_malformed_requests(running: Running, line: bytes) -> None:
    with running.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(line)
        assert b'"kind": "FormatError"' in stream.readline()
    assert client.list_incoming(running.connect()) == []


def test_a_defect_ends_one_request(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("a planted defect")

    running.begin("x", a=b"a")
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "seal", fail)
        with pytest.raises(DeviceError, match="by a defect of the server; see its log"):
            running.seal(b"x")
    assert "a planted defect" in caplog.text
    assert running.seal(b"x").version == 1


def test_too_many_connections_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    running = Running(tmp_path)
    with running.connect() as first, running.connect() as second:
        second.sendall(b'{"action": "list"}\n')
        first.sendall(b'{"action": "list"}\n')
        assert first.recv(10)
        first.close()
        assert second.recv(10)
    running.close()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does its mount run"):
        connect_area(str(tmp_path), "seal 'x'")
    made = Running(tmp_path)
    made.close()
    with pytest.raises(DeviceError, match=r"Connection refused; does its mount run"):
        made.connect()
    with pytest.raises(UsageError, match="the staging area is not served"):
        made.server.connect(0)
