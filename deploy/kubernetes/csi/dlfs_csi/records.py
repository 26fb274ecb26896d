"""Records of the published volumes: one small file for each target path.

A record is written before anything is mounted, and removed after everything is gone, so that a
driver that was killed, or a node that was restarted, finds all that there may be. It has no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from dlfs.base.json_records import from_json, to_json
from dlfs.errors import FormatError
from dlfs_csi.context import SERVICE

_SUFFIX = ".json"
_NEW = ".new"
_NAME_DIGITS = 32

_log = logging.getLogger(__name__)


def name_of(target: str) -> str:
    """Return the name of the mount of a target path, for files, the holder, and pods."""
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:_NAME_DIGITS]


@dataclass(frozen=True)
class Record:
    """A volume that is published, or is being published or unpublished, at a target path.

    Attributes:
        target: the target path.
        volume_id: identifier of the volume.
        attributes: its attributes, without those that Kubernetes adds.
        mode: the access mode.
        published: the call that published it has succeeded.
        has_keys: the volume has keys.
        note: the pod, for the log of the node service; empty if it is not known.
    """

    target: str
    volume_id: str
    attributes: dict[str, str] = field(default_factory=dict)
    mode: int = 0
    published: bool = False
    has_keys: bool = False
    note: str = ""

    @property
    def by_service(self) -> bool:
        """True if the volume is shown as a socket of the node service; False: as files."""
        return self.attributes.get("access") == SERVICE

    @property
    def name(self) -> str:
        """Name of the mount."""
        return name_of(self.target)


class Records:
    """The records of a driver.

    Args:
        folder: their directory, which is made.

    Threads: any; one at a time for a target.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[Path] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f"*{_NEW}"):
            left.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def get(self, target: str) -> Record | None:
        """Return the record of a target; None if there is none."""
        return self._read(self._path(name_of(target)))

    def names(self) -> set[str]:
        """Return the names of all mounts that have a record, also one that cannot be read."""
        return {path.stem for path in self._folder.glob(f"*{_SUFFIX}")}

    def _read(self, path: Path) -> Record | None:
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return from_json(text, Record)
        except FormatError as error:
            if path not in self._told:
                self._told.add(path)
                _log.error("%s is no record (%s): its mount is left as it is", path, error)
            return None

    def all(self) -> list[Record]:
        """Return all records."""
        found = (self._read(path) for path in sorted(self._folder.glob(f"*{_SUFFIX}")))
        return [record for record in found if record is not None]

    def count(self) -> int:
        """Return the number of records."""
        return sum(1 for _ in self._folder.glob(f"*{_SUFFIX}"))

    def put(self, record: Record) -> None:
        """Write a record; after a crash there is the old one or this one.

        Raises:
            OSError: the directory cannot be written.
        """
        path = self._path(record.name)
        temporary = path.with_suffix(_NEW)
        try:
            with temporary.open("wb") as file:
                file.write(to_json(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sync()

    def remove(self, target: str) -> None:
        """Remove the record of a target, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._path(name_of(target)).unlink()
            self._sync()

    def _sync(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
