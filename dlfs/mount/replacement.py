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
admitted at a time; others wait, and are refused with its process ID if it was admitted
``OTHERS_SECONDS`` ago. Both sides check that the other one is a process of the same user. Later
versions must understand these messages: ``PROTOCOL`` stays, and fields are only added.

Any of the processes may be stopped (SIGSTOP), or hang:

- The new keeper gives up as soon as it finds the present one stopped, or after ``STATE_SECONDS`` or
  ``STOP_SECONDS`` without an answer, and closes the connection. The present keeper ignores a STOP
  that it finds on a closed connection, so its server goes on.
- Before STOP, the next new keeper that arrives gets the place of one that is stopped, or whose
  server is, or that was admitted ``PREPARE_SECONDS`` ago. That one finds its connection closed.
- After STOP, programs wait. If the new keeper or its server is stopped for ``STOPPED_SECONDS``, or
  DONE does not come within ``PASS_SECONDS``, the present keeper kills both before it goes on, so
  that no two servers answer.

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
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlfs.base.json_records import from_json, to_json
from dlfs.base.units import KIB
from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.mount.background import MountRequest
from dlfs.mount.kept import DatasetNumbers
from dlfs.mount.mountpoint import find_again, record_of

PROTOCOL = 1

STATE_BYTES_MAX = 128 * KIB
"""Largest description of a mount, in bytes; less than the buffer of a socket."""

STATE_SECONDS = 30.0
"""Longest wait of a new keeper until it is admitted or refused, in seconds."""

OTHERS_SECONDS = 8.0
"""Time after a new keeper was admitted at which others are refused, in seconds."""

PREPARE_SECONDS = 60.0
"""Time after a new keeper was admitted at which the next one gets its place, in seconds."""

STOP_SECONDS = 30.0
"""Longest wait of a new keeper for the end of the present server, in seconds."""

PASS_SECONDS = 60.0
"""Longest wait of the present keeper for DONE, in seconds; more than a new keeper waits for its
server (``keeper.TAKEOVER_SECONDS``)."""

STOPPED_SECONDS = 2.0
"""Time for which a new keeper or its server may be stopped while programs wait, in seconds."""

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


def _user_of(link: socket.socket) -> int:
    """Return the user ID of the process at the other end of a connection."""
    return _credentials_of(link)[1]


def _credentials_of(link: socket.socket) -> tuple[int, int, int]:
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(data)
    return process, user, group


def _is_closed(link: socket.socket) -> bool:
    """Return True if an end of a connection is closed, whatever the other has sent before."""
    if link.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return bool(poll.poll(0))


