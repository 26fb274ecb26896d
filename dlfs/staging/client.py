"""The client of a staging area's server: makes one request on a connection.

Threads: any, one for each connection.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from dlfs.base.json_records import from_json, to_json
from dlfs.errors import DeviceError, DlfsError, restore_error
from dlfs.format.paths import display
from dlfs.staging.area import PRIVATE, socket_path
from dlfs.staging.protocol import (
    ANSWER_BYTES_MAX,
    SEALED,
    SealAnswer,
    SealOptions,
    SealRequest,
    SealStatus,
    StagedDataset,
)

TIMEOUT_S = 60.0
"""Longest wait for an answer, in seconds; a list walks over all files, and has longer."""
LIST_TIMEOUT_S = 3600.0

ProgressCallback = Callable[[SealStatus], None]


def connect_area(folder: str, what: str) -> socket.socket:
    """Connect to the server of a staging area.

    Args:
        folder: directory of the staging area.
        what: the action, for the message.

    Raises:
        DeviceError: there is no server, or its modes refuse this user.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        private = os.open(os.path.join(folder, PRIVATE), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            made.settimeout(TIMEOUT_S)
            made.connect(socket_path(private))
        finally:
            os.close(private)
    except OSError as error:
        made.close()
        raise DeviceError(
            f"{what}: connect to the server of the staging area {folder}: "
            f"{error.strerror or error}; does its mount run?",
            error.errno or errno.EIO,
        ) from error
    return made


def seal(
    connection: socket.socket, name: bytes, options: SealOptions, progress: ProgressCallback
) -> SealStatus:
    """Seal a dataset, and wait for the end. Closes the connection.

    Raises:
        DlfsError: as ``Sealer.seal``. Unless the message says otherwise, nothing was sealed, and
            the dataset can still be written.
    """
    what = f"seal {display(name)!r}"
    answer = _ask(connection, SealRequest("seal", os.fsdecode(name), options), what, progress)
    assert answer.status.state == SEALED
    return answer.status


def discard(connection: socket.socket, name: bytes) -> None:
    """Delete a dataset that is not sealed, with all its files. Closes the connection.

    Raises:
        DlfsError: as ``Sealer.discard``.
    """
    request = SealRequest("discard", os.fsdecode(name))
    _ask(connection, request, f"discard {display(name)!r}", lambda _: None)


def list_incoming(connection: socket.socket) -> list[StagedDataset]:
    """List the datasets that are not sealed. The server walks over all their files.

    Raises:
        DeviceError: the server cannot read them, or is gone.
    """
    connection.settimeout(LIST_TIMEOUT_S)
    answer = _ask(connection, SealRequest("list"), "list the staged datasets", lambda _: None)
    return list(answer.datasets)


def _ask(
    connection: socket.socket, request: SealRequest, what: str, progress: ProgressCallback
) -> SealAnswer:
    with connection, connection.makefile("rb") as stream:
        try:
            connection.sendall(to_json(request) + b"\n")
            while line := stream.readline(ANSWER_BYTES_MAX):
                answer = from_json(line, SealAnswer)
                if answer.final:
                    _check(answer.status)
                    return answer
                progress(answer.status)
        except TimeoutError as error:
            raise DeviceError(
                f"{what}: no answer; is its server stopped?", errno.ETIMEDOUT
            ) from error
        except OSError as error:
            if isinstance(error, DlfsError):
                raise
            raise DeviceError(f"{what}: {error.strerror}", error.errno or errno.EIO) from error
    raise DeviceError(f"{what}: the mount ended; what was not sealed is in the staging area")


def _check(status: SealStatus) -> None:
    """Raise the error of a request, if it has one."""
    if status.error is not None:
        kind = status.kind or DeviceError.__name__
        raise restore_error(kind, status.error, status.code)
