"""What systemd wants to hear from a service, and the socket that it may hand over: no library.

Without systemd (no ``NOTIFY_SOCKET``, no ``LISTEN_FDS``) all of it does nothing.

Source: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket

from dlfs.errors import UsageError

FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START."""


def notify(state: str) -> None:
    """Tell systemd how we are: ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1``, ``STATUS=...``.

    Nobody needs it to arrive: a socket that cannot be written to is left alone.
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
    """How often ``WATCHDOG=1`` has to be said at least; None: systemd does not ask for it."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def listening_socket() -> socket.socket | None:
    """The socket that systemd listens on for us; None when it does not.

    Raises:
        UsageError: it handed over several, or something else than a listening Unix stream socket.
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
