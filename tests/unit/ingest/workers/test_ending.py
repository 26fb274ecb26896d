"""How workers end that are told to, and what a coordinator says of one that does not end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from dlfs.block.lease import boot_clock
from dlfs.connection.unfinished import PartProgress
from dlfs.errors import LockedError
from dlfs.ingest.workers import process, serving
from dlfs.ingest.workers.coordinator import Coordinator, GrantTimes
from dlfs.ingest.workers.link import Link
from dlfs.ingest.workers.listening import Listener, Peer
from dlfs.ingest.workers.messages import (
    PROTOCOL_VERSION,
    End,
    Ended,
    Hello,
    Renew,
    Renewed,
    Welcome,
)
from dlfs.ingest.workers.process import NotNeededError, run_worker
from dlfs.ingest.workers.publishing import ProgressSocket
from dlfs.ingest.workers.serving import ImportServer
from dlfs.store.grants import GrantBook
from tests.support.waiting import wait_for
from tests.unit.ingest.workers.test_listening import accept, hello, read

FILE: Any = SimpleNamespace(grants_expire=False, writer_key=None, incarnation=lambda: 0)
"""What a link uses of a device on a file."""


def receive(peer: Peer, is_last: Callable[[Any], bool]) -> list[Any]:
    """Return the messages of a peer up to one."""
    found: list[Any] = []
    while not any(map(is_last, found)):
        found += read(peer)
    return found


def admitted(listener: Listener) -> Peer:
    """Admit the next worker, and welcome it."""
    peer = accept(listener)
    (message,) = read(peer)
    listener.admit(peer, message)
    peer.connection.send(Welcome(1, 0, b"", 0.005, 60.0))
    peer.connection.flush()
    return peer


def test_requests_for_time_leave_nothing_behind_on_files() -> None:
    with Listener() as listener:
        links: list[Link] = []
        over = threading.Event()

        def work() -> None:
            with Link(listener.invitation, hello) as link:
                link.welcome()
                link.be_ready([FILE])
                links.append(link)
                over.wait()

        thread = threading.Thread(target=work)
        thread.start()
        peer = admitted(listener)
        try:
            answered = 0
            while answered < 20:
                for message in read(peer):
                    if isinstance(message, Renew):
                        peer.connection.send(Renewed(message.number, None))
                        answered += 1
            wait_for(lambda: bool(links), "the right to write")
            assert len(links[0]._incarnations) == 0
        finally:
            over.set()
            thread.join()
            peer.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_worker_that_is_told_to_end_while_it_opens_devices(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    @contextmanager
    def opened(*_setup: object) -> Iterator[tuple[list[Any], None]]:
        assert told.wait(100)
        yield [FILE], None

    monkeypatch.setattr(process, "decode_setup", lambda _: SimpleNamespace(slot=0))
    monkeypatch.setattr(process, "_devices", opened)
    told = threading.Event()
    ends: list[object] = []

    def work() -> None:
        try:
            ends.append(run_worker(listener.invitation))
        except NotNeededError as error:
            ends.append(error)

    with Listener() as listener:
        thread = threading.Thread(target=work)
        thread.start()
        peer = admitted(listener)
        peer.connection.send(End("the end", goes_on=goes_on))
        peer.connection.flush()
        told.set()
        receive(peer, lambda message: isinstance(message, Ended))
        thread.join()
        peer.close()
    assert [isinstance(each, NotNeededError) for each in ends] == [goes_on]


def test_refused_peers_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with Listener() as listener:
        for now_s in (5.0, 6.0, 7.0, 16.0, 17.0):
            listener.note_refusal(ValueError("no"), now_s)
    text = "import: a worker was not admitted: no"
    assert [record.getMessage() for record in caplog.records] == [
        text,
        f"{text} (2 others not logged)",
    ]


@pytest.mark.parametrize("killed_s", [6.0, 1000.0])
def test_a_killed_worker_that_does_not_end_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, killed_s: float
) -> None:
    """All parts are committed; a write of a killed worker stays, for a while or for good."""
    monkeypatch.setattr(serving, "GONE_S", 0.0)
    caplog.set_level(logging.WARNING, "dlfs")
    times = GrantTimes(2, 30, None)
    complete = {0: PartProgress(1, 1, 1, None, True)}
    coordinator = Coordinator(
        [1], complete, GrantBook(), times, chunk_bytes=1, setup=b"", slots=8, now_s=boot_clock()
    )
    number = coordinator.join(
        Hello(PROTOCOL_VERSION, "1", b"", "node7", "boot", 4711), boot_clock(), can_be_killed=True
    )
    assert number is not None
    coordinator.leave(number, "the connection ended")
    coordinator.take_actions()
    named = "worker 1 (process 4711 on node7)"

    def is_gone(slot: int | None = None) -> bool:
        return slot is not None and killed_s < 100 and named in caplog.text

    device: Any = SimpleNamespace(granted_writers_gone=is_gone)
    launcher: Any = SimpleNamespace(check=lambda *_: None, close=lambda: None)
    writer: Any = SimpleNamespace(cancel=lambda: None)
    with Listener() as listener, ProgressSocket(UUID(int=1), dict) as published:
        server = ImportServer(
            coordinator,
            writer,
            [device],
            lambda *_: (b"", b""),
            listener,
            launcher,
            published,
            lambda: None,
        )
        peer: Any = SimpleNamespace(close=lambda: None)
        killed = boot_clock() - killed_s
        server._dying[number] = serving._Dying(peer, 0, named, killed, killed)
        if killed_s < 100:
            server.run()
        else:
            with pytest.raises(LockedError, match=r"worker 1 \(process 4711 on node7\), which was"):
                server.run()
    assert f"waiting for the end of {named}, which was killed" in caplog.text
