"""Whom the files of a mount belong to, and who may read them."""

from __future__ import annotations

from dataclasses import dataclass

FILE_MODE_DEFAULT = 0o444


@dataclass(frozen=True)
class Access:
    """Whom the files belong to, and who may read them.

    Attributes:
        uid: of every file and directory.
        gid: of every file and directory.
        file_mode: permission bits of files; directories also get x where they have r.
    """

    uid: int
    gid: int
    file_mode: int = FILE_MODE_DEFAULT

    @property
    def directory_mode(self) -> int:
        """Permission bits of directories."""
        return self.file_mode | (self.file_mode & 0o444) >> 2
