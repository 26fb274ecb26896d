"""Who may join an import, and what strangers cost."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlfs.base.units import MIB
from dlfs.block.lease import boot_clock
from dlfs.errors import DlfsError, ExistsError, FormatError, NotFoundError, UsageError
from dlfs.ingest.workers.connection import (
    FRAME_BYTES_MAX,
    Connection,
    ConnectionEndedError,
)
from dlfs.ingest.workers.invitation import Invitation
from dlfs.ingest.workers.link import Link
from dlfs.ingest.workers.listening import Listener, Peer
from dlfs.ingest.workers.messages import (
    PROTOCOL_VERSION,
    End,
    Hello,
    Renew,
    StartPart,
    from_coordinator,
    from_worker,
)
from tests.support.waiting import wait_for


def hello(secret: bytes = b"") -> Hello:
    return Hello(PROTOCOL_VERSION, "0", secret, "host", "boot", os.getpid())


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with Listener(None if request.param == "unix" else "127.0.0.1") as made:
        yield made


def elsewhere(invitation: Invitation) -> Invitation:
    """Return an invitation as a worker on another host has it, which joins by TCP."""
    return replace(invitation, boot_id="another")


def accept(listener: Listener) -> Peer:
    found: list[Peer] = []

    def has_come() -> bool:
        for listening in listener.sockets:
            peer = listener.accept(listening, boot_clock())
            if peer is not None:
                found.append(peer)
        return bool(found)

    wait_for(has_come, "a connection")
    return found[0]


def read(peer: Peer) -> list[Any]:
    """Return the next messages of a peer."""
    found: list[Any] = []

    def has_come() -> bool:
        peer.connection.flush()
        found.extend(peer.connection.receive())
        return bool(found)

    wait_for(has_come, "a message")
    return found


def test_a_worker_with_the_invitation_is_admitted(listener: Listener) -> None:
    invitation = Invitation.parse(listener.invitation.text)
    assert invitation == listener.invitation
    if invitation.port:
        invitation = elsewhere(invitation)
    ends: list[str] = []

    def work() -> None:
        with Link(invitation, hello) as link:
            try:
                link.welcome()
            except Exception as error:  # noqa: BLE001 - looked at below
                ends.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    peer = accept(listener)
    (message,) = read(peer)
    assert listener.admit(peer, message).pid == os.getpid()
    assert (peer.process is None) == bool(invitation.port)
    peer.close()
    thread.join()
    assert "the connection ended" in ends[0]


def test_another_secret_is_refused() -> None:
    with Listener("127.0.0.1") as listener:
        there = listener.invitation
        other = replace(elsewhere(there), secret="00" * 32)
        thread = threading.Thread(target=lambda: Link(other, hello).close())
        thread.start()
        peer = accept(listener)
        (message,) = read(peer)
        with pytest.raises(UsageError, match="expected the secret of this import"):
            listener.admit(peer, message)
        peer.close()
        thread.join()


def test_the_secret_is_not_sent_to_another_server() -> None:
    with Listener("127.0.0.1") as listener, Listener("127.0.0.1") as other:
        there = listener.invitation
        wrong = replace(elsewhere(there), port=other.invitation.port)
        errors: list[Exception] = []

        def work() -> None:
            try:
                Link(wrong, hello).close()
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        peer = accept(other)
        with pytest.raises(ConnectionEndedError):
            assert not read(peer)
        thread.join()
        assert "got a server with another certificate" in str(errors[0])
        peer.close()


def test_an_older_version_of_tls_is_refused() -> None:
    with Listener("127.0.0.1") as listener:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        address = listener.invitation.host, listener.invitation.port
        errors: list[Exception] = []

        def work() -> None:
            with socket.create_connection(address) as plain:
                try:
                    context.wrap_socket(plain)
                except OSError as error:
                    errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        peer = accept(listener)
        with pytest.raises(DlfsError):
            read(peer)
        peer.close()
        thread.join()
        assert errors


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", 1 << 29) + b"x",  # a huge length
        struct.pack("<I", 1 << 31 | 5) + b"12345",  # a piece of a long message
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"abc",  # no message
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_a_stranger_sends_is_an_error(sent: bytes) -> None:
    with Listener() as listener, listener.invitation.connect()[0] as stranger:
        peer = accept(listener)
        stranger.sendall(sent)
        with pytest.raises(FormatError):
            read(peer)
        peer.close()


def test_half_a_frame_waits_and_its_end_is_the_end() -> None:
    with Listener() as listener, listener.invitation.connect()[0] as stranger:
        peer = accept(listener)
        stranger.sendall(struct.pack("<I", 100) + b"half")
        assert peer.connection.receive() == []
        stranger.close()
        with pytest.raises(ConnectionEndedError):
            read(peer)
        peer.close()


def test_a_stranger_has_a_deadline() -> None:
    with Listener() as listener, listener.invitation.connect()[0]:
        peer = accept(listener)
        assert peer.until_s <= boot_clock() + 10
        peer.close()


def test_an_invitation_in_a_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "invitation"
    invitation = Invitation("name", "boot", "host", 4420, "ab" * 32, "cd" * 32)
    invitation.write(str(path))
    assert Invitation.read(str(path)) == invitation
    assert path.stat().st_mode & 0o777 == 0o600
    assert "cd" not in repr(invitation)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="mode 0640"):
        Invitation.read(str(path))
    with pytest.raises(NotFoundError):
        Invitation.read(str(tmp_path / "none"))
    path.write_text("another file")
    with pytest.raises(ExistsError):
        invitation.write(str(path))
    assert path.read_text() == "another file"
    with pytest.raises(UsageError, match="expected an invitation") as caught:
        Invitation.parse(invitation.text.replace("4420", "99999"))
    assert "cd" not in str(caught.value)


def test_an_urgent_message_comes_within_a_long_one() -> None:
    ends = socket.socketpair()
    sender = Connection(ends[0], from_coordinator)
    receiver = Connection(ends[1], from_coordinator)
    description = os.urandom(3 * FRAME_BYTES_MAX + 5)
    sender.send(StartPart(1, description, b""))
    sender.flush()  # a part of it
    sender.send(End("soon"), urgent=True)
    sender.send(End("later"))
    found: list[Any] = []

    def has_come() -> bool:
        sender.flush()
        found.extend(receiver.receive())
        return len(found) == 3

    wait_for(has_come, "all messages")
    assert found == [End("soon"), StartPart(1, description, b""), End("later")]
    assert not sender.has_unsent
    sender.close()
    receiver.close()


def test_messages_of_the_other_side_are_refused() -> None:
    ends = socket.socketpair()
    sender, receiver = Connection(ends[0], from_worker), Connection(ends[1], from_worker)
    sender.send(Renew(1))
    sender.flush()
    assert receiver.receive() == [Renew(1)]
    sender.send(End("of the coordinator"))
    sender.flush()
    with pytest.raises(FormatError, match="read a message"):
        receiver.receive()
    assert MIB == FRAME_BYTES_MAX
    sender.close()
    receiver.close()
