"""Notifies systemd of the service's state, and takes over a listening socket from systemd.

Without systemd (no ``NOTIFY_SOCKET``, no ``LISTEN_FDS``) the functions do nothing.

Source: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket

from dlfs.errors import UsageError

FIRST_DESCRIPTOR = 3
"""Number of the first descriptor that systemd passes (SD_LISTEN_FDS_START)."""


def notify(state: str) -> None:
    """Send a state to systemd: ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` or ``STATUS=...``.

    Errors are ignored, since the service works without systemd.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    where = "\0" + address[1:] if address[0] == "@" else address
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
    ):
        out.setblocking(False)
        out.sendto(state.encode(), where)


def watchdog_seconds() -> float | None:
    """Return systemd's watchdog timeout in seconds; None without a watchdog."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def listening_socket() -> socket.socket | None:
    """Return the listening socket that systemd passed; None if it passed none.

    Raises:
        UsageError: systemd passed several, or anything but a listening Unix stream socket.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    if count != "1":
        raise UsageError(f"take systemd's socket: expected one (LISTEN_FDS=1), got {count!r}")
    try:
        os.set_inheritable(FIRST_DESCRIPTOR, False)
        found = socket.socket(fileno=FIRST_DESCRIPTOR)
    except OSError as error:
        raise UsageError(f"take systemd's socket: descriptor 3 is none: {error}") from error
    kind = found.family, found.type, found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM, 1):
        found.detach()
        raise UsageError(
            f"take systemd's socket: expected a listening Unix stream socket, got {kind}"
        )
    return found
