"""Imports ZIP archives: every file in them is a sample, whose path is its name in the archive.

The directory at the end of an archive names all members. It is read and checked first, so that
hostile names, duplicates, encrypted members and impossible sizes are found before anything is
written; see ``archives.zip_archive``. Members are then read in the order of packing, so that
``shuffled`` is a true shuffle of all of them; those of one block by their places in the archives,
and by several threads. The CRC of each is checked.

Symbolic links and folders are treated as in tar archives. What macOS adds in a folder ``__MACOSX``
(resource forks, one for each file, with the file's ending) is left out and counted.

Memory: 1 KB for each member, and the blocks. One archive is open at a time.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from dlfs.base.closing import closed_on_error
from dlfs.base.threads import ThreadPool
from dlfs.errors import DeviceError, DlfsError, FormatError, UsageError
from dlfs.ingest.archives.archive import AbsoluteOption
from dlfs.ingest.archives.names import MemberNames
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.archives.zip_archive import ZipArchive
from dlfs.ingest.bad_records import REST, RecordError
from dlfs.ingest.records import IndexedSamples, ShardSource, shard_prefixes
from dlfs.ingest.source import (
    Bytes,
    Int64Array,
    LinkPolicy,
    SampleBlock,
    Uint64Array,
    choose_samples,
)

_MACOS = b"__MACOSX"
_THREADS_MAX = min(8, len(os.sched_getaffinity(0)))
"""Number of threads that unpack members."""
_MEMBERS = 16
"""Number of members that a thread unpacks at once."""


@dataclass(frozen=True, slots=True)
class ZipOptions:
    """Options of ZIP archives."""

    links: Annotated[LinkPolicy, "symbolic links: follow, skip, or refuse"] = "follow"
    prefix_shards: Annotated[bool, "begin paths with the archive's name"] = False
    absolute: AbsoluteOption = "error"
    encoding: Annotated[
        str | None, "encoding of names that are not marked as UTF-8; none: bytes as they are"
    ] = None
    macos: Annotated[Literal["skip", "keep"], "what macOS adds in a folder __MACOSX"] = "skip"

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError as error:
            raise UsageError(
                f"import: expected an encoding such as cp932, got {self.encoding!r}"
            ) from error

    def open(self, paths: Sequence[str]) -> ZipSource:
        """Open archives; see ``ZipSource``."""
        return ZipSource(paths, self)

    def open_described(self, paths: Sequence[str], samples: IndexedSamples) -> ZipSource:
        """Open archives of which some members are known; see ``registry.IndexedOptions``."""
        return ZipSource(paths, self, samples)


class ZipSource(ShardSource):
    """The files in some ZIP archives.

    Args:
        archives: paths of the archives.
        options: options of the format.
        described: members that another source has found; None to find them.

    Raises:
        UsageError: the list is empty, an archive is a folder, or a link leads nowhere.
        NotFoundError: an archive does not exist.
        FormatError: an archive is damaged or encrypted, or has a path twice or a hostile name.
        DeviceError: an archive cannot be read.
    """

    def __init__(
        self,
        archives: Sequence[str],
        options: ZipOptions | None = None,
        described: IndexedSamples | None = None,
    ) -> None:
        super().__init__(archives, noun="a ZIP archive")
        self._options = options = options or ZipOptions()
        names = MemberNames(self.shards, options.links, self.bad)
        self.skipped = names.skipped
        self._archives: dict[int, ZipArchive] = {}
        with closed_on_error(self):
            self.described = described
            self.index = self._find_members(names) if described is None else self._take(described)
        self.sample_count = len(self._files)
        self.sample_bytes = int(self.index.sizes.sum())
        self.gives_shuffled = True
        self.empty_directories = names.empty_folders(iter(self._files))

    def close(self) -> None:
        """Close the archives; see ``Source.close``."""
        for archive in self._archives.values():
            archive.close()

    def _find_members(self, names: MemberNames) -> RangeReader:
        """Find the archive, and the number in it, of each member in path order."""
        found: dict[bytes, tuple[int, int, int]] = {}
        for shard, prefix in enumerate(self._prefixes()):
            try:
                archive = self._archives[shard] = self._open(self.shards[shard])
            except (FormatError, DeviceError) as error:
                self.bad.note(self.shards[shard], REST, error)
                continue
            for number in range(len(archive)):
                try:
                    member = archive.member(number)
                except RecordError as error:
                    self.bad.note(archive.path, f"member {number}", error)
                    continue
                if self._options.macos == "skip" and member.path.split(b"/")[0] == _MACOS:
                    names.skipped["file or folder in __MACOSX"] += 1
                    continue
                path = names.add(member, shard, prefix)
                if path is not None:
                    found[path] = shard, number, member.size_bytes
            archive.release()
        for alias, target in list(names.aliases(list(found))):
            found[alias] = found[target]
        index = RangeReader([archive.path for archive in self._archives.values()])
        index.states += [archive.state for archive in self._archives.values()]
        self._files = sorted(found)
        places = [found.pop(path) for path in self._files]
        self._shards, self._numbers, sizes = np.array(places, np.int64).reshape(-1, 3).T.copy()
        index.sizes = sizes.astype(np.uint64)
        return index

    def _take(self, described: IndexedSamples) -> RangeReader:
        """Take the numbers of members that another source has found."""
        self._archives |= {shard: self._open(path) for shard, path in enumerate(self.shards)}
        index = RangeReader(self.shards)
        index.states = list(described.states)
        index.sizes = described.sizes
        self._files = list(described.paths)
        self._shards, self._numbers, _ = described.places.T.copy()
        counts = np.array([len(archive) for archive in self._archives.values()], np.int64)
        if bool((self._numbers >= counts[self._shards]).any()):
            raise FormatError(f"import {self.name}: expected members that the archives have")
        for shard, number, size in zip(
            self._shards.tolist(), self._numbers.tolist(), index.sizes.tolist(), strict=True
        ):
            if self._archives[shard].member(number).size_bytes != size:
                raise FormatError(f"import {self.shards[shard]}: expected {size} bytes in a member")
        return index

    def describe_samples(self, indices: Uint64Array) -> IndexedSamples | None:
        """Return the numbers of members; see ``ShardSource``."""
        assert self.index is not None
        shards, numbers = self._shards[indices], self._numbers[indices]
        places = np.stack([shards, numbers, np.zeros_like(shards)], axis=1)
        paths = [self._files[index] for index in indices.tolist()]
        return IndexedSamples(places, self.index.sizes[indices], paths=paths)

    def state_of(self, number: int) -> tuple[int, int]:
        """Return the state of an archive; see ``ShardSource``."""
        return self._archives[number].state

    def described_bytes(self) -> Int64Array:
        """Return the bytes of each member in a description; see ``ShardSource``."""
        return np.fromiter(map(len, self._files), np.int64, len(self._files))

    def _open(self, path: str) -> ZipArchive:
        if Path(path).is_dir():
            raise UsageError(f"import {path}: expected a ZIP archive, got a folder")
        return ZipArchive(path, encoding=self._options.encoding, absolute=self._options.absolute)

    def _prefixes(self) -> list[bytes]:
        if not self._options.prefix_shards:
            return [b""] * len(self.shards)
        return [prefix + b"/" for prefix in shard_prefixes(self.shards, [".zip"])]

    def read_indexed(self, indices: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        """Read members by index, and return them as a block; see ``ShardSource``."""
        assert self.index is not None
        lengths = self.index.sizes[indices].astype(np.int64)
        shards, numbers = self._shards[indices].tolist(), self._numbers[indices].tolist()
        wanted = zip(shards, numbers, offsets.tolist(), lengths.tolist(), strict=True)
        places = sorted(
            (shard, self._archives[shard].position(number), number, at, size, place)
            for place, (shard, number, at, size) in enumerate(wanted)
        )
        memory = buffer.data
        paths = [self._files[i] for i in indices.tolist()]
        are_read = [True] * len(paths)

        def read(some: Sequence[tuple[int, ...]]) -> list[tuple[int, DlfsError]]:
            """Read members of one archive; return those that cannot be read."""
            failed: list[tuple[int, DlfsError]] = []
            for shard, _, number, at, size, place in some:
                try:
                    self._archives[shard].read_into(number, memory[at : at + size])
                except (FormatError, DeviceError) as error:
                    failed.append((place, error))
            return failed

        with ThreadPool(_THREADS_MAX, thread_name_prefix="dlfs-unpack") as pool:
            for shard, group in groupby(places, itemgetter(0)):
                members = list(group)
                parts = [members[i : i + _MEMBERS] for i in range(0, len(members), _MEMBERS)]
                for place, error in chain.from_iterable(pool.map(read, parts)):
                    self.bad.note(self.shards[shard], os.fsdecode(paths[place]), error)
                    are_read[place] = False
                self._archives[shard].release()
        return choose_samples(SampleBlock(paths, buffer, offsets, lengths), are_read)
