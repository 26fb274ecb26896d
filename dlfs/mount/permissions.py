"""Ownership and permissions of the files that a mount shows."""

from __future__ import annotations

from dataclasses import dataclass

FILE_MODE_DEFAULT = 0o444


@dataclass(frozen=True)
class Ownership:
    """Owner, group and permission bits of every sealed file and directory of a mount.

    Attributes:
        uid: user ID of the owner.
        gid: group ID.
        file_mode: permission bits of files; directories also get x where files have r.
    """

    uid: int
    gid: int
    file_mode: int = FILE_MODE_DEFAULT

    @property
    def directory_mode(self) -> int:
        """Permission bits of directories."""
        return self.file_mode | (self.file_mode & 0o444) >> 2
