"""Passes a mount on to a new keeper: ``dlfs mount --replace``.

The program that replaces a server starts a new keeper, a process of its own version, which connects
to the socket of the present one and receives the mount: the descriptor of ``/dev/fuse``, the
kernel's first request, the volume, the options, and the numbers of the datasets. It starts a
server, which opens the volume and loads the datasets while the present server answers. Then::

    new keeper              present keeper
        STOP      ------------->          kills its server
                  <-------------  STOPPED   as soon as the server answers nothing any more
        (the new server answers; the kernel sends again what was left unanswered)
        DONE      ------------->          ends

One new keeper is admitted at a time; others are refused with its process ID. If the connection ends
before DONE, or DONE does not come within ``PASS_SECONDS`` of STOPPED, the present keeper goes on
with a server of its own, and before that it kills the new keeper's process group, which has its
server, so that no two servers answer. A new keeper that has not sent STOP within
``PREPARE_SECONDS`` has lost its place. It gives up itself if the present keeper does not answer
within ``ANSWER_SECONDS``. A STOP that the present keeper finds on a closed connection is ignored,
so its server goes on.

The socket is a listening one with an abstract address, which contains the device number of the
mount. Keepers pass it on, so the address is never free while the mount is kept. Both sides check
that the other one is a process of the same user. Later versions must understand these messages:
``PROTOCOL`` stays, and fields are only added.

Source: unix(7), SOCK_SEQPACKET, abstract sockets, SCM_RIGHTS and SO_PEERCRED, which for a listening
socket names the process that called listen() last.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlfs.base.json_records import from_json, to_json
from dlfs.base.units import KIB
from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.mount.descriptors import close_all, peer_of, receive
from dlfs.mount.mountpoint import find_again, record_of
from dlfs.mount.supervise.background import MountRequest
from dlfs.mount.supervise.inherited import DatasetNumbers
from dlfs.mount.supervise.processes import is_stopped

PROTOCOL = 3

STATE_BYTES_MAX = 128 * KIB
"""Largest description of a mount, in bytes; less than the buffer of a socket."""

ANSWER_SECONDS = 10.0
"""Longest wait of a new keeper for an answer of the present one, in seconds."""

PREPARE_SECONDS = 60.0
"""Longest time from the admission of a new keeper until it sends STOP, in seconds."""

PASS_SECONDS = 10.0
"""Longest wait of the present keeper for DONE, in seconds; programs wait as long."""

_KILL_SECONDS = 5.0
"""Longest wait for the end of a new keeper and its server that were killed, in seconds."""

_STOP, _STOPPED, _DONE = b"stop", b"stopped", b"done"
_MESSAGE_BYTES_MAX = 32
_LOOK_SECONDS = 0.25
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_GOES_ON = "the present server goes on"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """Answer of a keeper to a new keeper that it does not admit, since it has admitted another one.

    Attributes:
        process: process ID of the other one.
        seconds: time since the other one was admitted, in seconds.
    """

    process: int
    seconds: float


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


def _is_closed(link: socket.socket) -> bool:
    """Return True if an end of a connection is closed, whatever the other has sent before."""
    if link.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return bool(poll.poll(0))


def _receive(link: socket.socket) -> bytes:
    """Receive a message. Returns nothing if the other end is closed."""
    try:
        return link.recv(_MESSAGE_BYTES_MAX)
    except ConnectionError:
        return b""


class _NewKeeper:
    """A new keeper that the present one has admitted.

    Args:
        link: the connection; the server of the new keeper has its other end open, too.

    Attributes:
        pid: its process ID.
        process: descriptor of its process.

    Raises:
        OSError: the new keeper has ended.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid = peer_of(link)[0]
        self._admitted_s = time.monotonic()
        self.process = link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)

    def age_s(self) -> float:
        """Return the time since it was admitted, in seconds."""
        return time.monotonic() - self._admitted_s

    def kill(self) -> None:
        """Kill it and its server, and wait until both are dead."""
        if not _is_closed(self.link):  # one of them has its end open, so the group is theirs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.link.settimeout(_KILL_SECONDS)
        with contextlib.suppress(OSError):
            while _receive(self.link):
                pass

    def close(self) -> None:
        """Close the connection, and the descriptor of its process."""
        self.link.close()
        os.close(self.process)


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
        self._new: _NewKeeper | None = None
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
        """Return the sockets to wait for before ``attend`` is called."""
        found = [] if self._listener is None else [self._listener]
        return found if self._new is None or self.stop_wanted else [*found, self._new.link]

    def take_over(self) -> None:
        """Be the process that others find at the other end of their connections to the socket."""
        if self._listener is not None:
            self._listener.listen()

    def attend(self, state: Callable[[], MountState], kernel: int, numbers: DatasetNumbers) -> None:
        """Admit a new keeper or refuse it, receive a message, or end an admission that is too old.

        Args:
            state: returns the description of the mount.
            kernel: descriptor of ``/dev/fuse``.
            numbers: the numbers of the datasets.
        """
        new = self._new
        if new is not None and not self.stop_wanted:
            if select.select([new.link], [], [], 0)[0]:
                self.stop_wanted = _receive(new.link) == _STOP and not _is_closed(new.link)
                if not self.stop_wanted:
                    self._drop()
            elif new.age_s() > PREPARE_SECONDS:
                _log.warning("the new keeper, process %d, takes too long: dropping it", new.pid)
                self._drop()
        if self._new is not None:
            self._refuse_another(self._new)
        elif (link := self._accept()) is not None:
            self._admit(link, to_json(state()), kernel, numbers)

    def _accept(self) -> socket.socket | None:
        """Accept the connection of the next new keeper, if one of this user has arrived."""
        if self._listener is None:
            return None
        try:
            link, _ = self._listener.accept()
        except OSError:  # none, or it has ended
            return None
        link.settimeout(_LOOK_SECONDS)
        if peer_of(link)[1] == os.geteuid():
            return link
        link.close()
        return None

    def _refuse_another(self, admitted: _NewKeeper) -> None:
        link = self._accept()
        if link is not None:
            with link, contextlib.suppress(OSError):
                link.sendall(to_json(Refusal(admitted.pid, admitted.age_s())))

    def _admit(
        self, link: socket.socket, state: bytes, kernel: int, numbers: DatasetNumbers
    ) -> None:
        assert self._listener is not None
        try:
            self._new = _NewKeeper(link)
            socket.send_fds(link, [state], [kernel, numbers.descriptor, self._listener.fileno()])
        except OSError as error:  # it has ended
            _log.warning("the mount cannot be passed on: %s", error)
            link.close()
            self._drop()

    def pass_on(self, is_ending: Callable[[], bool]) -> bool:
        """Say that the server is dead, and wait until the new keeper's server answers.

        Args:
            is_ending: returns True if this process is to end.

        Returns:
            True if the new keeper has the mount. Otherwise its server is dead.
        """
        assert self._new is not None
        new = self._new
        message: bytes | None = None  # empty once the new keeper has given up
        deadline = time.monotonic() + PASS_SECONDS
        with contextlib.suppress(OSError):
            new.link.sendall(_STOPPED)
            waits: list[Any] = [new.link, new.process]
            while not is_ending() and time.monotonic() < deadline:
                found = select.select(waits, [], [], _LOOK_SECONDS)[0]
                self._refuse_another(new)
                if new.link in found:
                    message = _receive(new.link)
                if found:
                    break
        if message is None:
            _log.error("the new keeper, process %d, or its server fails: killing both", new.pid)
            new.kill()
        self._drop()
        return message == _DONE

    def _drop(self) -> None:
        new, self._new = self._new, None
        if new is not None:
            new.close()
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
        record: the mount.
        kernel: descriptor of ``/dev/fuse``.
        numbers: the numbers of the datasets.
        listener: the socket on which new keepers of this mount arrive.

    Raises:
        NotFoundError: the mount has no keeper.
        UsageError: another user's process is the keeper.
        DeviceError: the keeper does not answer within ``ANSWER_SECONDS``, or has admitted another
            new keeper.
        UsageError: the mount of the keeper is in another mount namespace.

    Threads: one at a time.
    """

    def __init__(self, path: str, device: str) -> None:
        self._action = f"replace the server of {path}"
        self._has_stopped = False
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(ANSWER_SECONDS)
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
        directory = self.state.request.directory
        record = record_of(directory)
        if record is None or record.device != device:
            self._link.close()
            raise UsageError(
                f"{self._action}: expected it on {directory}, where it was mounted, in this mount "
                "namespace"
            )
        self.record = record

    def _connect(self, device: str) -> None:
        try:
            self._link.connect(_address(device))
        except ConnectionRefusedError as error:
            raise NotFoundError(
                f"{self._action}: the mount has no keeper, or it runs in another network "
                "namespace, or a holder has it. Only a mount in the background by the native "
                "server without io_uring has one (Linux 6.9 or newer); unmount this one and mount "
                "again"
            ) from error
        except (BlockingIOError, TimeoutError) as error:
            raise DeviceError(
                f"{self._action}: expected its keeper to take the connection, got too many others "
                f"that wait for it; {_GOES_ON}"
            ) from error
        user = peer_of(self._link)[1]
        if user != os.geteuid():
            raise UsageError(f"{self._action}: user {user} has mounted it; run this as that user")

    def _receive_mount(self) -> tuple[bytes, list[int]]:
        try:
            message, descriptors = receive(self._link, STATE_BYTES_MAX, 3)
        except ConnectionError:
            message, descriptors = b"", []
        except TimeoutError as error:
            raise self._unanswered() from error
        if message and not descriptors:
            other = from_json(message, Refusal)
            raise DeviceError(
                f"{self._action}: process {other.process} has been replacing it for "
                f"{other.seconds:.0f} s; try again when it has ended, or end it by 'kill "
                f"{other.process}'; {_GOES_ON}"
            )
        if len(descriptors) != 3:
            close_all(descriptors)
            raise DeviceError(f"{self._action}: its keeper has ended meanwhile")
        return message, descriptors

    def _unanswered(self) -> DeviceError:
        """Return the error of a keeper that does not answer in time."""
        pid = peer_of(self._link)[0]
        why = f": it is stopped; 'kill -CONT {pid}' continues it" if is_stopped(pid) else ""
        return DeviceError(
            f"{self._action}: expected an answer of its keeper, process {pid}, within "
            f"{ANSWER_SECONDS:g} s, got none{why}; {_GOES_ON}"
        )

    def is_dropped(self) -> bool:
        """Return True if the present keeper has ended, or has dropped this one, before ``stop``."""
        return not self._has_stopped and _is_closed(self._link)

    def why_dropped(self) -> str:
        """Return why the present keeper has closed the connection, for a message."""
        if find_again(self.record) is None:
            return "it was unmounted meanwhile"
        late = f"this one took longer than {PREPARE_SECONDS:g} s"
        return f"its keeper has ended, or {late}; {_GOES_ON}"

    def stop(self) -> None:
        """Have the present keeper kill its server, and wait until that is dead.

        If that fails, the present keeper goes on.

        Raises:
            DeviceError: the present keeper has ended or has dropped this one, or its server does
                not end within ``ANSWER_SECONDS``.
        """
        try:
            self._link.sendall(_STOP)
            stopped = _receive(self._link) == _STOPPED
        except ConnectionError:
            stopped = False
        except TimeoutError as error:
            self.give_up()
            raise self._unanswered() from error
        if not stopped:
            raise DeviceError(f"{self._action}: {self.why_dropped()}")
        self._has_stopped = True

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
