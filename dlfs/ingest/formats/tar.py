"""Imports tar archives: plain, or compressed with gzip, bzip2, xz or zstd.

Every file in the archives is a sample; its path is the member's name. Hard links become samples of
their own; the option ``links`` says what happens to symbolic links. Two members of one name are an
error, because a dataset stores one.

Plain archives are indexed first, header by header. That finds every damaged header, hostile name
and duplicate before anything is written. Then members are read in the order of packing, so that
``shuffled`` is a true shuffle of all of them. The members of each buffer are sorted by position and
read by several threads.

A compressed archive can only be read in order. If one archive is compressed, all are streamed once,
in an order drawn from the seed. Then only the dataset writer shuffles the samples, within its
window, and sizes are unknown beforehand. Links to members that have passed need a second pass. An
import goes on behind the last archive up to which all members were files; if a folder or a link
follows, the earlier archives are read for their names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from dlfs.errors import DeviceError, DlfsError, LimitError, TruncatedError, UsageError
from dlfs.ingest.archives.archive import (
    Absolute,
    AbsoluteOption,
    Archive,
    Compression,
    Member,
    Segment,
    compression_of,
)
from dlfs.ingest.archives.names import MemberNames
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.records import IndexedSamples, Record, Records, ShardSource, gather
from dlfs.ingest.registry import STDIN
from dlfs.ingest.source import (
    STDIN_SHOWN,
    Bytes,
    Int64Array,
    LinkPolicy,
    SampleBlock,
    Uint64Array,
    choose_samples,
)
from dlfs.ingest.standard_input import open_standard_input


@dataclass(frozen=True, slots=True)
class TarOptions:
    """Options of tar archives."""

    links: Annotated[LinkPolicy, "symbolic links: follow, skip, or refuse"] = "follow"
    prefix_shards: Annotated[bool, "begin paths with the archive's name"] = False
    absolute: AbsoluteOption = "error"

    def open(self, paths: Sequence[str]) -> TarSource:
        """Open archives; see ``TarSource``."""
        return TarSource(paths, self)

    def open_described(self, paths: Sequence[str], samples: IndexedSamples) -> TarSource:
        """Open archives of which some members are known; see ``registry.IndexedOptions``."""
        return TarSource(paths, self, samples)


class ArchiveShards(ShardSource):
    """A source of archives that are streamed.

    Args:
        archives: paths of the archives; their names say how they are compressed. ``-`` is standard
            input.
        prefix_shards: begin every path with the archive's name without suffix, as a folder.
        absolute: ``strip`` removes the slashes that begin an absolute name; ``error`` refuses it.

    Raises:
        UsageError: the list is empty, or a name is not an archive's.
    """

    def __init__(self, archives: Sequence[str], *, prefix_shards: bool, absolute: Absolute) -> None:
        super().__init__(archives, noun="an archive")
        if prefix_shards and STDIN in archives:
            raise UsageError(f"import {STDIN_SHOWN}: expected no prefix_shards, for it has no name")
        self.prefixes = [archive_prefix(path) if prefix_shards else b"" for path in archives]
        self._absolute = absolute
        self.compressions = {check_archive(path) for path in archives if path != STDIN}
        self.stdin = open_standard_input(archives)

    def open_shard(self, number: int, bad: BadRecords | None = None) -> Archive:
        """Open an archive; by default its bad members are those of this source."""
        path = self.shards[number]
        stdin = self.stdin if path == STDIN else None
        return Archive(path, stdin, absolute=self._absolute, bad=bad or self.bad)

    def sound_until(self, number: int) -> tuple[type[DlfsError], ...]:
        """Return the errors of an archive; see ``ShardSource``.

        Where a compressed stream is damaged, its checksum may be that of members before.
        """
        is_plain = compression_of(self.shards[number]) == "none"
        return super().sound_until(number) if is_plain else (TruncatedError, DeviceError)

    def cancel(self) -> None:
        """End a wait for standard input; see ``ShardSource``."""
        if self.stdin is not None:
            self.stdin.cancel()

    def close(self) -> None:
        """Free what reading standard input needs; see ``Source.close``."""
        if self.stdin is not None:
            self.stdin.close()


class TarSource(ArchiveShards):
    """The files in some archives.

    Args:
        archives: paths of the archives; standard input has no links.
        options: options of the format.
        described: members of plain archives, which another source has found; None to find them.

    Raises:
        UsageError: the list is empty, a name is not an archive's, or a link leads nowhere.
        NotFoundError: an archive does not exist.
        FormatError: a plain archive is damaged, or has a path twice or a hostile name.
        DeviceError: an archive cannot be read.
    """

    def __init__(
        self,
        archives: Sequence[str | os.PathLike[str]],
        options: TarOptions | None = None,
        described: IndexedSamples | None = None,
    ) -> None:
        options = options or TarOptions()
        super().__init__(
            [os.fspath(path) for path in archives],
            prefix_shards=options.prefix_shards,
            absolute=options.absolute,
        )
        self._names = MemberNames(self.shards, options.links, self.bad)
        self.skipped = self._names.skipped
        self._files: list[bytes] = []
        self._unseen: list[int] = []
        self.described = described
        if self.stdin is None and self.compressions == {"none"}:
            self.index = self._find_members() if described is None else self._take(described)
            self.sample_count = len(self._files)
            self.sample_bytes = int(self.index.sizes.sum())
            self.gives_shuffled = True
            self.empty_directories = self._names.empty_folders(iter(self._files))
        elif self.stdin is not None:
            self.undivided = "it can be read only once, from its beginning"
        else:
            self.undivided = (
                "links and folders of a compressed archive may concern members of another one; "
                "format webdataset reads archives one by one"
            )

    @property
    def shards_are_independent(self) -> bool:  # type: ignore[override]
        """True if no folder or link is known, so that no names need be remembered."""
        return not (self._names.folders or self._names.symbolic or self._names.hard)

    def restore_skipped(self, skipped: Mapping[str, int]) -> None:
        """Take the counts up to a cursor; see ``ShardSource``."""
        self._names.skipped.clear()
        self._names.skipped.update(skipped)

    def streamed(self, order: Uint64Array) -> Iterator[SampleBlock]:
        """Yield the blocks of the archives in an order; see ``ShardSource``."""
        self._unseen = order[: self._first].tolist()
        return super().streamed(order)

    def _see_all(self) -> None:
        """Read the names in the archives before the one at which the import goes on."""
        skipped = Counter(self._names.skipped)
        with self.bad.ignore():  # these and what was skipped count already
            while self._unseen:
                number = self._unseen.pop(0)
                with self.open_shard(number) as archive:
                    for member in self.salvage(number, archive.members()):
                        path = self._names.add(member, number, self.prefixes[number])
                        self._files += filter(None, [path])
        self.restore_skipped(skipped)

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Stream the members of one archive; see ``ShardSource``."""
        return self.gather(number, self._stream(number))

    def read_last(self) -> Iterator[SampleBlock]:
        """Stream what links stand for; see ``ShardSource``."""
        return gather(self._stream_links(), where="import", buffer_bytes=self.buffer_bytes)

    def _stream(self, number: int) -> Records:
        with self.open_shard(number) as archive:
            for member in archive.members():
                if member.kind not in ("file", "special file"):
                    self._see_all()
                path = self._names.add(member, number, self.prefixes[number])
                if path is None:
                    continue
                if self.passes():
                    self._files.append(path)
                    continue
                try:
                    data = archive.read(member)
                except LimitError as error:
                    self.bad.note(archive.path, os.fsdecode(path), error)
                    continue
                self._files.append(path)
                yield Record(path, data)

    def _stream_links(self) -> Records:
        """Stream what links stand for, in a second pass over the archives that have it."""
        wanted: dict[bytes, list[bytes]] = {}
        for alias, target in self._names.aliases(self._files):
            wanted.setdefault(target, []).append(alias)
        for shard in sorted({self._names.shard_of[target] for target in wanted}):
            yield from self.salvage(shard, self._stream_wanted(shard, wanted))
        for target, aliases in wanted.items():
            for alias in aliases:
                self._names.note_without_file(alias, target)
        self.empty_directories = self._names.empty_folders(iter(self._names.shard_of))

    def _stream_wanted(self, shard: int, wanted: dict[bytes, list[bytes]]) -> Records:
        """Stream the members of an archive that links stand for, once for each of these."""
        with self.open_shard(shard, self.bad.unreported()) as archive:
            for member in archive.members():
                aliases = wanted.pop(self.prefixes[shard] + member.path, [])
                if aliases and member.kind == "file":
                    data = archive.read(member)
                    yield from (Record(alias, data) for alias in aliases)

    # ---- plain archives --------------------------------------------------------------------------

    def _find_members(self) -> RangeReader:
        """Find the place of each member, in path order."""
        index = RangeReader(self.shards)
        self._sparse: dict[tuple[int, int], tuple[Segment, ...]] = {}
        found: dict[bytes, tuple[int, int, int]] = {}
        for shard, prefix in enumerate(self.prefixes):
            with self.open_shard(shard) as archive:
                index.states.append(archive.state)
                size_bytes, _ = archive.state
                for member in self.salvage(shard, archive.members()):
                    if any(part.end_bytes > size_bytes for part in member.segments):
                        continue  # the archive ends in it, which the next header will say
                    name = self._names.add(member, shard, prefix)
                    if name is not None:
                        found[name] = self._place(shard, member)
        for alias, target in list(self._names.aliases(list(found))):
            if target in found:
                found[alias] = found[target]
            else:
                self._names.note_without_file(alias, target)
        self._files = sorted(found)
        places = [found.pop(path) for path in self._files]
        self._places = np.array([place[0] for place in places], np.int64)
        self._positions = np.array([place[1] for place in places], np.int64)
        index.sizes = np.array([place[2] for place in places], np.uint64)
        return index

    def _take(self, described: IndexedSamples) -> RangeReader:
        """Take the places of members that another source has found."""
        index = RangeReader(self.shards)
        index.states = list(described.states)
        index.sizes = described.sizes
        self._files = list(described.paths)
        self._places, self._positions = described.places[:, 0], described.places[:, 1]
        self._sparse = {}
        for shard, position, *segment in described.segments.tolist():
            known = self._sparse.get((shard, position), ())
            self._sparse[shard, position] = (*known, Segment(*segment))
        return index

    def describe_samples(self, indices: Uint64Array) -> IndexedSamples | None:
        """Return the places of members; see ``ShardSource``."""
        assert self.index is not None
        shards, positions = self._places[indices], self._positions[indices]
        places = np.stack([shards, positions, np.zeros_like(shards)], axis=1)
        segments = [
            (*place, part.offset_bytes, part.position_bytes, part.length_bytes)
            for place in zip(shards.tolist(), positions.tolist(), strict=True)
            for part in self._sparse.get(place, ())
        ]
        paths = [self._files[index] for index in indices.tolist()]
        table = np.array(segments, np.int64).reshape(-1, 5)
        return IndexedSamples(places, self.index.sizes[indices], table, paths)

    def described_bytes(self) -> Int64Array:
        """Return the bytes of each member in a description; see ``ShardSource``."""
        return np.fromiter(map(len, self._files), np.int64, len(self._files))

    def _place(self, shard: int, member: Member) -> tuple[int, int, int]:
        position = member.segments[0].position_bytes if member.segments else 0
        if sum(segment.length_bytes for segment in member.segments) < member.size_bytes:
            self._sparse[shard, position] = member.segments
        return shard, position, member.size_bytes

    def read_indexed(self, indices: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        """Read members by index, and return them as a block; see ``ShardSource``."""
        assert self.index is not None
        lengths = self.index.sizes[indices].astype(np.int64)
        ranges = np.stack([self._places[indices], self._positions[indices], lengths, offsets])
        if self._sparse:
            ranges = self._split_sparse(ranges, buffer)
        paths = [self._files[i] for i in indices.tolist()]
        are_read = self.read_places(ranges, offsets, buffer, lambda i: os.fsdecode(paths[i]))
        return choose_samples(SampleBlock(paths, buffer, offsets, lengths), are_read)

    def _split_sparse(self, ranges: Int64Array, buffer: Bytes) -> Int64Array:
        """Replace the range of each sparse member by its segments; zero its buffer."""
        plain = np.ones(ranges.shape[1], bool)
        extra: list[tuple[int, int, int, int]] = []
        for i, (shard, position, size, offset) in enumerate(ranges.T.tolist()):
            segments = self._sparse.get((shard, position))
            if segments is None:
                continue
            plain[i] = False
            buffer[offset : offset + size] = 0
            for part in segments:
                target = offset + part.offset_bytes
                extra.append((shard, part.position_bytes, part.length_bytes, target))
        added = np.array(extra, np.int64).reshape(-1, 4).T
        return np.concatenate([ranges[:, plain], added], axis=1)


def check_archive(path: str) -> Compression:
    """Return the compression that an archive's name says.

    Raises:
        UsageError: the name is not an archive's.
    """
    compression = compression_of(path)
    if compression is None:
        raise UsageError(
            f"import {path}: expected the name of an archive (.tar, .tar.gz, .tar.zst)"
        )
    return compression


def archive_prefix(path: str) -> bytes:
    """Return an archive's path prefix: ``train-000000/`` for ``shards/train-000000.tar.gz``."""
    name = os.fsencode(Path(path).name)
    stem = name[: name.lower().rfind(b".t")]
    return stem + b"/"
