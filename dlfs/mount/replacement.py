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
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

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

_STOP, _STOPPED, _DONE = b"stop", b"stopped", b"done"
_MESSAGE_BYTES_MAX = 16
_LOOK_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group

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
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def _receive(link: socket.socket) -> bytes:
    """Receive a message. Returns nothing if the other end is closed."""
    try:
        return link.recv(_MESSAGE_BYTES_MAX)
    except ConnectionError:
        return b""


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
        elif _receive(self._link) == _STOP:
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

        Args:
            is_ending: returns True if this process is to end.

        Returns:
            True if the new keeper has the mount; False if it has failed, or this process is to end.
        """
        assert self._link is not None
        message = b""
        with contextlib.suppress(OSError):
            self._link.sendall(_STOPPED)
            while not is_ending():
                try:
                    message = self._link.recv(_MESSAGE_BYTES_MAX)
                    break
                except TimeoutError:
                    continue
        self._drop()
        return message == _DONE

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
        DeviceError: the keeper does not answer, because it is passing the mount on already.

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
        user = _user_of(self._link)
        if user != os.geteuid():
            raise UsageError(f"{self._action}: user {user} has mounted it; run this as that user")

    def _receive_mount(self) -> tuple[bytes, list[int]]:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._link, STATE_BYTES_MAX, 3)
        except TimeoutError as error:
            raise DeviceError(
                f"{self._action}: its keeper does not answer, or another replacement is under way"
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

        Raises:
            DeviceError: the present keeper has ended, or its server does not.
        """
        self._link.settimeout(STOP_SECONDS)
        try:
            self._link.sendall(_STOP)
            stopped = _receive(self._link) == _STOPPED
        except TimeoutError as error:
            raise DeviceError(f"{self._action}: the present server does not end") from error
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
