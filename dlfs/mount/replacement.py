"""Replaces the keeper and the server of a mount: ``dlfs mount --replace``.

The program that replaces them starts a new keeper, a process of its own version. The new keeper
connects to the socket of the present one and receives the mount: the descriptor of ``/dev/fuse``,
the kernel's first request, the volume, the options, and the numbers of the datasets. It starts a
server, which opens the volume and loads the datasets while the present server answers. Then::

    new keeper            present keeper
        STOP  ------------->            kills its server
              <-------------  STOPPED   as soon as the server answers nothing any more
        (the new server answers; the kernel sends again what was left unanswered)
        DONE  ------------->            ends

If the connection ends before DONE, the present keeper starts a server of its own version again. The
new server also has the new keeper's end of the connection open, so it ends when both are dead.

Every wait is bounded, since either keeper may be stopped (SIGSTOP). The new keeper gives up after
``STATE_SECONDS`` or ``STOP_SECONDS`` without an answer, and closes the connection. The present
keeper ignores a STOP that it finds on a closed connection, so its server goes on. If DONE does not
come within ``PASS_SECONDS``, the present keeper kills the new keeper and its server first, so that
no two servers answer.

The socket is a listening one with an abstract address, which contains the device number of the
mount. Keepers pass it on, so the address is never free while the mount is kept. One new keeper is
admitted at a time; others wait. Both sides check that the other one is a process of the same user.
Later versions must understand these messages: ``PROTOCOL`` stays, and fields are only added.

Source: unix(7), SOCK_SEQPACKET, abstract sockets, SCM_RIGHTS and SO_PEERCRED.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.json_records import from_json, to_json
from dlfs.mount.background import MountRequest
from dlfs.mount.kept import DatasetNumbers
from dlfs.units import KIB

PROTOCOL = 1

STATE_BYTES_MAX = 128 * KIB
"""Largest description of a mount, in bytes; less than the buffer of a socket."""

STATE_SECONDS = 60.0
"""Longest wait of a new keeper until it is admitted, in seconds."""

STOP_SECONDS = 30.0
"""Longest wait of a new keeper for the end of the present server, in seconds."""

PASS_SECONDS = 60.0
"""Longest wait of the present keeper for DONE, in seconds; more than a new keeper waits for its
server (``keeper.TAKEOVER_SECONDS``)."""

_KILL_SECONDS = 5.0
"""Longest wait until a new keeper is stopped, or it and its server are killed, in seconds."""

_STOP, _STOPPED, _DONE = b"stop", b"stopped", b"done"
_MESSAGE_BYTES_MAX = 16
_LOOK_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module

_STOPPING_LOOK_SECONDS = 0.01
_GOES_ON = "the present server goes on"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MountState:
    """Description of a mount that its keeper sends to a new keeper.

    Attributes:
        protocol: ``PROTOCOL`` of the present keeper.
        version: version of dlfs of the present keeper.
        request: volume, mount point, options and log of the mount.
        init: the request with which the kernel began, in hexadecimal digits.
    """

    protocol: int
    version: str
    request: MountRequest
    init: str


def dlfs_version() -> str:
    """Return the version of dlfs in this process."""
    return str(sys.modules["dlfs"].__version__)  # an import of dlfs would point up (layers)


def _address(device: str) -> bytes:
    return b"\0dlfs-mount-" + device.encode()


def _user_of(link: socket.socket) -> int:
    """Return the user ID of the process at the other end of a connection."""
    return _credentials_of(link)[1]


def _credentials_of(link: socket.socket) -> tuple[int, int, int]:
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(data)
    return process, user, group


def _is_closed(link: socket.socket) -> bool:
    """Return True if the other end of a connection is closed, whatever it has sent before."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return bool(poll.poll(0))


def _is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal, or has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    return text.rpartition(") ")[2][0] in "TZX"


def _receive(link: socket.socket) -> bytes:
    """Receive a message. Returns nothing if the other end is closed."""
    try:
        return link.recv(_MESSAGE_BYTES_MAX)
    except ConnectionError:
        return b""


