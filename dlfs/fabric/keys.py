"""Keys of this host: made, imported and listed in a directory of files, one a key.

A URI names a key, and libdlfs reads the key's file at every connection (``native/src/security``).
Both decode keys: libdlfs lets no key out, and this module checks one before it writes its file,
also where libdlfs was built without OpenSSL.
``key_directory`` is where keys of this user are written: ``$DLFS_KEYS``, or for root
``/etc/dlfs/keys`` and for others ``~/.config/dlfs/keys``. libdlfs also looks into the other one of
these two. The directory has mode 0700 and a file 0600; libdlfs refuses others. A file is written
next to its final name and renamed, so that a connection finds the old key or the new one, and no
part of either.

No function prints a key, and no error contains a part of one.

Source: NVM Express Base Specification 2.1, section 8.3.4.5.8 (DHHC-1); TCP Transport Specification
1.1, section 3.6.1.5 (NVMeTLSkey-1).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import secrets
import stat
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from dlfs._native.handle import Descriptor
from dlfs.block.uri import KEY_NAME_FORM, is_key_name
from dlfs.errors import DlfsError, ExistsError, NotFoundError, UsageError, write_error

SYSTEM_DIRECTORY = Path("/etc/dlfs/keys")
TEXT_BYTES_MAX = 128
_HASH_BYTES = {1: 32, 2: 48, 3: 64}
_CRC_BYTES = 4


class KeyKind(StrEnum):
    """Purposes of keys; the values are the prefixes of the representations."""

    DHCHAP = "DHHC-1"
    TLS = "NVMeTLSkey-1"


@dataclass(frozen=True)
class KeyFile:
    """A file of a key directory.

    Attributes:
        directory: the directory.
        kind: what the key is for; None if the file is not usable.
        bits: length of the key; 0 if the file is not usable.
        problem: why libdlfs would refuse or ignore the file; empty if it would not.
    """

    directory: Path
    name: str
    kind: KeyKind | None
    bits: int
    modified_s: float
    problem: str


def key_directory() -> Path:
    """Return the directory into which keys of this user are written, which need not exist."""
    return key_directories()[-1 if os.geteuid() == 0 else 0]


def key_directories() -> tuple[Path, ...]:
    """Return the directories in which libdlfs looks for a key, in its order; none need exist."""
    chosen = os.environ.get("DLFS_KEYS")
    if chosen:
        return (Path(chosen),)
    return (Path.home() / ".config" / "dlfs" / "keys", SYSTEM_DIRECTORY)


def generate_key(kind: KeyKind = KeyKind.DHCHAP, *, hash_id: int = 1) -> str:
    """Return the representation of a new random key.

    Args:
        kind: what the key is for.
        hash_id: 1, 2 or 3: a key of 32, 48 or 64 bytes, for SHA-256, -384 or -512; for TLS 1 or 2.

    Raises:
        UsageError: there is no such hash for this kind of key.
    """
    if hash_id not in _HASH_BYTES or (kind is KeyKind.TLS and hash_id == 3):
        raise UsageError(f"generate a key: expected a hash 1..{2 + (kind is not KeyKind.TLS)}")
    return _encode(kind, hash_id, secrets.token_bytes(_HASH_BYTES[hash_id]))


def derive_key(text: str, purpose: str) -> str:
    """Return the representation of the key that is derived from another one for a purpose.

    It is HMAC(key, purpose), with the hash whose length is that of the key. It tells nothing of the
    key, or of those for other purposes.

    Args:
        text: the representation of the other key.
        purpose: any text.

    Raises:
        UsageError: the representation is malformed.
    """
    kind, bits = check_key(text)
    _, hash_id, encoded, _ = text.split(":")
    secret = base64.b64decode(encoded)[:-_CRC_BYTES]
    return _encode(kind, int(hash_id), hmac.digest(secret, purpose.encode(), f"sha{bits}"))


def _encode(kind: KeyKind, hash_id: int, secret: bytes) -> str:
    checksum = zlib.crc32(secret).to_bytes(_CRC_BYTES, "little")
    return f"{kind}:{hash_id:02}:{base64.b64encode(secret + checksum).decode()}:"


def check_key(text: str) -> tuple[KeyKind, int]:
    """Return the kind of a representation, and the length of its key in bits.

    Raises:
        UsageError: it is malformed. The message contains no part of it.
    """
    fields = text.split(":")
    kinds = {str(kind): kind for kind in KeyKind}
    if len(fields) != 4 or fields[3] or fields[0] not in kinds:
        raise UsageError("read a key: expected DHHC-1:hh:...: or NVMeTLSkey-1:hh:...:")
    kind = kinds[fields[0]]
    hashes = {"00": 0, "01": 1, "02": 2} | ({"03": 3} if kind is KeyKind.DHCHAP else {})
    if fields[1] not in hashes:
        raise UsageError(f"read a key: expected a hash {', '.join(hashes)} after {kind}:")
    try:
        decoded = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("read a key: expected base64") from None
    if base64.b64encode(decoded).decode() != fields[2]:  # bits that no byte has
        raise UsageError("read a key: expected base64")
    secret, checksum = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
    lengths = (32, 48, 64) if kind is KeyKind.DHCHAP else (32, 48)
    hash_id = hashes[fields[1]]
    if len(secret) not in lengths or (hash_id and len(secret) != _HASH_BYTES[hash_id]):
        raise UsageError("read a key: expected a length that fits its hash")
    if zlib.crc32(secret).to_bytes(_CRC_BYTES, "little") != checksum:
        raise UsageError("read a key: its CRC does not match; it is damaged")
    return kind, 8 * len(secret)


def write_key(name: str, text: str, *, replace: bool = False) -> Path:
    """Write a key into the key directory, which is created if it is missing.

    Args:
        name: name of the key, as URIs give it.
        text: the representation.
        replace: replace a key of that name.

    Returns:
        The path of the file.

    Raises:
        UsageError: the name or the representation is malformed.
        ExistsError: there is such a key, and ``replace`` is False.
        DeviceError: the file cannot be written.
    """
    if not is_key_name(name):
        raise UsageError(f"write a key: expected a name, {KEY_NAME_FORM}, got another text")
    check_key(text)
    folder = key_directory()
    path = folder / name
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Descriptor() as file:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                file.fill(os.open, temporary, flags, 0o600)
                # Without a line feed, which SPDK's key files must not have.
                with open(file.value, "w", encoding="ascii", closefd=False) as stream:
                    stream.write(text)
                os.fsync(file.value)
                _rename(temporary, path, replace=replace)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, DlfsError):
            raise
        raise write_error(
            f"write key {name} to {folder}: {error.strerror}", error.errno or 0
        ) from error
    return path


def _rename(temporary: Path, path: Path, *, replace: bool) -> None:
    if replace:
        temporary.rename(path)
        return
    try:
        path.hardlink_to(temporary)
    except FileExistsError as error:
        raise ExistsError(f"write key {path.name}: {path} exists; --replace rotates it") from error


def read_key(name: str) -> str:
    """Return the representation of a key of the key directory, checked.

    Raises:
        NotFoundError: there is no such key.
        UsageError: the name or the file is malformed. The message contains no part of the key.
        DeviceError: the file cannot be read.
    """
    if not is_key_name(name):
        raise UsageError(f"read a key: expected a name, {KEY_NAME_FORM}, got another text")
    path = key_directory() / name
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(TEXT_BYTES_MAX + 1).rstrip()
    except FileNotFoundError as error:
        raise NotFoundError(f"read key {name}: there is no file {path}") from error
    except OSError as error:
        raise write_error(
            f"read key {name} of {path}: {error.strerror}", error.errno or 0
        ) from error
    except UnicodeDecodeError:
        raise UsageError(f"read key {name}: expected ASCII in {path}") from None
    check_key(text)
    return text


def list_keys() -> list[KeyFile]:
    """Return the files of the key directories, in libdlfs's order of these, by name.

    Raises:
        NotFoundError: there is no such directory.
        DeviceError: a directory cannot be read; those of another user are left out.
    """
    folders = [folder for folder in key_directories() if os.access(folder, os.R_OK | os.X_OK)]
    if not folders:
        raise NotFoundError(
            f"list keys: there is no directory {key_directory()}; 'dlfs key generate' makes it"
        )
    files: dict[str, KeyFile] = {}
    hidden = []
    for folder in folders:
        for file in _list_directory(folder):
            first = files.setdefault(file.name, file)
            if first is not file:
                hidden.append(replace(file, problem=f"{first.directory} has one of that name"))
    return [*files.values(), *hidden]


def _list_directory(folder: Path) -> list[KeyFile]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if is_key_name(entry.name))
        found = folder.stat()
    except OSError as error:
        raise write_error(f"list keys of {folder}: {error.strerror}", error.errno or 0) from error
    problem = _exposure(folder, found, 0o700)
    return [_describe(folder / name, problem) for name in names]


def _exposure(path: Path, found: os.stat_result, mode: int) -> str:
    """Return the command that keeps others from a file or directory; empty if nothing does."""
    if found.st_uid not in (0, os.geteuid()):
        return f"chown {os.geteuid()} {path}"
    return f"chmod {mode:04o} {path}" if found.st_mode & 0o077 else ""


def _describe(path: Path, problem: str) -> KeyFile:
    kind, bits = None, 0
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return KeyFile(path.parent, path.name, None, 0, found.st_mtime, "not a regular file")
        problem = problem or _exposure(path, found, 0o600)
        with path.open(encoding="ascii") as file:
            kind, bits = check_key(file.read(TEXT_BYTES_MAX + 1).rstrip())
    except UsageError as error:
        problem = str(error).removeprefix("read a key: ")
    except (OSError, UnicodeDecodeError):
        return KeyFile(path.parent, path.name, None, 0, 0.0, "cannot be read")
    return KeyFile(path.parent, path.name, kind, bits, found.st_mtime, problem)
