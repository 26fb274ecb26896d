"""The client's control connection to the node service: sends requests and receives their answers.

A connection is lost when the service closes it, breaks the protocol, or when nothing comes from it
in time: neither an answer nor ``Pending``. A lost connection stays lost; a new one waits up to its
timeout for a service that is being restarted. A forked child closes its copies of its parent's
connections at once. Otherwise the service would not notice the end of the parent.

Threads: any at once; a lock lets one request at a time use the connection. A signal handler that
interrupts a request cannot make another one: the answers would be mixed up.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import time
from typing import TypeVar

import dlfs
from dlfs._native.handle import Descriptor
from dlfs._native.sockets import OwnedSocket, receive
from dlfs.base.closing import Closing, LiveObjects
from dlfs.base.forks import Lock
from dlfs.errors import DeviceError, FormatError, ServiceLostError, UsageError, VersionError
from dlfs.service.protocol import (
    ANSWERS,
    DESCRIPTORS_MAX,
    HEADER,
    PROTOCOL_VERSION,
    Failure,
    Hello,
    Message,
    Pending,
    Welcome,
    body_bytes,
    decode,
    encode,
    error_of,
)
from dlfs.service.sockets import PATH_BYTES_MAX, SCHEME

TIMEOUT_S = 10.0
"""Default of the longest wait for a service that is not running, and for any message from one that
has a request to answer, in seconds."""

_RETRY_FIRST_S = 0.005
_RETRY_LONGEST_S = 0.1
_NOT_RUNNING = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET, errno.EPIPE)

_Answer = TypeVar("_Answer", bound=Message)


class Descriptors(Closing):
    """File descriptors that came with an answer, closed at the end of a ``with`` statement."""

    def __init__(self) -> None:
        self.owners = [Descriptor() for _ in range(DESCRIPTORS_MAX)]

    def __len__(self) -> int:
        return sum(owner.value >= 0 for owner in self.owners)

    def __getitem__(self, position: int) -> int:
        return self.owners[position].value

    def close(self) -> None:
        """Close them. Idempotent."""
        for owner in self.owners:
            owner.close()


class ControlConnection(Closing):
    """A connection that the service has accepted.

    Args:
        path: path of the service's socket.
        timeout_s: longest time without a message from the service before its answer, in seconds.
        accept_s: longest wait for a service that is not running, in seconds; ``timeout_s`` by
            default, which is also the most.

    Raises:
        ServiceLostError: no service accepts the connection within ``accept_s``.
        DeviceError: the service, or the socket's mode, refuses this user (EACCES).
        VersionError: the service speaks another version of the protocol.
        UsageError: the path is too long.
    """

    def __init__(
        self, path: str, timeout_s: float = TIMEOUT_S, accept_s: float | None = None
    ) -> None:
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise UsageError(f"connect to {path}: expected at most {PATH_BYTES_MAX} bytes")
        self.uri = SCHEME + path
        self._path = path
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._under_way = False
        self._socket: OwnedSocket | None = None
        self.welcome = self._connect(
            time.monotonic() + (timeout_s if accept_s is None else min(accept_s, timeout_s))
        )

    @property
    def is_lost(self) -> bool:
        """Return True if the connection can no longer be used."""
        return self._socket is None

    @property
    def has_ended(self) -> bool:
        """Return True if the service has ended the connection, on which no request is under way."""
        found = self._socket
        if found is None:
            return True
        poll = select.poll()
        try:
            poll.register(found, select.POLLIN)  # nothing comes unasked
        except ValueError:
            return True  # another thread has closed it meanwhile
        return bool(poll.poll(0))

    def request(
        self, message: Message, kind: type[_Answer], count: int = 0
    ) -> tuple[_Answer, Descriptors]:
        """Send a request and return the service's answer with its descriptors.

        Args:
            message: the request.
            kind: expected kind of the answer.
            count: expected number of descriptors.

        Raises:
            ServiceLostError: the connection is lost, now or before.
            UsageError: a signal handler makes it during another request of its thread.
            DlfsError: the service answers with this error.
        """
        frame = encode(message)
        with self._lock:
            if self._under_way and not self.is_lost:
                raise UsageError(
                    f"ask the service at {self.uri}: expected one request at a time, got one of a "
                    "signal handler during another; set a flag in the handler, and ask after it"
                )
            try:
                self._under_way = True
                answer, descriptors = self._exchange(frame)
            except (OSError, FormatError) as error:
                self.close()
                timed_out = isinstance(error, TimeoutError)
                reason = f"nothing came from it within {self._timeout_s:g} s"
                raise self._lost(reason if timed_out else str(error)) from error
            except BaseException:  # Ctrl-C: the answer may come yet, and is none to what follows
                self.close()
                raise
            finally:
                self._under_way = False
        if isinstance(answer, kind) and len(descriptors) == count:
            return answer, descriptors
        with descriptors:
            if isinstance(answer, Failure):
                raise error_of(answer)
            self.close()
            raise self._lost(
                f"expected {kind.__name__} with {count} descriptors, got "
                f"{type(answer).__name__} with {len(descriptors)}"
            )

    def close(self) -> None:
        """Close the connection; the service then releases its resources. Idempotent."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()

    def _lost(self, reason: str) -> ServiceLostError:
        return ServiceLostError(f"ask the service at {self.uri}: {reason}")

    # ---- connecting ------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> Welcome:
        """Connect and send ``Hello``; retry while no service is running."""
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                return self._try_connect(max(deadline - time.monotonic(), wait_s))
            except ServiceLostError:
                if time.monotonic() + wait_s > deadline:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _RETRY_LONGEST_S)

    def _try_connect(self, timeout_s: float) -> Welcome:
        made = OwnedSocket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        made.settimeout(timeout_s)
        self._socket = made
        _open_connections.add(self)
        try:
            made.connect(self._path)
        except OSError as error:
            self.close()
            reason = f"connect to {self.uri}: {error.strerror or error}"
            if error.errno in _NOT_RUNNING or isinstance(error, TimeoutError):
                raise ServiceLostError(f"{reason}; is 'dlfs serve' running?") from error
            if error.errno in (errno.EACCES, errno.EPERM):
                reason += "; 'dlfs serve --allow-user NAME' or --allow-group lets a user in"
            raise DeviceError(reason, error.errno or errno.EIO) from error
        return self._greet()

    def _greet(self) -> Welcome:
        try:
            welcome, _ = self.request(Hello(PROTOCOL_VERSION, dlfs.__version__), Welcome)
        except BaseException:
            self.close()
            raise
        if welcome.protocol != PROTOCOL_VERSION:
            self.close()
            raise VersionError(
                f"connect to {self.uri}: expected protocol {PROTOCOL_VERSION}, "
                f"got {welcome.protocol}"
            )
        return welcome

    # ---- frames ----------------------------------------------------------------------------------

    def _exchange(self, frame: bytes) -> tuple[Message, Descriptors]:
        """Send a request's frame and receive the answer, however many ``Pending`` precede it.

        Raises:
            OSError: the connection ended or failed, or the timeout expired.
            FormatError: the answer is malformed.
        """
        found = self._socket
        if found is None:
            raise ConnectionResetError("the connection is lost")
        found.settimeout(self._timeout_s)
        found.sendall(frame)
        descriptors = Descriptors()
        try:
            while True:
                header = self._receive(found, HEADER.size, descriptors)
                body = self._receive(found, body_bytes(header), descriptors)
                answer = decode(body, ANSWERS)
                if not isinstance(answer, Pending):
                    return answer, descriptors
        except BaseException:
            descriptors.close()
            raise

    def _receive(self, found: socket.socket, count: int, descriptors: Descriptors) -> bytes:
        """Receive ``count`` bytes; add descriptors that arrive with them to ``descriptors``."""
        deadline = time.monotonic() + self._timeout_s
        received = bytearray()
        while len(received) < count:
            memory = bytearray(count - len(received))
            try:
                got = receive(found.fileno(), memory, descriptors.owners)
            except BlockingIOError:
                _await_input(found, deadline)
                continue
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                raise FormatError(
                    f"read a frame: expected at most {DESCRIPTORS_MAX} descriptors"
                ) from error
            if not got:
                raise ConnectionResetError("the service has ended the connection")
            received += memory[:got]
            if time.monotonic() > deadline:
                raise TimeoutError
        return bytes(received)


def _await_input(found: socket.socket, deadline: float) -> None:
    """Wait until a socket has input, or has ended.

    Raises:
        TimeoutError: the deadline has passed.
    """
    poll = select.poll()
    poll.register(found, select.POLLIN)
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not poll.poll(math.ceil(1000 * left_s)):
        raise TimeoutError


_open_connections: LiveObjects[ControlConnection] = LiveObjects()


def _after_fork_in_child() -> None:
    for connection in _open_connections:
        with contextlib.suppress(OSError):
            connection.close()
    _open_connections.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
