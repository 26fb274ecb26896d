"""The manifest of a spool directory: which objects, and which pieces of large ones, are complete.

The manifest is a text file to which a line of JSON is appended for each complete piece or object.
An object's line is written before its file gets its final name, so a process that is killed loses
at most the requests in flight. A line that was cut off by a kill is removed. Objects are known by a
key: the hash of their URL, size and version, so an object that has changed is a new one.

Threads: any at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from typing import Any

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.base.forks import Lock

_encode = json.JSONEncoder(check_circular=False).encode


def object_key(url: str, size_bytes: int, version: str) -> str:
    """Return the key of one version of an object."""
    text = f"{url}\0{size_bytes}\0{version}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class Manifest:
    """The records of a spool directory.

    Args:
        path: path of the file; it is created if it does not exist.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str) -> None:
        self.objects: dict[str, int] = {}
        """CRC32C of each complete object, by key."""
        self.facts: dict[str, dict[str, Any]] = {}
        """Facts that an import has found in each object that it has read, by key."""
        self.versions: dict[str, tuple[int, str]] = {}
        """Size in bytes, and version, of complete objects of which the listing had neither."""
        self._pieces: dict[str, dict[int, int]] = {}
        self._digests: dict[str, dict[str, str]] = {}
        self._lock = Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = Descriptor()
        self._file.fill(os.open, path, flags, 0o600)
        with closed_on_error(self):
            self._read()

    @property
    def is_empty(self) -> bool:
        """True if nothing is recorded that an import can use."""
        return not self.objects and not self._pieces and not self.facts

    def digests(self, key: str) -> dict[str, str]:
        """Return the digests that came with the complete pieces of an incomplete object."""
        with self._lock:
            return dict(self._digests.get(key, {}))

    def pieces(self, key: str) -> dict[int, int]:
        """Return the complete pieces of an incomplete object: CRC32C by offset in bytes."""
        with self._lock:
            return dict(self._pieces.get(key, {}))

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def append(self, key: str, **record: Any) -> None:
        """Append a record of an object.

        Args:
            key: key of the object.
            record: ``piece``, ``crc32c`` and ``digests`` of a piece whose bytes are in the object's
                file: its offset, and digests of the object; ``dropped`` if the pieces are not what
                the store says, or the copy is deleted; ``facts``, what an import has found in the
                object, values of JSON; or ``crc32c`` and more of an object all of whose bytes are
                there, with ``looked_up`` if its listing had neither ``bytes`` nor ``version``.
        """
        record = {"object": key, **record}
        line = _encode(record).encode() + b"\n"
        with self._lock:
            if os.write(self._file.value, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._take(record)

    def _read(self) -> None:
        position = 0
        with open(self._file.value, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._take(json.loads(line))
        os.ftruncate(self._file.value, position)

    def _take(self, record: dict[str, Any]) -> None:
        key = str(record["object"])
        if "facts" in record:
            self.facts[key] = record["facts"]
            return
        if "piece" in record:
            self._pieces.setdefault(key, {})[int(record["piece"])] = int(record["crc32c"])
            self._digests.setdefault(key, {}).update(record.get("digests", {}))
            return
        self._pieces.pop(key, None)
        self._digests.pop(key, None)
        self.objects.pop(key, None)
        self.versions.pop(key, None)
        if "looked_up" in record:
            self.versions[key] = int(record["bytes"]), str(record["version"])
        if "dropped" not in record:
            self.objects[key] = int(record["crc32c"])
