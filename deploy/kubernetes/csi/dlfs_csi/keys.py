"""The keys of a mount: from the Secret of a volume to the one server that reads them.

``nodePublishSecretRef`` names a Secret whose entries are keys: the name as URIs give it
(``dhchap_key=NAME``), and its text. They are written to a directory of the mount, as files of mode
0400 of the server's user, on a file system in memory; the server finds it by
``CREDENTIALS_DIRECTORY`` and reads a key at every connection. The directory stays as long as the
mount, for servers that are started again, and is gone after a restart of the node. A key is in no
argument, environment variable, record, note or pod; ``Redactor`` keeps it out of messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from dlfs.base.wording import join_words
from dlfs.block.uri import KEY_NAME_FORM, is_key_name
from dlfs.errors import UsageError
from dlfs.fabric.keys import check_key
from dlfs.mount.mountpoint import MOUNTINFO, parse_mountinfo
from dlfs_csi.context import invalid
from dlfs_csi.failures import CallError, Code

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
KEYS_MAX = 64
"""Most keys of one mount."""
_REDACTED = "[key]"


class Redactor(logging.Filter):
    """Removes the keys of the calls under way from messages.

    Threads: any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    @contextlib.contextmanager
    def hiding(self, secrets: Mapping[str, str]) -> Iterator[None]:
        """Remove the values of a Secret, and parts of theirs that are secret, from messages."""
        texts = {part for value in secrets.values() for part in _secret_parts(value)}
        self._count(texts, 1)
        try:
            yield
        finally:
            self._count(texts, -1)

    def _count(self, texts: set[str], change: int) -> None:
        with self._lock:
            for text in texts:
                self._counts[text] = self._counts.get(text, 0) + change
                if not self._counts[text]:
                    del self._counts[text]

    def clean(self, text: str) -> str:
        """Return a text without keys."""
        with self._lock:
            secrets = sorted(self._counts, key=len, reverse=True)
        for secret in secrets:
            text = text.replace(secret, _REDACTED)
        return text

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove keys from a log message."""
        record.msg, record.args = self.clean(record.getMessage()), ()
        return True


def _secret_parts(value: str) -> list[str]:
    """Return what must not be shown of a value of a Secret: the text, and its base64."""
    stripped = value.strip()
    fields = stripped.split(":")
    return [part for part in (stripped, *fields[2:3]) if len(part) > 3]


def check_secrets(secrets: Mapping[str, str]) -> None:
    """Check that the entries of a Secret are keys.

    Raises:
        CallError: INVALID_ARGUMENT: one is not. The message has no part of a value.
    """
    if len(secrets) > KEYS_MAX:
        raise invalid(f"secrets: expected at most {KEYS_MAX} keys, got {len(secrets)}")
    for name, text in sorted(secrets.items()):
        if not is_key_name(name):
            raise invalid(f"secrets: expected names of keys, {KEY_NAME_FORM}, got another name")
        try:
            check_key(text.strip())
        except UsageError as error:
            raise invalid(f"secrets: {name}: {error}") from None


def missing_keys(volumes: tuple[str, ...], secrets: Mapping[str, str]) -> str:
    """Return the names of keys that URIs name and a Secret lacks, for a hint; empty if none."""
    from dlfs.block import NvmeTcpDiscoverUri, NvmeTcpUri, parse_uri, split_members

    named: set[str] = set()
    for member in (member for volume in volumes for member in split_members(volume)):
        uri = parse_uri(member)
        if isinstance(uri, NvmeTcpUri | NvmeTcpDiscoverUri):
            options = uri.options
            named |= {
                options.dhchap_key or "",
                options.dhchap_ctrl_key or "",
                options.tls_psk or "",
            }
    return join_words(sorted(named - set(secrets) - {""}), "and")


class KeyFolders:
    """The directories of the mounts' keys, by the names of the mounts.

    Args:
        folder: their parent, which is made; on a file system in memory.
        uid: the user that servers run as. ``gid`` likewise.

    Threads: any; one at a time for a name.
    """

    def __init__(self, folder: Path, uid: int, gid: int) -> None:
        self._folder = folder
        self._owner = (uid, gid)
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return the directory of a mount, which exists if the mount has keys."""
        return self._folder / name

    def write(self, name: str, secrets: Mapping[str, str]) -> bool:
        """Replace the keys of a mount; those that did not change stay as they are.

        Returns:
            True if the mount has keys.

        Raises:
            CallError: FAILED_PRECONDITION: the directory is not in memory.
            OSError: the directory cannot be written.
        """
        folder = self.path(name)
        if not secrets:
            self.remove(name)
            return False
        kind = file_system_of(self._folder)
        if kind not in MEMORY_FILE_SYSTEMS:
            raise CallError(
                Code.FAILED_PRECONDITION,
                f"keep the keys of a mount: expected {self._folder} on a file system in memory "
                f"(tmpfs), got {kind}",
            )
        folder.mkdir(mode=0o500, exist_ok=True)
        os.chown(folder, *self._owner)
        for key, text in secrets.items():
            self._write_file(folder, key, text.strip())
        for path in folder.iterdir():
            if path.name not in secrets:
                path.unlink()
        return True

    def _write_file(self, folder: Path, name: str, text: str) -> None:
        temporary = folder / f".{name}.new"
        temporary.unlink(missing_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            os.write(file, text.encode())
            os.fchown(file, *self._owner)
        finally:
            os.close(file)
        temporary.rename(folder / name)

    def remove(self, name: str) -> None:
        """Remove the keys of a mount, if it has any."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path(name))

    def names(self) -> list[str]:
        """Return the names of the mounts that have keys."""
        return [path.name for path in self._folder.iterdir()]


def file_system_of(path: Path) -> str:
    """Return the type of the file system that an existing path is on."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for record in parse_mountinfo(MOUNTINFO.read_bytes()):
        if record.device == number:
            return record.file_system_type
    return "unknown"
