"""A connection between the coordinator of an import and a worker: frames over a socket.

A message is one frame, or several of at most ``FRAME_BYTES_MAX``: a length of four bytes, little-
endian, and as many bytes. Two bits of the length say that the frame is a piece of a longer message,
and that it is the last piece. A message of one frame may come between two pieces: so a step, which
may have many MiB, does not hold up the requests for time.

Over TCP the frames are in TLS, whose sessions are in memory (``ssl.MemoryBIO``), so that no call
waits. The peer proves nothing by sending bytes: before ``admit`` a message has one short frame, and
nothing is allocated before it has arrived.

Threads: one at a time. Sockets do not block.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from errno import EIO
from typing import Protocol, TypeVar

import msgspec

from dlfs.base.closing import closed_on_error
from dlfs.base.units import GIB, KIB, MIB, format_bytes
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError
from dlfs.ingest.workers.messages import AnyMessage, encode

FRAME_BYTES_MAX = 1 * MIB
"""Most bytes of a frame, without its length."""
MESSAGE_BYTES_MAX = 1 * GIB
"""Most bytes of a message: a step with half a million samples, or the description of a part."""
STRANGER_BYTES_MAX = 4 * KIB
"""Most bytes of a message from a peer that has not proved who it is."""
WAITING_BYTES_MAX = MESSAGE_BYTES_MAX + 64 * MIB
"""Most bytes that wait to be sent to a peer, in addition to what the kernel holds."""

_LENGTH = struct.Struct("<I")
_IS_PIECE = 1 << 31
_IS_LAST = 1 << 30
_READ_BYTES = 256 * KIB

Decoded = TypeVar("Decoded", covariant=True)


class Decoder(Protocol[Decoded]):
    """Decodes messages."""

    def decode(self, data: bytes, /) -> Decoded:
        """Return the message; raises ``msgspec.MsgspecError``."""


class ConnectionEndedError(DeviceError):
    """The other side has ended the connection, or the network has."""


class Connection:
    """One side of a connection.

    Args:
        connected: the connected socket; this object owns it.
        decoder: decodes the messages of the other side.
        context: TLS of a TCP connection; None over a UNIX socket.
        is_server: True on the side that was connected to.

    Attributes:
        is_admitted: True if the other side may send long messages.
    """

    def __init__(
        self,
        connected: socket.socket,
        decoder: Decoder[AnyMessage],
        *,
        context: ssl.SSLContext | None = None,
        is_server: bool = False,
    ) -> None:
        self._socket = connected
        with closed_on_error(self):
            connected.setblocking(False)
            self._decoder = decoder
            self.is_admitted = not is_server
            self._read = bytearray()  # bytes of frames that are not complete
            self._long = bytearray()  # the message that goes on
            self._urgent: deque[bytes] = deque()
            self._waiting: deque[memoryview] = deque()
            self._waiting_bytes = 0
            self._is_amid = False  # the first message that waits was sent in part
            self._sending = bytearray()
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls: ssl.SSLObject | None = None
            self._in_handshake = context is not None
            if context is not None:
                self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
                self._shake_hands()

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 after ``close``."""
        return self._socket.fileno()

    @property
    def socket(self) -> socket.socket:
        """The socket, for what the kernel says of the peer."""
        return self._socket

    @property
    def has_handshaken(self) -> bool:
        """True if the TLS session is complete, or there is none."""
        return not self._in_handshake

    def certificate(self) -> bytes:
        """Return the peer's certificate, as DER; empty without one."""
        return (self._tls and self._tls.getpeercert(binary_form=True)) or b""

    def admit(self) -> None:
        """Allow the other side, which has proved who it is, messages of full length."""
        self.is_admitted = True

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, message: AnyMessage, *, urgent: bool = False) -> None:
        """Have a message sent; ``flush`` sends it as the socket takes it.

        Args:
            message: the message.
            urgent: True to send it before messages that wait, and within a long one.

        Raises:
            LimitError: it is too long, or the other side does not read what was sent to it.
        """
        data = encode(message)
        if len(data) > MESSAGE_BYTES_MAX or self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
            raise LimitError(
                f"send {type(message).__name__}: expected at most "
                f"{format_bytes(MESSAGE_BYTES_MAX)}, and less that waits, got "
                f"{format_bytes(len(data))} behind {format_bytes(self._waiting_bytes)}"
            )
        if urgent and len(data) <= FRAME_BYTES_MAX:
            self._urgent.append(data)
        else:
            self._waiting.append(memoryview(data))
        self._waiting_bytes += len(data)

    @property
    def has_unsent(self) -> bool:
        """True if ``flush`` is to be called when the socket has room."""
        waits = bool(self._urgent or self._waiting) and not self._in_handshake
        return waits or bool(self._sending) or self._outgoing.pending > 0

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            ConnectionEndedError: the connection has ended.
        """
        while True:
            if not self._sending:
                self._fill()
            if not self._sending:
                return
            try:
                sent = self._socket.send(self._sending)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise _ended(error) from error
            del self._sending[:sent]

    def _fill(self) -> None:
        """Take the next bytes to send."""
        if not self._in_handshake:
            frame = self._next_frame()
            if self._tls is not None and frame:
                self._tls.write(frame)
            else:
                self._sending += frame
        self._sending += self._outgoing.read()

    def _next_frame(self) -> bytes:
        """Return the next frame; none if nothing waits."""
        flags, data = 0, memoryview(b"")
        if self._urgent:
            data = memoryview(self._urgent.popleft())
        elif self._waiting:
            whole = self._waiting.popleft()
            data, rest = whole[:FRAME_BYTES_MAX], whole[FRAME_BYTES_MAX:]
            if rest:
                self._waiting.appendleft(rest)
            if rest or self._is_amid:
                flags = _IS_PIECE | (0 if rest else _IS_LAST)
            self._is_amid = bool(rest)
        self._waiting_bytes -= len(data)
        return _LENGTH.pack(len(data) | flags) + data if data else b""

    # ---- receiving -------------------------------------------------------------------------------

    def receive(self) -> list[AnyMessage]:
        """Read what the socket has, up to ``_READ_BYTES``; return the messages that are complete.

        Raises:
            ConnectionEndedError: the connection has ended.
            FormatError: the other side sends what it should not.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise _ended(error) from error
        if not data:
            raise ConnectionEndedError("the connection ended", EIO)
        if self._tls is None:
            self._read += data
        else:
            self._incoming.write(data)
            self._decrypt(self._tls)
        found = []
        while (message := self._next_message()) is not None:
            found.append(message)
        return found

    def _shake_hands(self) -> None:
        try:
            assert self._tls is not None
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise FormatError(f"begin TLS: {error.reason or error}") from error
        self._in_handshake = False

    def _decrypt(self, tls: ssl.SSLObject) -> None:
        if self._in_handshake:
            self._shake_hands()
        try:
            while not self._in_handshake and (plain := tls.read(_READ_BYTES)):
                self._read += plain
        except ssl.SSLWantReadError:
            return
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            raise ConnectionEndedError("the connection ended", EIO) from error
        except ssl.SSLError as error:
            raise FormatError(f"read by TLS: {error.reason or error}") from error

    def _next_message(self) -> AnyMessage | None:
        """Return the next message that is complete; None without."""
        while len(self._read) >= _LENGTH.size:
            (word,) = _LENGTH.unpack_from(self._read)
            size = word & ~(_IS_PIECE | _IS_LAST)
            most = FRAME_BYTES_MAX if self.is_admitted else STRANGER_BYTES_MAX
            if not 1 <= size <= most or (word != size and not self.is_admitted):
                raise FormatError(f"read a frame: expected 1..{most} bytes, got {size}")
            if len(self._read) < _LENGTH.size + size:
                return None
            body = bytes(self._read[_LENGTH.size : _LENGTH.size + size])
            del self._read[: _LENGTH.size + size]
            if word & _IS_PIECE:
                self._long += body
                if len(self._long) > MESSAGE_BYTES_MAX:
                    most_text = format_bytes(MESSAGE_BYTES_MAX)
                    raise FormatError(f"read a message: expected at most {most_text}, got more")
                if not word & _IS_LAST:
                    continue
                body, self._long = bytes(self._long), bytearray()
            return self._decode(body)
        return None

    def _decode(self, body: bytes) -> AnyMessage:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FormatError(f"read a message: {error}") from error

    def close(self) -> None:
        """Close the socket; closing it again does nothing."""
        self._socket.close()


def _ended(error: OSError) -> DlfsError:
    return ConnectionEndedError(
        f"the connection ended: {error.strerror or error}", error.errno or EIO
    )
