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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlfs._native.certificates import make_certificate
from dlfs.base.closing import closed_on_error
from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    NotFoundError,
    UsageError,
    restore_error,
)

VARIABLE = "DLFS_IMPORT_INVITATION"
"""Environment variable of a worker with its invitation."""
CONNECT_S = 30.0
"""Longest time in which a worker tries to connect, in seconds."""
_SECRET_BYTES = 32
_MAGIC = "dlfs-import"
_ENDED = "dlfs-import-ended"
_NONE = "-"
_TEXT_CHARACTERS_MAX = 2000
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class CannotJoinError(DeviceError):
    """No coordinator answers where the invitation says."""


class ImportEndedError(DeviceError):
    """The import of an invitation has ended.

    Attributes:
        failure: its error; None if it is complete.
    """

    def __init__(self, failure: DlfsError | None) -> None:
        super().__init__("join an import: it has ended", 0)
        self.failure = failure


def boot_id() -> str:
    """Return the ID of this host's running system; empty if it has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Invitation:
    """What a worker needs to join an import.

    Attributes:
        socket_name: name of the abstract UNIX socket on the coordinator's host.
        boot_id: ID of that host's running system.
        host: name or address of that host for workers elsewhere; empty if they cannot join.
        port: its TCP port.
        fingerprint: SHA-256 of its certificate, in hexadecimal digits.
        secret: the secret of the import, in hexadecimal digits.
    """

    socket_name: str
    boot_id: str
    host: str = ""
    port: int = 0
    fingerprint: str = ""
    secret: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """The invitation as text, which ``parse`` reads."""
        words = [_MAGIC, self.socket_name, self.boot_id or _NONE]
        if self.host:
            words += [self.host, str(self.port), self.fingerprint, self.secret]
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation.

        Raises:
            UsageError: the text is none. The message has no part of it.
        """
        words = ["" if word == _NONE else word for word in text.split()]
        if words[:1] == [_MAGIC] and len(words) == 3:
            return cls(words[1], words[2])
        sizes = [2 * hashlib.sha256().digest_size, 2 * _SECRET_BYTES]
        is_long = words[:1] == [_MAGIC] and [len(word) for word in words[5:]] == sizes
        if is_long and words[4].isdecimal() and int(words[4][:6]) < 1 << 16:
            return cls(words[1], words[2], words[3], int(words[4]), words[5], words[6])
        raise UsageError("join an import: expected an invitation as the coordinator wrote it")

    @classmethod
    def read(cls, path: str) -> Invitation:
        """Read an invitation from a file.

        Raises:
            NotFoundError: there is no such file.
            ImportEndedError: the import has ended.
            UsageError: other users can read it, or it is no invitation.
        """
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(4096)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"join an import by {path}: there is no such file; 'dlfs import --join-file' "
                "writes it when the source is listed"
            ) from error
        except OSError as error:
            raise DeviceError(
                f"join an import by {path}: {error.strerror}", error.errno or 0
            ) from error
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"join an import by {path}: expected a file of this user with mode 0600, got "
                f"mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}"
            )
        text = data.decode("utf-8", "replace")
        if text.startswith(f"{_ENDED} "):
            kind, _, reason = text.removeprefix(f"{_ENDED} ").strip().partition(" ")
            raise ImportEndedError(None if kind == _NONE else restore_error(kind, reason))
        return cls.parse(text)

    def write(self, path: str) -> None:
        """Write the invitation to a file of mode 0600, in place of one of an earlier import.

        Raises:
            ExistsError: there is another file.
            DeviceError: it cannot be written.
        """
        _check_replaceable(path)
        _write(path, self.text)

    def end(self, path: str, error: BaseException | None) -> None:
        """Put how the import has ended in place of this invitation, if the file still has it.

        Args:
            path: the file.
            error: error of the import; None if it is complete.
        """
        with suppress(DlfsError, OSError):
            if Invitation.read(path) == self:
                _write(path, _end_text(error))

    def connect(self) -> tuple[socket.socket, ssl.SSLContext | None]:
        """Connect to the coordinator.

        Returns:
            The socket, and the worker's side of TLS, which takes any certificate: the one that was
            received is to be checked by ``check_certificate`` before the secret is sent. None for
            the UNIX socket.

        Raises:
            UsageError: this is another host, from which no worker can join.
            DeviceError: nothing listens there.
        """
        if self.boot_id and self.boot_id == boot_id():
            try:
                return self._connect_here(), None
            except OSError as error:  # ended, or in another network namespace
                if not self.host:
                    raise _failure("the coordinator on this host", error) from error
        if not self.host:
            raise UsageError(
                "join an import: expected a worker on the coordinator's host, as the import takes "
                "no others, got one on another host"
            )
        try:
            made = socket.create_connection((self.host, self.port), CONNECT_S)
        except OSError as error:
            raise _failure(f"{self.host}:{self.port}", error) from error
        return made, _any_certificate()

    def _connect_here(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        with closed_on_error(made):
            made.connect(abstract_address(self.socket_name))
        return made

    def check_certificate(self, certificate: bytes) -> None:
        """Check that the certificate of the other side is the coordinator's.

        Raises:
            UsageError: it is another one.
        """
        if not hmac.compare_digest(_fingerprint(certificate), self.fingerprint):
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


def clear_ended(path: str) -> None:
    """Remove a file that says how an earlier import has ended."""
    with suppress(DlfsError, OSError):
        try:
            Invitation.read(path)
        except ImportEndedError:
            os.unlink(path)


@contextmanager
def ended_in_file(path: str) -> Iterator[None]:
    """Have the file say how an import has ended that ends before it writes an invitation."""
    try:
        yield
    except BaseException as error:
        _end_in_new_file(path, error)
        raise
    _end_in_new_file(path, None)


def _end_in_new_file(path: str, error: BaseException | None) -> None:
    with suppress(DlfsError, OSError):
        if not os.path.lexists(path):
            _write(path, _end_text(error))


def _end_text(error: BaseException | None) -> str:
    """Return what a file says of an import that has ended, with an error or without."""
    if error is None:
        return f"{_ENDED} {_NONE} "
    is_known = isinstance(error, DlfsError)
    kind = type(error).__name__ if is_known else DeviceError.__name__
    text = str(error) if is_known else "the import was interrupted"
    return f"{_ENDED} {kind} {' '.join(text.split())[:_TEXT_CHARACTERS_MAX]}"


def _write(path: str, text: str) -> None:
    """Write a file of mode 0600, in place of the one that is there."""
    made = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(made, flags, 0o600), "w", errors="replace") as file:
            file.write(text + "\n")
        try:
            os.replace(made, path)
        except OSError:
            os.unlink(made)
            raise
    except OSError as error:
        raise DeviceError(
            f"write the invitation {path}: {error.strerror}", error.errno or 0
        ) from error


def _check_replaceable(path: str) -> None:
    """Check that there is no file, or one with an invitation."""
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and not status.st_size:
            return
        Invitation.read(path)
    except (NotFoundError, FileNotFoundError, ImportEndedError):
        return
    except (DlfsError, OSError) as error:
        raise ExistsError(
            f"write the invitation {path}: expected no file, or one of an earlier import, got "
            "another file"
        ) from error


def _failure(where: str, error: OSError) -> DeviceError:
    text = error.strerror or error
    return CannotJoinError(f"join an import: connect to {where}: {text}", error.errno or 0)


def _any_certificate() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    return made


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def abstract_address(name: str) -> str:
    """Return the address of an abstract UNIX socket, unix(7)."""
    return f"\0{name}"