def _children_of(pid: int) -> list[int]:
    """Return the children of the first thread of a process; none if it has ended."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


class ReplacementPort:
    """The present keeper's side: admits new keepers, one at a time.

    Args:
        listener: the socket, from the keeper before; None makes one.

    Attributes:
        stop_wanted: the new keeper is prepared, and waits for the end of the server.

    Threads: one at a time.
    """

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._link: socket.socket | None = None
        self.stop_wanted = False

    def open(self, device: str) -> None:
        """Listen for new keepers of the mount of this device number, if its address is free.

        An address is taken until the keeper of an earlier mount has ended. Call again in a while.
        """
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_address(device))
            listener.listen()
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            self._listener = listener

    def sockets(self) -> list[socket.socket]:
        """Return the socket to wait for before ``attend`` is called, if any."""
        waits = self._listener if self._link is None else self._link
        return [] if waits is None or self.stop_wanted else [waits]

    def attend(self, state: Callable[[], MountState], kernel: int, numbers: DatasetNumbers) -> None:
        """Admit the next new keeper and send it the mount, or receive a message of the present one.

        Args:
            state: returns the description of the mount.
            kernel: descriptor of ``/dev/fuse``.
            numbers: the numbers of the datasets.
        """
        if self._link is None:
            self._admit(state, kernel, numbers)
        elif _receive(self._link) == _STOP and not _is_closed(self._link):
            self.stop_wanted = True
        else:
            self._drop()

    def _admit(self, state: Callable[[], MountState], kernel: int, numbers: DatasetNumbers) -> None:
        assert self._listener is not None
        try:
            self._link, _ = self._listener.accept()
        except OSError:  # the new keeper has ended
            return
        self._link.settimeout(_LOOK_SECONDS)
        if _user_of(self._link) != os.geteuid():
            self._drop()
            return
        descriptors = [kernel, numbers.descriptor, self._listener.fileno()]
        try:
            socket.send_fds(self._link, [to_json(state())], descriptors)
        except OSError as error:
            _log.warning("the mount cannot be passed on: %s", error)
            self._drop()

    def pass_on(self, is_ending: Callable[[], bool]) -> bool:
        """Say that the server is dead, and wait until the new keeper's server answers.

        Kills both if that takes longer than ``PASS_SECONDS``.

        Args:
            is_ending: returns True if this process is to end.

        Returns:
            True if the new keeper has the mount; False if it has failed, or this process is to end.
        """
        assert self._link is not None
        message = b""
        with contextlib.suppress(OSError):
            self._link.sendall(_STOPPED)
            deadline = time.monotonic() + PASS_SECONDS
            while not is_ending():
                try:
                    message = self._link.recv(_MESSAGE_BYTES_MAX)
                    break
                except TimeoutError:
                    if time.monotonic() > deadline:
                        deadline = math.inf
                        # If it has ended, its server has the connection open, and may answer.
                        with contextlib.suppress(ProcessLookupError):
                            message = self._end_new_keeper(self._link)
                            break
        self._drop()
        return message == _DONE

    def _end_new_keeper(self, link: socket.socket) -> bytes:
        """Kill the new keeper, which may be stopped, and its server. Returns its last message.

        Nothing is killed if that message was on the way. The new keeper is stopped first, so that
        it neither answers meanwhile nor leaves the number of its server to another process.

        Raises:
            ProcessLookupError: the new keeper has ended.
        """
        pid = _credentials_of(link)[0]
        keeper = link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        try:
            signal.pidfd_send_signal(keeper, signal.SIGSTOP)
            deadline = time.monotonic() + _KILL_SECONDS
            while not _is_stopped(pid) and time.monotonic() < deadline:
                select.select([keeper], [], [], _STOPPING_LOOK_SECONDS)
            link.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                message = _receive(link)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(keeper, signal.SIGCONT)
                return message
            _log.error(
                "the new keeper, process %d: expected its server to answer within %.0f s, got "
                "nothing; killing both", pid, PASS_SECONDS
            )  # fmt: skip
            for server in _children_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
            signal.pidfd_send_signal(keeper, signal.SIGKILL)
            link.settimeout(_KILL_SECONDS)
            with contextlib.suppress(OSError):  # a thread of the server waits for the next one
                link.recv(_MESSAGE_BYTES_MAX)  # returns when both are dead
        finally:
            os.close(keeper)
        return b""

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self.stop_wanted = False

    def close(self) -> None:
        """Close this process's descriptors, in a child that is no keeper."""
        self._drop()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


