"""A TLS 1.3 server with pre-shared keys in front of a target, by the OpenSSL of this machine.

Python's ``ssl`` has no pre-shared keys for TLS 1.3: ``TlsProxy`` calls libssl through ctypes. It
listens on a port of its own, decrypts what a host sends and forwards it to the target, and encrypts
the answers. Tests change what it knows and does: its keys, silence in the handshake, changed
records, streams that end within a record, and key updates.

``psk_of`` and ``key_text`` derive keys and identities a second time, in Python, from the
specification.

Threads: one that accepts, and one for each connection. Tests change the attributes at any time.

Source: NVM Express TCP Transport Specification 1.1, section 3.6.1; RFC 5869; RFC 8446.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import ctypes.util
import hashlib
import hmac
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

_RECORD_BYTES = 1 << 18
_TLS_1_3 = 0x0304
_SET_MIN_PROTOCOL = 123
_ERROR_WANT_READ = 2
_KEY_UPDATE_REQUESTED = 1
_LOOK_S = 0.05
_FIND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)


def key_text(key: bytes, hash_number: int) -> str:
    """Return the interchange format of a configured key."""
    checked = key + zlib.crc32(key).to_bytes(4, "little")
    return f"NVMeTLSkey-1:{hash_number:02}:{base64.b64encode(checked).decode()}:"


@dataclass(frozen=True)
class Psk:
    """A TLS key and the identity that names it."""

    identity: bytes
    key: bytes
    suite: bytes
    """Number of the cipher suite, two bytes."""


def _expand(digest: str, key: bytes, label: bytes, context: bytes) -> bytes:
    count = hashlib.new(digest).digest_size
    extracted = hmac.new(b"", key, digest).digest()
    info = struct.pack(">HB", count, len(label)) + label + bytes([len(context)]) + context
    return hmac.new(extracted, info + b"\1", digest).digest()


def psk_of(key: bytes, hash_number: int, host_nqn: str, nqn: str, *, version: int) -> Psk:
    """Derive the TLS key of a host and a subsystem from a configured key."""
    digest, suite = ("sha256", 1) if len(key) == 32 else ("sha384", 2)
    retained = _expand(digest, key, b"tls13 HostNQN", host_nqn.encode()) if hash_number else key
    names = f"{host_nqn} {nqn}".encode()
    identity = b"NVMe%dR%02d %s" % (version, suite, names)
    context = identity
    if version == 1:
        check = hmac.new(retained, names + b" NVMe-over-Fabrics", digest).digest()
        encoded = base64.b64encode(check)
        identity, context = identity + b" " + encoded, b"%02d %s" % (suite, encoded)
    secret = _expand(digest, retained, b"tls13 nvme-tls-psk", context)
    return Psk(identity, secret, bytes([0x13, suite]))


def generated_psk(key: bytes, host_nqn: str, nqn: str) -> Psk:
    """Derive the TLS key of a host and a subsystem from one that authentication generated."""
    psk = psk_of(key, 0, host_nqn, nqn, version=1)
    return Psk(psk.identity.replace(b"NVMe1R", b"NVMe1G"), psk.key, psk.suite)


def lacks_openssl() -> str | None:
    """Return why no TLS server can run here, or None."""
    name = ctypes.util.find_library("ssl")
    if name is None or not hasattr(ctypes.CDLL(name), "SSL_CTX_set_psk_find_session_callback"):
        return "no libssl of OpenSSL 1.1.1 or newer"
    return None


def _load() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("ssl"))
    crypto = ctypes.CDLL(ctypes.util.find_library("crypto"))
    pointers = ("TLS_server_method", "SSL_CTX_new", "SSL_new", "SSL_SESSION_new", "SSL_CIPHER_find")
    for name in pointers:
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("BIO_new", "BIO_s_mem"):
        getattr(crypto, name).restype = ctypes.c_void_p
        setattr(library, name, getattr(crypto, name))
    for name in ("BIO_read", "BIO_write", "BIO_ctrl", "ERR_clear_error"):
        setattr(library, name, getattr(crypto, name))
    return library


class _Session:
    """The server's side of one TLS connection, with buffers in memory."""

    def __init__(self, library: Any, context: Any) -> None:
        p = ctypes.c_void_p
        self._c = library
        self._in, self._out = (p(library.BIO_new(p(library.BIO_s_mem()))) for _ in range(2))
        self.ssl = p(library.SSL_new(context))
        library.SSL_set_bio(self.ssl, self._in, self._out)
        library.SSL_set_accept_state(self.ssl)
        self._buffer = ctypes.create_string_buffer(_RECORD_BYTES)

    def close(self) -> None:
        self._c.SSL_free(self.ssl)

    def feed(self, data: bytes) -> None:
        self._c.BIO_write(self._in, data, len(data))

    def output(self) -> bytes:
        found = b""
        while (count := self._c.BIO_read(self._out, self._buffer, _RECORD_BYTES)) > 0:
            found += self._buffer.raw[:count]
        return found

    def handshake(self) -> bool | None:
        """Continue the handshake; returns True if it is complete and None if it failed."""
        self._c.ERR_clear_error()
        result = self._c.SSL_do_handshake(self.ssl)
        if result == 1:
            return True
        return False if self._c.SSL_get_error(self.ssl, result) == _ERROR_WANT_READ else None

    def read(self) -> bytes | None:
        """Return the data that has arrived; None if the host has ended the session."""
        found = b""
        while True:
            self._c.ERR_clear_error()
            count = self._c.SSL_read(self.ssl, self._buffer, _RECORD_BYTES)
            if count > 0:
                found += self._buffer.raw[:count]
            elif found or self._c.SSL_get_error(self.ssl, count) == _ERROR_WANT_READ:
                return found
            else:
                return None

    def write(self, data: bytes) -> None:
        self._c.SSL_write(self.ssl, data, len(data))

    def update_keys(self) -> None:
        self._c.SSL_key_update(self.ssl, _KEY_UPDATE_REQUESTED)

    def shutdown(self) -> None:
        self._c.SSL_shutdown(self.ssl)


