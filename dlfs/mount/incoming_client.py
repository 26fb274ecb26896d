"""Finds the staging area of a mount, and waits for what is sealed there.

``incoming`` in the root of a mount is a symbolic link to the staging area, whose server takes the
requests (``dlfs.staging.client``).

Threads: any.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

from dlfs.errors import UsageError
from dlfs.format.names import INCOMING
from dlfs.format.paths import PathLike
from dlfs.mount.mountpoint import find_dlfs
from dlfs.staging.client import connect_area

SHOWN_SECONDS = 3.0
"""Longest wait for a mount to show a dataset that was sealed, in seconds."""

_POLL_SECONDS = 0.1


def connect_incoming(mountpoint: PathLike, what: str) -> socket.socket:
    """Connect to the server of a mount's staging area, for ``dlfs.staging.client``.

    Args:
        mountpoint: mount point of a mount with ``incoming``.
        what: the action, for the message.

    Raises:
        UsageError: DLFS is not mounted there, or the mount has no ``incoming``.
        DeviceError: the staging area has no server, or its modes refuse this user.
    """
    path, _ = find_dlfs(os.fsdecode(mountpoint), f"{what} at")
    try:
        area = os.readlink(os.path.join(path, INCOMING))
    except OSError as error:
        raise UsageError(f"{what}: {path} is read-only; mount it with --incoming") from error
    return connect_area(area, what)


def await_dataset(mountpoint: PathLike, name: bytes, version: int | None) -> None:
    """Wait until a mount shows a version of a dataset under its name.

    Not long, as another version may take the name meanwhile.
    """
    path = os.path.join(os.fsencode(mountpoint), name)
    deadline = time.monotonic() + SHOWN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if os.path.samefile(path, b"%s@%d" % (path, version or 0)):
                return
        select.select([], [], [], _POLL_SECONDS)
