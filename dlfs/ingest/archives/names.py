"""Collects the paths of the members of archives: files, folders and links; finds duplicates."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from dlfs.errors import DlfsError, FormatError, UsageError
from dlfs.ingest.archives.archive import Member
from dlfs.ingest.archives.links import LinkTree
from dlfs.ingest.bad_records import BadRecords, RecordError
from dlfs.ingest.registry import STDIN
from dlfs.ingest.source import (
    STDIN_SHOWN,
    LinkPolicy,
    check_path,
    keep_link,
    show,
    source_name,
)


class MemberNames:
    """The paths of all files, folders and links in some archives.

    Args:
        archives: paths of the archives.
        links: treatment of symbolic links.
        bad: bad records, to which members that cannot be samples are added.

    Attributes:
        shard_of: number of the archive of each path.
        skipped: number of members left out, by reason.
    """

    def __init__(self, archives: Sequence[str], links: LinkPolicy, bad: BadRecords) -> None:
        self._archives = archives
        self._bad = bad
        self._policy = links
        self.shard_of: dict[bytes, int] = {}
        self.folders: set[bytes] = set()
        self.symbolic: dict[bytes, bytes] = {}
        self.hard: dict[bytes, bytes] = {}
        self.skipped: Counter[str] = Counter()

    def add(self, member: Member, shard: int, prefix: bytes) -> bytes | None:
        """Add a member; return its path if it is a file to import, else None.

        Raises:
            FormatError: the path is there already, or a hard link leads to no earlier member.
            UsageError: the member is a link where links are refused.
            LimitError: the path is too long.
        """
        path = prefix + member.path
        try:
            return self._add(member, path, shard, prefix)
        except RecordError as error:
            self._note(path, shard, error)
            return None

    def note_without_file(self, path: bytes, target: bytes) -> None:
        """Note a link to a member that was left out."""
        error = FormatError(f"expected the member {show(target)}, which was left out")
        self._note(path, self.shard_of.get(path, self.shard_of[target]), error)

    def _note(self, path: bytes, shard: int, error: DlfsError) -> None:
        """Note a bad member; see ``BadRecords.note``."""
        self._bad.note(source_name([self._archives[shard]]), os.fsdecode(path), error)

    def _add(self, member: Member, path: bytes, shard: int, prefix: bytes) -> bytes | None:
        if member.kind == "folder":
            self.folders.add(path.rstrip(b"/"))
            return None
        if member.kind == "special file":
            self.skipped["special file"] += 1
            return None
        if member.kind == "symbolic link":
            where = f"import {self._archives[shard]}: {show(path)}"
            if not keep_link(self._policy, where, self.skipped):
                return None
        if member.kind != "file" and self._archives[shard] == STDIN:
            raise UsageError(
                f"import {STDIN_SHOWN}: expected no links, because it is read once, got the "
                f"{member.kind} {show(path)}; save the archive to a file, or write it with tar's "
                "-h or --hard-dereference"
            )
        self._claim(path, shard)
        if member.kind == "hard link":
            self._add_hard(path, prefix + member.link, shard)
            return None
        if member.kind == "symbolic link":
            self.symbolic[path] = member.link
            return None
        return path

    def aliases(self, files: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield (path, path of the file it stands for) for every link."""
        yield from self.hard.items()
        if not self.symbolic:
            return
        tree = LinkTree([*files, *self.hard], self.folders, self.symbolic)
        for path, target in tree.aliases(lambda link, e: self._note(link, self.shard_of[link], e)):
            try:
                if path not in self.symbolic:
                    self._claim(path, self.shard_of[target])
            except RecordError as error:
                self._note(path, self.shard_of[target], error)
                continue
            yield path, self.hard.get(target, target)

    def empty_folders(self, paths: Iterator[bytes]) -> list[bytes]:
        """Return the folders that are members themselves and have no sample under them."""
        used: set[bytes] = set()
        for path in paths:
            folder = path.rpartition(b"/")[0]
            while folder and folder not in used:
                used.add(folder)
                folder = folder.rpartition(b"/")[0]
        return sorted(self.folders - used - {b""})

    def _claim(self, path: bytes, shard: int) -> None:
        check_path(path, f"import {self._archives[shard]}")
        other = self.shard_of.get(path)
        if other is not None:
            first, second = (source_name([self._archives[i]]) for i in (other, shard))
            both = f"twice in {first}" if other == shard else f"in {first} and in {second}"
            raise FormatError(f"import: expected each path once, got {show(path)} {both}")
        self.shard_of[path] = shard

    def _add_hard(self, path: bytes, target: bytes, shard: int) -> None:
        if target in self.symbolic:
            self.symbolic[path] = self.symbolic[target]
        elif target in self.shard_of:
            self.hard[path] = self.hard.get(target, target)
        else:
            raise FormatError(
                f"import {self._archives[shard]}: {show(path)}: expected a hard link to an earlier "
                f"member, got {show(target)}"
            )