class TlsProxy:
    """A port that speaks TLS, in front of a port of 127.0.0.1 that does not.

    Args:
        port: port of the target.
        psks: keys that it knows.
        plain_port: port of the target for connections without TLS; None: they are refused.

    Attributes:
        psks: known keys, for the handshakes to come.
        offered: identities that hosts have offered, in order.
        silent: do not answer handshakes.
        closes: number of handshakes to come that end with the connection, without an alert.
        change: changes the encrypted bytes of one answer; what it returns is sent, and None closes
            the connection.
        updates: number of key updates that were begun.
    """

    def __init__(self, port: int, psks: list[Psk], *, plain_port: int | None = None) -> None:
        self.psks = psks
        self._plain_port = plain_port
        self.offered: list[bytes] = []
        self.silent = False
        self.closes = 0
        self.change: Callable[[bytes], bytes | None] | None = None
        self.update_each = 0
        self.updates = 0
        self.handshakes = 0
        self._target = port
        self._c = _load()
        p = ctypes.c_void_p
        self._context = p(self._c.SSL_CTX_new(p(self._c.TLS_server_method())))
        self._c.SSL_CTX_ctrl(self._context, _SET_MIN_PROTOCOL, ctypes.c_long(_TLS_1_3), None)
        self._callback = _FIND(self._find)
        self._c.SSL_CTX_set_psk_find_session_callback(self._context, self._callback)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def _find(self, ssl: int, identity: int, count: int, out: int) -> int:
        text = ctypes.string_at(identity, count)
        self.offered.append(text)
        for psk in self.psks:
            if psk.identity != text:
                continue
            p = ctypes.c_void_p
            session = p(self._c.SSL_SESSION_new())
            cipher = p(self._c.SSL_CIPHER_find(p(ssl), psk.suite))
            self._c.SSL_SESSION_set_cipher(session, cipher)
            self._c.SSL_SESSION_set_protocol_version(session, _TLS_1_3)
            self._c.SSL_SESSION_set1_master_key(session, psk.key, ctypes.c_size_t(len(psk.key)))
            ctypes.cast(out, ctypes.POINTER(p))[0] = session
            return 1
        return 0

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._c.SSL_CTX_free(self._context)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name="tls-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                host, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, host)

    def _serve(self, host: socket.socket) -> None:
        session = _Session(self._c, self._context)
        host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with host, contextlib.suppress(OSError):
                if self._plain_port is not None and self._is_plain(host):
                    self._forward_plain(host, self._plain_port)
                elif self._handshake(session, host):
                    with socket.create_connection(("127.0.0.1", self._target)) as target:
                        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        self._forward(session, host, target)
        finally:
            session.close()

    def _wait(self, sockets: list[socket.socket]) -> list[socket.socket]:
        """Return the sockets that are readable; none when the proxy stops."""
        while not self._stopping.is_set():
            readable, _, _ = select.select(sockets, [], [], _LOOK_S)
            if readable:
                return readable
        return []

    def _is_plain(self, host: socket.socket) -> bool:
        """Return True if a host begins with anything but a TLS record of a handshake."""
        return bool(self._wait([host])) and host.recv(1, socket.MSG_PEEK) != b"\x16"

    def _forward_plain(self, host: socket.socket, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as target:
            while readable := self._wait([host, target]):
                for source, sink in ((host, target), (target, host)):
                    if source in readable:
                        data = source.recv(_RECORD_BYTES)
                        if not data:
                            return
                        sink.sendall(data)

    def _handshake(self, session: _Session, host: socket.socket) -> bool:
        while self._wait([host]):
            data = host.recv(_RECORD_BYTES)
            if not data:
                return False
            if self.silent:
                continue
            if self.closes > 0:
                self.closes -= 1
                return False
            session.feed(data)
            complete = session.handshake()
            host.sendall(session.output())
            if complete is None:
                return False
            if complete:
                self.handshakes += 1
                return True
        return False

    def _forward(self, session: _Session, host: socket.socket, target: socket.socket) -> None:
        answers = 0
        target.sendall(session.read() or b"")  # what came together with the end of the handshake
        while readable := self._wait([host, target]):
            if host in readable:
                data = host.recv(_RECORD_BYTES)
                session.feed(data)
                plain = session.read()
                if not data or plain is None:
                    return
                target.sendall(plain)
            if target in readable:
                plain = target.recv(_RECORD_BYTES)
                if not plain:
                    session.shutdown()
                    host.sendall(session.output())
                    return
                answers += 1
                if self.update_each and answers % self.update_each == 0:
                    session.update_keys()
                    self.updates += 1
                session.write(plain)
            encrypted = session.output()
            change, self.change = (self.change, None) if encrypted else (None, self.change)
            changed = encrypted if change is None else change(encrypted)
            if changed is None:
                host.sendall(encrypted[: len(encrypted) // 2])
                return
            host.sendall(changed)
