"""The progress of an import by workers for other programs of its host, such as ``dlfs top``.

The coordinator listens at an abstract UNIX socket that is named after the volume, into which no two
imports by workers run at a time. Who connects gets the progress as JSON, and the connection ends.
It answers only its own user and root, and a reader believes only these.

Threads: one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

from dlfs.base.closing import Closing
from dlfs.errors import DeviceError, FormatError
from dlfs.ingest.workers.invitation import abstract_address

TIMEOUT_S = 5.0
"""Longest wait of a reader for the coordinator, in seconds."""
BYTES_MAX = 1 << 20
"""Most bytes that a reader takes."""
BACKLOG = 8

_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger("dlfs")


def _address(volume: UUID) -> str:
    return abstract_address(f"dlfs-import-into-{volume}")


def _is_trusted(connection: socket.socket) -> bool:
    """Return True if the other side is of this user, or of root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user in (0, os.geteuid())


class ProgressSocket(Closing):
    """Where other programs get the progress of an import.

    Args:
        volume: UUID of the volume.
        progress: returns the progress, values of JSON.

    Attributes:
        listening: the socket, which is readable when a program has connected; None if the system
            refuses it, as the import goes on without.
    """

    def __init__(self, volume: UUID, progress: Callable[[], Mapping[str, Any]]) -> None:
        self._progress = progress
        self.listening: socket.socket | None = None
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            made.bind(_address(volume))
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            _log.info("import: dlfs top cannot show it: %s", error.strerror)
        else:
            self.listening = made

    def answer(self) -> None:
        """Send the progress to a program that has connected, without waiting for it."""
        assert self.listening is not None
        with suppress(OSError):  # it has gone
            connection, _ = self.listening.accept()
            with connection:
                connection.setblocking(False)
                if _is_trusted(connection):
                    connection.send(json.dumps(self._progress()).encode())

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self.listening is not None:
            self.listening.close()


def read_progress(volume: UUID) -> dict[str, Any] | None:
    """Return the progress of the import by workers into a volume that this host coordinates.

    Returns:
        See ``PartsImport.describe``; None if there is no such import.

    Raises:
        DeviceError: the coordinator does not answer.
        FormatError: what answers is not of this user, nor of root, or not a coordinator.
    """
    action = f"read the progress of the import into volume {volume}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(_address(volume))
        except ConnectionRefusedError:
            return None
        except OSError as error:
            raise DeviceError(f"{action}: {error}", error.errno or 0) from error
        if not _is_trusted(connection):
            raise FormatError(f"{action}: expected a process of this user, got one of another")
        raw = b""
        try:
            while (got := connection.recv(BYTES_MAX)) and len(raw) < BYTES_MAX:
                raw += got
            found = json.loads(raw) if raw else None
        except ConnectionResetError:  # it has ended meanwhile
            return None
        except OSError as error:
            raise DeviceError(f"{action}: {error}", error.errno or 0) from error
        except ValueError as error:
            raise FormatError(f"{action}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{action}: expected an answer, got none")
    return found
