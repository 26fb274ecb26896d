"""Lets a mount end whose keeper and server were killed together.

The kernel ends a connection when the last descriptor of ``/dev/fuse`` is closed: every request then
fails with ENOTCONN. A server that was killed while it stored samples in the kernel's cache cannot
close its descriptor, because its thread waits for a page, and the page for a request that nobody
answers. A system call for all file systems, such as ``sync``, may then wait as well. While the
keeper lives, the next server answers. The guard is a third process, which does nothing until the
keeper is dead. Then it waits for the server's end, and if the server cannot end, it answers all
requests with ENOTCONN until it has.

The guard is a fork of the keeper and no child of it. It shares the keeper's memory, and holds
nothing but the connection.

Source: Linux, fs/fuse/dev.c (fuse_notify_store, fuse_dev_release).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import struct
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a mount. The keeper passes them to the server; the guard ignores them."""

RESEND = struct.pack("=IiQ", 16, 7, 0)
"""The notification FUSE_NOTIFY_RESEND: length, code, and 0 for the ID of a request."""

_REQUEST_BYTES_MAX = (1 << 20) + (64 << 10)
"""Buffer for a request of the kernel, in bytes: the largest write that libfuse allows, and more."""
_HEADER = struct.Struct("=IIQ")
"""What a request begins with: length, operation, ID."""
_WITHOUT_REPLY = (2, 36, 42)
"""Operations FORGET, INTERRUPT and BATCH_FORGET."""

_LOOK_SECONDS = 0.05
"""Time between two looks at a server whose keeper is dead, in seconds."""

_END, _SERVER = b"e", b"s"
"""Messages of the keeper: the guard is to end; the process of a new server."""


def is_dying(pid: int) -> bool:
    """Return True if the first thread of a process has ended, or its memory is being dumped."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return re.search(r"^(State:\tZ|CoreDumping:\t1)", status, re.MULTILINE) is not None


class Guard:
    """The guard of a mount, as its keeper has it.

    Args:
        kernel: descriptor of ``/dev/fuse``.

    Raises:
        OSError: memory or processes are short.

    Threads: the main thread of a process without others.
    """

    def __init__(self, kernel: int) -> None:
        self._link, there = socket.socketpair()
        self._link.setblocking(False)
        keeper = os.pidfd_open(os.getpid())
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for good in the guard
        try:
            between = os.fork()
            if between == 0:
                _become_guard(there.fileno(), keeper, kernel)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            there.close()
            os.close(keeper)
        os.waitpid(between, 0)

    def watch(self, server: int) -> None:
        """Tell the guard the process ID of the present server, a child of this process."""
        with contextlib.suppress(OSError):  # the guard was killed, or is stopped
            process = os.pidfd_open(server)
            try:
                socket.send_fds(self._link, [_SERVER], [process])
            finally:
                os.close(process)

    def leave(self) -> None:
        """Close this process's end, in a server, which is a fork of the keeper."""
        self._link.close()

    def end(self) -> None:
        """End the guard, since others answer for the mount now."""
        with contextlib.suppress(OSError):
            self._link.send(_END)
        self._link.close()


def _become_guard(link: int, keeper: int, kernel: int) -> None:
    """Run the guard in a grandchild of the keeper. Does not return."""
    try:
        if os.fork() == 0:
            kept = sorted((0, 1, 2, link, keeper, kernel))
            for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(before + 1, after)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):  # the keeper's may be its caller's, who waits for their end
                os.dup2(null, stream)
            os.chdir("/")
            _run(socket.socket(fileno=link), keeper, kernel)
    finally:
        os._exit(0)


def _run(link: socket.socket, keeper: int, kernel: int) -> None:
    server = -1
    links = [link.fileno()]
    while True:
        ready = select.select([*links, keeper], [], [])[0]
        if links and links[0] in ready:
            message, descriptors, _, _ = socket.recv_fds(link, 1, 1)
            if message == _END:
                return
            if message == b"":
                links = []
            if descriptors and server >= 0:
                os.close(server)
            server = descriptors[0] if descriptors else server
        else:
            break
    while server >= 0 and not select.select([server], [], [], _LOOK_SECONDS)[0]:
        if _cannot_end(server):
            _answer_all(kernel)


def _cannot_end(server: int) -> bool:
    """Return True if a server is dead but for a thread."""
    found = re.search(r"^Pid:\t(\d+)$", Path(f"/proc/self/fdinfo/{server}").read_text(), re.M)
    try:
        return found is not None and is_dying(int(found[1]))
    except (FileNotFoundError, ProcessLookupError):
        return False


def _answer_all(kernel: int) -> None:
    """Answer with ENOTCONN all requests that wait, or that the server has taken."""
    os.set_blocking(kernel, False)  # the server's too, which uses it no more
    with contextlib.suppress(OSError):  # unmounted, or none is left
        os.write(kernel, RESEND)
        while True:
            request = os.read(kernel, _REQUEST_BYTES_MAX)
            _, operation, unique = _HEADER.unpack_from(request)
            if operation not in _WITHOUT_REPLY:
                with contextlib.suppress(FileNotFoundError):  # interrupted meanwhile
                    os.write(kernel, struct.pack("=IiQ", 16, -errno.ENOTCONN, unique))
