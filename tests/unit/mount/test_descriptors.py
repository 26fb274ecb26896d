"""Messages with descriptors between processes."""

from __future__ import annotations

import socket

from dlfs.mount.descriptors import receive


def test_an_answer_is_received_from_a_peer_that_has_ended_without_reading() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        here.send(b"request")
        there.send(b"refusal")
        there.close()
        assert receive(here, 100, 0) == (b"refusal", [])
        assert receive(here, 100, 0) == (b"", [])