class Predecessor:
    """The new keeper's side: the present keeper of a mount, and what it has sent.

    When its process ends, the present keeper goes on, unless ``finish`` was called.

    Args:
        path: the mount point.
        device: device number of the mount.

    Attributes:
        state: description of the mount.
        kernel: descriptor of ``/dev/fuse``.
        numbers: the numbers of the datasets.
        listener: the socket on which new keepers of this mount arrive.

    Raises:
        NotFoundError: the mount has no keeper.
        UsageError: another user's process is the keeper.
        DeviceError: the keeper does not answer within ``STATE_SECONDS``, because it is stopped or
            passing the mount on already.

    Threads: one at a time.
    """

    def __init__(self, path: str, device: str) -> None:
        self._action = f"replace the server of {path}"
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(STATE_SECONDS)
        try:
            self._connect(device)
            message, descriptors = self._receive_mount()
        except BaseException:
            self._link.close()
            raise
        self.kernel, numbers, listener = descriptors
        self.numbers = DatasetNumbers(numbers)
        self.listener = socket.socket(fileno=listener)
        self.state = from_json(message, MountState)

    def _connect(self, device: str) -> None:
        try:
            self._link.connect(_address(device))
        except ConnectionRefusedError as error:
            raise NotFoundError(
                f"{self._action}: the mount has no keeper, or it runs in another network "
                "namespace. Only a mount in the background by the native server without io_uring "
                "has one (Linux 6.9 or newer); unmount this one and mount again"
            ) from error
        except BlockingIOError as error:
            raise DeviceError(
                f"{self._action}: expected its keeper to take the connection, got too many others "
                f"that wait for it: it is stopped; {_GOES_ON}"
            ) from error
        user = _user_of(self._link)
        if user != os.geteuid():
            raise UsageError(f"{self._action}: user {user} has mounted it; run this as that user")

    def _receive_mount(self) -> tuple[bytes, list[int]]:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._link, STATE_BYTES_MAX, 3)
        except TimeoutError as error:
            raise DeviceError(
                f"{self._action}: expected an answer of its keeper within {STATE_SECONDS:g} s, got "
                f"none: it is stopped, or another replacement is under way; {_GOES_ON}"
            ) from error
        except ConnectionError:
            message, descriptors = b"", []
        if not message or len(descriptors) != 3:
            for descriptor in descriptors:
                os.close(descriptor)
            raise DeviceError(f"{self._action}: its keeper has ended meanwhile")
        return message, descriptors

    def stop(self) -> None:
        """Have the present keeper kill its server, and wait until that is dead.

        If that fails, the present keeper goes on.

        Raises:
            DeviceError: the present keeper has ended, or its server does not within
                ``STOP_SECONDS``.
        """
        self._link.settimeout(STOP_SECONDS)
        try:
            self._link.sendall(_STOP)
            stopped = _receive(self._link) == _STOPPED
        except TimeoutError as error:
            self.give_up()
            raise DeviceError(
                f"{self._action}: expected the end of the present server within {STOP_SECONDS:g} "
                f"s, got no answer of its keeper, which may be stopped; {_GOES_ON}"
            ) from error
        except ConnectionError:
            stopped = False
        if not stopped:
            raise DeviceError(f"{self._action}: its keeper has ended meanwhile")

    def give_up(self) -> None:
        """Have the present keeper go on, even if a dying server has the connection open."""
        with contextlib.suppress(OSError):  # the present keeper has ended
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def finish(self) -> None:
        """Have the present keeper end, as the new server answers. The descriptors stay open."""
        with contextlib.suppress(OSError):  # it was killed meanwhile
            self._link.sendall(_DONE)
        self._link.close()
