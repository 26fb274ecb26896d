"""The client's control connection, in front of a service made of a thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import UsageError
from dlfs.service.control import ControlConnection
from dlfs.service.protocol import (
    HEADER,
    PROTOCOL_VERSION,
    REQUESTS,
    ListVolumes,
    Volumes,
    Welcome,
    body_bytes,
    decode,
    encode,
)

SECONDS_MAX = 100
HANDLED = threading.Event()
"""The signal handler has made its request, which is refused."""


def serve(listener: socket.socket) -> None:
    """Accept a client, and interrupt it by a signal before each answer to its requests."""
    client, _ = listener.accept()
    with client:
        while header := client.recv(HEADER.size, socket.MSG_WAITALL):
            body = client.recv(body_bytes(header), socket.MSG_WAITALL)
            if isinstance(decode(body, REQUESTS), ListVolumes):
                os.kill(os.getpid(), signal.SIGUSR1)
                # The handler's request, if it is sent, comes before the answer.
                assert HANDLED.wait(SECONDS_MAX)
                HANDLED.clear()
                client.sendall(encode(Volumes(())))
            else:
                client.sendall(encode(Welcome(PROTOCOL_VERSION, dlfs.__version__, os.getpid())))


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[ControlConnection]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        service = threading.Thread(target=serve, args=[listener])
        service.start()
        connection = ControlConnection(str(tmp_path / "socket"))
        yield connection
        connection.close()
        service.join()


def test_a_signal_handler_makes_no_request_during_another(connection: ControlConnection) -> None:
    refused = []

    def handle(*_: object) -> None:
        with pytest.raises(UsageError, match="expected one request at a time") as caught:
            connection.request(ListVolumes(), Volumes)
        refused.append(caught)
        HANDLED.set()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for count in (1, 2):
            assert connection.request(ListVolumes(), Volumes)[0] == Volumes(())
            assert len(refused) == count
    finally:
        signal.signal(signal.SIGUSR1, before)