def _state_of(pid: int) -> str:
    """Return the state of a process as in proc_pid_stat(5); X if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X"
    return text.rpartition(") ")[2][0]


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


class _NewKeeper:
    """A new keeper that the present one has admitted.

    Args:
        link: the connection; the server of the new keeper has its other end open, too.

    Attributes:
        pid: process ID of the new keeper.

    Raises:
        OSError: the new keeper has ended.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid = _credentials_of(link)[0]
        self._admitted_s = time.monotonic()
        self._process = link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        self._servers: list[int] = []  # descriptors of processes

    def age_s(self) -> float:
        """Return the time since it was admitted, in seconds."""
        return time.monotonic() - self._admitted_s

    def is_stopped(self) -> bool:
        """Return True if its process or its server is stopped, or its process has ended."""
        if select.select([self._process], [], [], 0)[0]:
            return True
        return any(_state_of(each) in "TtZX" for each in (self.pid, *_children_of(self.pid)))

    def note_server(self) -> None:
        """Note its server, which ``end`` kills even if the process of the new keeper has ended."""
        for child in _children_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(child)
                if child in _children_of(self.pid):  # otherwise it may be another process
                    self._servers.append(process)
                else:
                    os.close(process)

    def end(self) -> bytes:
        """Kill it and its server. Returns its last message; nothing is killed if there is one.

        It is stopped first, so that it does not answer meanwhile.
        """
        self._signal(self._process, signal.SIGSTOP)
        deadline = time.monotonic() + _KILL_SECONDS
        while _state_of(self.pid) not in "TtZX" and time.monotonic() < deadline:
            select.select([self._process], [], [], _STOPPING_LOOK_SECONDS)
        self.link.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            message = _receive(self.link)
            self._signal(self._process, signal.SIGCONT)
            return message
        _log.error(
            "the new keeper, process %d: it or its server is stopped, or does not answer; killing "
            "both", self.pid
        )  # fmt: skip
        for process in (*self._servers, self._process):
            self._signal(process, signal.SIGKILL)
        self.link.settimeout(_KILL_SECONDS)
        with contextlib.suppress(OSError):  # a thread of the server waits for the next one
            self.link.recv(_MESSAGE_BYTES_MAX)  # returns when both are dead
        return b""

    @staticmethod
    def _signal(process: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    def close(self) -> None:
        """Close the connection, and the descriptors of processes."""
        self.link.close()
        for process in (*self._servers, self._process):
            os.close(process)


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
        """Return the socket to wait for before ``attend`` is called, if any."""
        waits = self._listener if self._new is None else self._new.link
        return [] if waits is None or self.stop_wanted else [waits]

    def take_over(self) -> None:
        """Be the process that others find at the other end of their connections to the socket."""
        if self._listener is not None:
            self._listener.listen()

    def attend(self, state: Callable[[], MountState], kernel: int, numbers: DatasetNumbers) -> None:
        """Admit the next new keeper and send it the mount, or receive a message of the present one.

        Args:
            state: returns the description of the mount.
            kernel: descriptor of ``/dev/fuse``.
            numbers: the numbers of the datasets.
        """
        if self._new is None:
            self._admit(state, kernel, numbers)
        elif _receive(self._new.link) == _STOP and not _is_closed(self._new.link):
            self.stop_wanted = True
        else:
            self._drop()

    def _admit(self, state: Callable[[], MountState], kernel: int, numbers: DatasetNumbers) -> None:
        assert self._listener is not None
        link = self._accept()
        if link is None:
            return
        try:
            self._new = _NewKeeper(link)
        except OSError:  # it has ended
            link.close()
            return
        descriptors = [kernel, numbers.descriptor, self._listener.fileno()]
        try:
            socket.send_fds(link, [to_json(state())], descriptors)
        except OSError as error:
            _log.warning("the mount cannot be passed on: %s", error)
            self._drop()

    def _accept(self) -> socket.socket | None:
        """Accept the connection of the next new keeper, if one of this user has arrived."""
        if self._listener is None:
            return None
        try:
            link, _ = self._listener.accept()
        except OSError:  # none, or it has ended
            return None
        link.settimeout(_LOOK_SECONDS)
        if _user_of(link) == os.geteuid():
            return link
        link.close()
        return None

    def look(self) -> None:
        """Drop the new keeper if another one waits for it in vain, or refuse the others."""
        new, listener = self._new, self._listener
        if new is None or listener is None or not select.select([listener], [], [], 0)[0]:
            return
        if not self.stop_wanted and (new.is_stopped() or new.age_s() > PREPARE_SECONDS):
            _log.warning(
                "the new keeper, process %d: it or its server is stopped, or takes longer than "
                "%.0f s; admitting the next one", new.pid, PREPARE_SECONDS
            )  # fmt: skip
            self._drop()
        elif new.age_s() > OTHERS_SECONDS:
            refusal = to_json(Refusal(new.pid, new.age_s()))
            while (link := self._accept()) is not None:
                with link, contextlib.suppress(OSError):
                    link.sendall(refusal)

    def pass_on(self, is_ending: Callable[[], bool]) -> bool:
        """Say that the server is dead, and wait until the new keeper's server answers.

        Kills both if one is stopped for ``STOPPED_SECONDS``, or if it takes longer than
        ``PASS_SECONDS``.

        Args:
            is_ending: returns True if this process is to end.

        Returns:
            True if the new keeper has the mount; False if it has failed, or this process is to end.
        """
        assert self._new is not None
        new, message = self._new, b""
        new.note_server()
        with contextlib.suppress(OSError):
            new.link.sendall(_STOPPED)
            now_s = running_s = time.monotonic()
            deadline = now_s + PASS_SECONDS
            while not is_ending():
                try:
                    message = new.link.recv(_MESSAGE_BYTES_MAX)
                    break
                except TimeoutError:
                    self.look()
                now_s = time.monotonic()
                if not new.is_stopped():
                    running_s = now_s
                if now_s > deadline or now_s - running_s > STOPPED_SECONDS:
                    message = new.end()
                    break
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
        DeviceError: the keeper is stopped, does not answer within ``STATE_SECONDS``, or has
            admitted another new keeper.
        UsageError: the mount of the keeper is in another mount namespace.

    Threads: one at a time.
    """

    def __init__(self, path: str, device: str) -> None:
        self._action = f"replace the server of {path}"
        self._has_stopped = False
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
        self._await_message(STATE_SECONDS)
        try:
            message, descriptors, _, _ = socket.recv_fds(self._link, STATE_BYTES_MAX, 3)
        except ConnectionError:
            message, descriptors = b"", []
        if message and not descriptors:
            other = from_json(message, Refusal)
            raise DeviceError(
                f"{self._action}: process {other.process} has been replacing it for "
                f"{other.seconds:.0f} s; try again when it has ended, or end it by 'kill "
                f"{other.process}'; {_GOES_ON}"
            )
        if len(descriptors) != 3:
            for descriptor in descriptors:
                os.close(descriptor)
            raise DeviceError(f"{self._action}: its keeper has ended meanwhile")
        return message, descriptors

    def _await_message(self, seconds: float) -> None:
        """Wait until the present keeper has sent something, or has ended.

        Raises:
            DeviceError: it is stopped, or does not answer in time.
        """
        deadline = time.monotonic() + seconds
        while not select.select([self._link], [], [], min(seconds, _LOOK_SECONDS))[0]:
            stopped = self._find_stopped()
            if stopped is not None:
                raise DeviceError(
                    f"{self._action}: its keeper, process {stopped}, is stopped; 'kill -CONT "
                    f"{stopped}' continues it"
                )
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{self._action}: expected an answer of its keeper within {seconds:g} s, got "
                    f"none; {_GOES_ON}"
                )

    def _find_stopped(self) -> int | None:
        """Return the process ID of the present keeper if it is stopped by a signal."""
        with contextlib.suppress(OSError):  # a keeper that called listen() before has ended
            process = self._link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
            try:
                pid = _credentials_of(self._link)[0]
                if _state_of(pid) in "Tt" and not select.select([process], [], [], 0)[0]:
                    return pid
            finally:
                os.close(process)
        return None

    def is_dropped(self) -> bool:
        """Return True if the present keeper has ended, or admits the next one, before ``stop``."""
        return not self._has_stopped and _is_closed(self._link)

    def why_dropped(self) -> str:
        """Return why the present keeper has closed the connection, for a message."""
        if find_again(self.record) is None:
            return "it was unmounted meanwhile"
        return (
            "its keeper has ended, or has admitted another new keeper, since this one or its "
            f"server was stopped or took too long; {_GOES_ON}"
        )

    def stop(self) -> None:
        """Have the present keeper kill its server, and wait until that is dead.

        If that fails, the present keeper goes on.

        Raises:
            DeviceError: the present keeper is stopped or has ended, has admitted another new
                keeper, or its server does not end within ``STOP_SECONDS``.
        """
        try:
            self._link.sendall(_STOP)
            self._await_message(STOP_SECONDS)
            stopped = _receive(self._link) == _STOPPED
        except ConnectionError:
            stopped = False
        except DeviceError:
            self.give_up()
            raise
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
