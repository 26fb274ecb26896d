"""``Invitation``: what a worker needs to join an import, and TLS between the two sides.

A worker on the coordinator's host connects to an abstract UNIX socket, which leaves no file behind;
the kernel says which process and user it is. A worker elsewhere connects by TCP and TLS 1.3: the
coordinator makes a key and a certificate for this import, whose fingerprint the invitation has; and
the invitation has a secret, which the worker sends when it has seen that certificate.

An invitation is the right to write to the volume: it goes by an environment variable or a file of
mode 0600, never by a command line, which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from dlfs._native.certificates import make_certificate
from dlfs.base.closing import closed_on_error
from dlfs.errors import DeviceError, NotFoundError, UsageError

VARIABLE = "DLFS_IMPORT_INVITATION"
"""Environment variable of a worker with its invitation."""
CONNECT_S = 30.0
"""Longest time in which a worker tries to connect, in seconds."""
_SECRET_BYTES = 32
_UNIX, _TCP = "unix", "tcp"


@dataclass(frozen=True)
class Invitation:
    """What a worker needs to join an import.

    Attributes:
        host: name or address of the coordinator's host; the name of an abstract UNIX socket.
        port: its TCP port; 0 for a UNIX socket.
        fingerprint: SHA-256 of its certificate, in hexadecimal digits; empty for a UNIX socket.
        secret: the secret of the import, in hexadecimal digits; empty for a UNIX socket.
    """

    host: str
    port: int = 0
    fingerprint: str = ""
    secret: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """The invitation as text, which ``parse`` reads."""
        if not self.port:
            return f"{_UNIX} {self.host}"
        return f"{_TCP} {self.host} {self.port} {self.fingerprint} {self.secret}"

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation.

        Raises:
            UsageError: the text is none. The message has no part of it.
        """
        kind, *words = text.split()
        if kind == _UNIX and len(words) == 1:
            return cls(words[0])
        sizes = [2 * hashlib.sha256().digest_size, 2 * _SECRET_BYTES]
        is_tcp = kind == _TCP and len(words) == 4 and words[1].isdecimal()
        if is_tcp and int(words[1]) < 1 << 16 and [len(word) for word in words[2:]] == sizes:
            return cls(words[0], int(words[1]), words[2], words[3])
        raise UsageError("join an import: expected an invitation as the coordinator wrote it")

    @classmethod
    def read(cls, path: str) -> Invitation:
        """Read an invitation from a file.

        Raises:
            NotFoundError: there is no such file.
            UsageError: other users can read it, or it is no invitation.
        """
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(4096)
        except FileNotFoundError as error:
            raise NotFoundError(f"read the invitation {path}: there is no such file") from error
        except OSError as error:
            raise DeviceError(
                f"read the invitation {path}: {error.strerror}", error.errno or 0
            ) from error
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"read the invitation {path}: expected a file of this user with mode 0600, got "
                f"mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}"
            )
        return cls.parse(data.decode("utf-8", "replace"))

    def write(self, path: str) -> None:
        """Write the invitation to a new file of mode 0600.

        Raises:
            DeviceError: the file exists, or cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(path, flags, 0o600), "w") as file:
                file.write(self.text + "\n")
        except OSError as error:
            raise DeviceError(
                f"write the invitation {path}: {error.strerror}", error.errno or 0
            ) from error

    def connect(self) -> socket.socket:
        """Connect to the coordinator.

        Raises:
            DeviceError: nothing listens there.
        """
        try:
            if self.port:
                return socket.create_connection((self.host, self.port), CONNECT_S)
            made = socket.socket(socket.AF_UNIX)
            with closed_on_error(made):
                made.connect(_abstract(self.host))
            return made
        except OSError as error:
            where = f"{self.host}:{self.port}" if self.port else self.host
            raise DeviceError(
                f"join an import: connect to {where}: {error.strerror or error}", error.errno or 0
            ) from error

    def context(self) -> ssl.SSLContext | None:
        """Return the worker's side of TLS, which takes any certificate; None for a UNIX socket.

        ``check_certificate`` then checks the one that was received, before the secret is sent.
        """
        if not self.port:
            return None
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        return made

    def check_certificate(self, certificate: bytes) -> None:
        """Check that the certificate of the other side is the coordinator's.

        Raises:
            UsageError: it is another one.
        """
        if self.port and not hmac.compare_digest(_fingerprint(certificate), self.fingerprint):
            raise UsageError(
                f"join an import: expected the coordinator of the invitation at {self.host}:"
                f"{self.port}, got a server with another certificate"
            )


@dataclass(frozen=True)
class Credentials:
    """The coordinator's side of TLS, made for one import.

    Attributes:
        context: TLS with the certificate.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
        secret: the secret that workers send.
    """

    context: ssl.SSLContext
    fingerprint: str
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Credentials:
        """Make a key, a certificate and a secret.

        Raises:
            NativeError: this DLFS was built without OpenSSL.
        """
        certificate, key = make_certificate()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        memory = os.memfd_create("dlfs-certificate", os.MFD_CLOEXEC)  # ssl reads files only
        try:
            os.write(memory, key + certificate)
            context.load_cert_chain(Path(f"/proc/self/fd/{memory}"))
        finally:
            os.close(memory)
        encoded = ssl.PEM_cert_to_DER_cert(certificate.decode())
        return cls(context, _fingerprint(encoded), secrets.token_bytes(_SECRET_BYTES))

    def proves(self, secret: bytes) -> bool:
        """Return True if a worker has sent the secret."""
        return hmac.compare_digest(secret, self.secret)

    def invite(self, host: str, port: int) -> Invitation:
        """Return the invitation to a coordinator at an address."""
        return Invitation(host, port, self.fingerprint, self.secret.hex())


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def _abstract(name: str) -> str:
    """Return the address of an abstract UNIX socket, unix(7)."""
    return f"\0{name}"
