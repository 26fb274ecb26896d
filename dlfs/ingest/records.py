"""Shared parts of the record formats: reads shards in turn, and gathers records into blocks.

A record format stores many samples in one file, a shard. If its records have no names, a sample's
path is ``SHARD/NUMBER``: the shard's file name without its suffix, and the record's number in it,
from 0, with leading zeros to eight digits. So the paths of a shard do not depend on the other
shards of the import. Two shards of one name are an error.

If a source has an index of its samples, they are read in the order of packing. A ``PartSource``
reads runs of neighbouring samples, its parts, in an order drawn from the seed; the dataset writer
shuffles them within its window. Other shards are streamed: in the given order for layout ``path``,
and in an order drawn from the seed for ``shuffled``. There the dataset writer shuffles them, too.
Records are gathered into blocks of at most ``BUFFER_BYTES``, or of one larger record. A thread
makes the next block while the present one is packed, so that at most three exist.

An import that goes on passes over the samples that it has. With an index it goes on at their number
in the order of packing. A source of parts goes on behind the last parts that made a block, and a
source of shards behind the last whole shard if ``shards_are_independent``. Otherwise each format
says what it need not read, or gives cursors.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, dropwhile, starmap
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dlfs.base.arguments import Layout
from dlfs.base.closing import Closable
from dlfs.base.units import KIB
from dlfs.errors import DeviceError, DlfsError, FormatError, UsageError
from dlfs.format.journal import Cursor
from dlfs.ingest.archives.ranges import RangeReader
from dlfs.ingest.bad_records import BadRecords, RecordError, current
from dlfs.ingest.order import (
    PartSize,
    indexed_blocks,
    packing_order,
    part_ends,
    position_after,
    take_block,
)
from dlfs.ingest.registry import Format, find_format
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    BUFFER_BYTES,
    Bytes,
    Int64Array,
    PassingSource,
    SampleBlock,
    Uint64Array,
    check_path,
    check_unchanged,
    clean_path,
    show,
    source_name,
    stream_ahead,
)

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Closable)

PART_BYTES = 256 * KIB
"""Bytes of a part, unless the source stores more together; a window of the writer has 1024."""

OPEN_FILES_MAX = 32
"""Most files that are open at once; of more, the parts of one file follow each other."""

Value = int | float | bool | str | np.generic
"""Value of one attribute of one sample; numpy's are of reserved columns."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a stream."""

    path: bytes
    data: bytes | memoryview
    attributes: Mapping[str, Value] = field(default_factory=dict)


Records = Generator[Record, None, None]
"""The samples of a stream, which has its file open until it ends or is closed."""


@dataclass(frozen=True, slots=True)
class IndexedSamples:
    """Samples of an index, which another source of the same files can read.

    Attributes:
        places: ``int64[n, 3]``: number of the file of each sample, and two numbers of its place in
            it, by the format.
        sizes: ``uint64[n]``, bytes that each sample takes in a buffer.
        segments: ``int64[m, 5]``: segments of samples that are not stored in one: number of the
            file, position of the sample in it, and offset in the sample, position and length of the
            segment, in bytes.
        paths: paths of the samples; empty if the places tell them.
        states: state of each file, from ``file_state``.
        first: position of the first sample in the order of the source of all.
    """

    places: Int64Array
    sizes: Uint64Array
    segments: Int64Array = field(default_factory=lambda: np.zeros((0, 5), np.int64))
    paths: Sequence[bytes] = ()
    states: Sequence[tuple[int, int]] = ()
    first: int = 0


class ShardSource(PassingSource):
    """A source of shards that are read one after the other, or by an index of all samples.

    Args:
        shards: paths of the shards.
        noun: name of a shard in the error for an empty list, such as ``a TFRecord file``.

    Attributes:
        index: where the samples lie in the shards; None if they can only be streamed.
        is_exact: False if the source leaves samples out, counts what it sees, or learns from the
            first sample. Then an import with an index goes on at a cursor only.
        shards_are_independent: True if the samples of a shard depend on that shard alone, and on
            the first sample of all, so that an import can go on behind any shard.
        learns_from_first_shard: True if the first shard is read for the first sample alone, which
            those of the other shards are compared with; for sources without an index.
        described: the samples of the index, if another source has found and ordered them.
        first_record: the first record of the first shard that ``read_shard`` has to read, from the
            cursor at which an import goes on; it sets this to 0.

    Raises:
        UsageError: the list of shards is empty.
    """

    index: RangeReader | None = None
    is_exact = True
    shards_are_independent = False
    learns_from_first_shard = False
    first_record = 0
    undivided = "its samples depend on those before, or are read from all of its files at once"
    described: IndexedSamples | None = None
    _first = 0  # position in the order of samples, or of shards without an index

    def __init__(self, shards: Sequence[str], *, noun: str) -> None:
        if not shards:
            raise UsageError(f"import: expected {noun}, got none")
        self.bad = current()
        self.shards = list(shards)
        self.name = source_name(self.shards)

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Pass over the first samples; with an index, begin at the cursor; see ``Source.seek``."""
        base = 0 if self.described is None else self.described.first
        if self.index is not None and self.is_exact:
            self._first = count if cursor is None else position_after(count, cursor) - base
        elif cursor is None:
            self.to_pass = count
        else:
            self._first = int(cursor.value["position"]) - base
            self.first_record = int(cursor.value.get("record", 0))
            self.to_pass = count - cursor.count
            self.restore_skipped(cursor.value["skipped"])
        return count

    def restore_skipped(self, skipped: Mapping[str, int]) -> None:
        """Take the counts of what was left out up to a cursor."""
        self.skipped = Counter(skipped)

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Yield the blocks of a shard without an index, each with memory of its own.

        A generator, which is closed if not all blocks are taken, and then closes the shard. It may
        leave out, and not read, samples for which ``passes`` returns True. The cursor of a block is
        ``{"record": N}``, the number of the first record that it has not used, or None.
        """
        raise NotImplementedError

    def read_last(self) -> Iterator[SampleBlock]:
        """Yield further blocks, after those of all shards."""
        return iter(())

    def read_indexed(self, indices: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        """Read samples of the index into a buffer, each at its offset; leave some out."""
        raise NotImplementedError

    def describe_samples(self, indices: Uint64Array) -> IndexedSamples | None:
        """Return samples of the index for another source; None if it cannot read them alone."""
        del indices
        return None

    def state_of(self, number: int) -> tuple[int, int]:
        """Return the state of a file of the index, from ``file_state``."""
        assert self.index is not None
        return self.index.states[number]

    def described_bytes(self) -> Int64Array:
        """Return the bytes that each sample of the index takes in the description of a part."""
        raise NotImplementedError

    def part_bounds(self, order: Uint64Array, layout: Layout, part_bytes: int) -> list[int] | None:
        """Return where the parts of an order of the index begin, and the end of the last one.

        Returns:
            Rising positions; None if there is no index, or it cannot be divided.
        """
        if self.index is None or self.describe_samples(order[:0]) is None:
            return None
        limits = PartSize(part_bytes, self.buffer_bytes, whole_blocks=layout != "path")
        ends = part_ends(self.index.sizes[order], self.described_bytes()[order], limits)
        return [0, *ends, len(order)]

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every shard once; see ``Source.blocks``.

        Raises:
            DlfsError: a shard is damaged, ends early, cannot be read, or changed meanwhile.
        """
        order, bounds = self.order(layout, seed), None
        if self.part_bytes is not None:
            bounds = self.part_bounds(order, layout, self.part_bytes)
        ends = [] if bounds is None else bounds[1:-1]
        return stream_ahead(self._in_order(order, ends), bad=self.bad, cancel=self.cancel)

    def order(self, layout: Layout, seed: int) -> Uint64Array:
        """Return the order of the samples of the index, or of the shards."""
        count = len(self.shards if self.index is None else self.index.sizes)
        if self.described is not None:
            return np.arange(count, dtype=np.uint64)
        if not self.learns_from_first_shard:
            return packing_order(count, layout=layout, seed=seed)
        others = packing_order(count - 1, layout=layout, seed=seed)
        return np.concatenate([np.zeros(1, np.uint64), others + np.uint64(1)])

    def _in_order(
        self, order: Uint64Array, ends: Sequence[int]
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of the samples of the index, or of the shards, in an order.

        Args:
            order: the order.
            ends: positions of samples in it at which parts end, but the last one.
        """
        if self.learns_from_first_shard:
            self._first = max(1, self._first)
        if self._first and not self.is_exact:
            self._learn(order)
        if self.index is None:
            yield from self.passed(self.streamed(order))
            yield from self.passed(self.read_last())
        else:
            sizes = self.index.sizes
            blocks = indexed_blocks(
                order, sizes, self.read_indexed, self.buffer_bytes, first=self._first, ends=ends
            )
            yield from self.passed(map(self._with_skipped, map(self._moved, blocks)))
            self.index.check_unchanged()

    def streamed(self, order: Uint64Array) -> Iterator[SampleBlock]:
        """Yield the blocks of the shards in an order, from the one at which the import goes on."""
        for position in range(self._first, len(order)):
            number = int(order[position])
            for block in self.salvage(number, self.read_shard(number)):
                yield self._with_skipped(block, position)
            if self.shards_are_independent:
                yield self._with_skipped(SampleBlock.empty({"position": position + 1}))

    def _learn(self, order: Uint64Array) -> None:
        """Read what the source learns from the first sample in an order."""
        skipped, bad, to_pass, first = Counter(self.skipped), self.bad, self.to_pass, self._first
        self.bad, self.to_pass, self._first = bad.unreported(), 0, 0
        with closing(self._read_first(order)) as blocks:
            next((block for block in blocks if block.paths), None)
        self.restore_skipped(skipped)
        self.bad, self.to_pass, self._first = bad, to_pass, first

    def _read_first(self, order: Uint64Array) -> Generator[SampleBlock, None, None]:
        """Yield blocks from the first sample in an order on, of the index one by one."""
        if self.index is None:
            yield from self.streamed(order)
            return
        for position in range(len(order)):
            buffer = np.empty(int(self.index.sizes[order[position]]), np.uint8)
            yield self.read_indexed(order[position : position + 1], np.zeros(1, np.int64), buffer)

    def _moved(self, block: SampleBlock) -> SampleBlock:
        """Return a block of a part whose cursor is a position in the order of the whole source."""
        if self.described is None or block.cursor is None:
            return block
        position = self.described.first + block.cursor["position"]
        return replace(block, cursor={**block.cursor, "position": position})

    def _with_skipped(self, block: SampleBlock, position: int | None = None) -> SampleBlock:
        """Return a block whose cursor has the counts of what was left out up to it.

        Args:
            block: a block.
            position: position of its shard in the order, if its cursor lacks it.
        """
        if block.cursor is None or (self.index is not None and self.is_exact):
            return block
        cursor = {"position": position, **block.cursor, "skipped": dict(self.skipped)}
        return replace(block, cursor=cursor)

    def read_places(
        self, places: Int64Array, offsets: Int64Array, buffer: Bytes, name: Callable[[int], str]
    ) -> list[bool]:
        """Read ranges of the shards; note the samples of those that cannot be read.

        Args:
            places: as for ``RangeReader.read_ranges``.
            offsets: ``int64[n_samples]``, rising: offset of each sample in the buffer.
            buffer: the buffer.
            name: function that returns the name of a sample of these.

        Returns:
            True for each sample that was read.

        Raises:
            DlfsError: a range cannot be read, and no bad records are allowed.
        """
        assert self.index is not None
        are_read = [True] * len(offsets)
        for number, offset, error in self.index.read_ranges(places, buffer):
            sample = int(np.searchsorted(offsets, offset, side="right")) - 1
            if are_read[sample]:
                self.bad.note(self.shards[number], name(sample), error)
            are_read[sample] = False
        return are_read

    def salvage(self, number: int, items: Iterable[_T]) -> Generator[_T, None, None]:
        """Yield items of a shard up to an error behind which nothing can be found.

        See ``BadRecords.salvage``.
        """
        return self.bad.salvage(items, self.shards[number], self.sound_until(number))

    def gather(self, number: int, records: Records) -> Iterator[SampleBlock]:
        """Make blocks of the records of a shard, without the bad ones; see ``gather``."""
        return gather(
            self.salvage(number, records),
            where=f"import {self.shards[number]}",
            buffer_bytes=self.buffer_bytes,
            bad=self.bad,
        )

    def sound_until(self, number: int) -> tuple[type[DlfsError], ...]:  # noqa: ARG002
        """Return the errors of a shard after which what was read before them is sound."""
        return (*RecordError, DeviceError)

    def cancel(self) -> None:
        """End the wait of ``read_shard`` for data; called when not all blocks are taken."""
        return


class PartSource(ShardSource, Generic[_F]):
    """A source whose parts, runs of neighbouring samples, are read in any order.

    Layout ``shuffled`` draws the order of all parts from the seed, or of the files and the parts in
    them if there are more than ``OPEN_FILES_MAX``. Parts that follow each other in the order and in
    their group are read at once. Consecutive parts make a block, which ends with a cursor.

    Attributes:
        states: state of each file, from ``file_state``.
        parts: ``int64[n, 3]``, from ``find_parts``, once the order is known.
    """

    states: Sequence[tuple[int, int]]

    @abstractmethod
    def find_parts(self, size_bytes: int) -> tuple[Int64Array, Uint64Array]:
        """Divide the source into parts, in path order.

        Args:
            size_bytes: size that a part should fit, unless more is stored together.

        Returns:
            ``int64[n, 3]``: number of the group that a part belongs to, its first record there, and
            the number of its records; ``uint64[n]``: bytes of each part, as far as it is known.
        """

    @abstractmethod
    def read_part(self, group: int, first: int, count: int) -> Iterator[SampleBlock]:
        """Yield the samples of one or more parts of a group, in blocks without gaps.

        Args:
            group: number of the group.
            first: number of the first record in it.
            count: number of records.
        """

    @abstractmethod
    def open_file(self, number: int) -> _F:
        """Open a file."""

    @property
    def files(self) -> Sequence[int]:
        """Number of the file of each group; by default each file is one."""
        return range(len(self.shards))

    def opened(self, number: int) -> _F:
        """Return a file, opened; close the one that was used longest ago if there are too many."""
        if number not in self._opened:
            while len(self._opened) >= OPEN_FILES_MAX:
                self._opened.popitem(last=False)[1].close()
            self._opened[number] = self.open_file(number)
        self._opened.move_to_end(number)
        return self._opened[number]

    def drop(self, number: int) -> None:
        """Close a file if it is open; it can be opened again."""
        if number in self._opened:
            self._opened.pop(number).close()

    def find_runs(self) -> None:
        """Find out if the parts are short; to be called when the source is open."""
        self._opened: OrderedDict[int, _F] = OrderedDict()  # least recently used first
        parts, sizes = self.find_parts(PART_BYTES)
        are_short = (sizes <= PART_BYTES) | (parts[:, 2] == 1)
        if len(self.shards) > OPEN_FILES_MAX:
            files = self._files_of(parts)
            are_short = np.bincount(files, sizes) <= PART_BYTES
            are_short |= np.bincount(files, parts[:, 2]) == 1
        self.gives_runs = bool(are_short.all())

    def order(self, layout: Layout, seed: int) -> Uint64Array:
        """Return the order of the parts."""
        self.parts, self._sizes = self.find_parts(min(PART_BYTES, self.buffer_bytes))
        order = packing_order(len(self.parts), layout=layout, seed=seed)
        if len(self.shards) > OPEN_FILES_MAX:
            places = packing_order(len(self.shards), layout=layout, seed=seed)
            order = order[np.argsort(places[self._files_of(self.parts[order])], kind="stable")]
        return order

    def streamed(self, order: Uint64Array) -> Iterator[SampleBlock]:
        """Yield the blocks of the parts in an order; see ``ShardSource``."""
        position = self._first
        try:
            while position < len(order):
                chosen, _ = take_block(order, self._sizes, position, self.buffer_bytes)
                position += len(chosen)
                parts = dropwhile(self._is_passed, self.parts[chosen].tolist())
                blocks = chain.from_iterable(starmap(self.read_part, _join_parts(parts)))
                yield from join_blocks(self.passed(blocks), self.buffer_bytes)
                yield self._with_skipped(SampleBlock.empty({"position": position}))
        finally:
            for number in list(self._opened):
                self.drop(number)
        for number in sorted(set(self.files)):
            path = self.shards[number]
            check_unchanged(f"import {path}", path, self.states[number])

    def _files_of(self, parts: Int64Array) -> Int64Array:
        return np.array(self.files, np.int64)[parts[:, 0]]

    def _is_passed(self, part: Sequence[int]) -> bool:
        return self.is_exact and self.passes(part[2])


def _join_parts(parts: Iterable[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield parts, as one where they follow each other in their group."""
    last: tuple[int, int, int] | None = None
    for group, first, count in parts:
        if last is not None and last[0] == group and sum(last[1:]) == first:
            last = group, last[1], last[2] + count
            continue
        if last is not None:
            yield last
        last = group, first, count
    if last is not None:
        yield last


def end_with_cursor(
    blocks: Iterable[SampleBlock], cursor: Mapping[str, Any]
) -> Iterator[SampleBlock]:
    """Yield blocks, the last one with a cursor."""
    last: SampleBlock | None = None
    for block in blocks:
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield replace(last, cursor=cursor)


def gather(
    records: Records,
    *,
    where: str,
    buffer_bytes: int = BUFFER_BYTES,
    bad: BadRecords | None = None,
) -> Iterator[SampleBlock]:
    """Make blocks of records.

    Args:
        records: yields the records of one shard, all with the same attributes; it is closed.
        where: name of the shard, for errors.
        buffer_bytes: most bytes of a block; a larger record gets a block of its own.
        bad: bad records, to which those whose attributes do not fit the others are added; by
            default they are errors.

    Raises:
        FormatError: the values of an attribute are not of one type.
    """
    with closing(records):
        sized = ((record, len(record.data), 1) for record in records)
        for part in _parts(sized, buffer_bytes):
            if bad is not None and bad.are_allowed:
                part = [part[index] for index in find_fitting(part, where, bad)]
            if part:
                yield make_block(part, where)


def find_fitting(records: Sequence[Record], where: str, bad: BadRecords) -> list[int]:
    """Return the numbers of the records whose attributes have the types of the first.

    Args:
        records: records, all with the same attributes.
        where: name of the shard, for errors.
        bad: bad records, to which the others are added.
    """
    found: list[int] = []
    for index, record in enumerate(records):
        try:
            for name, value in record.attributes.items():
                values = [records[one].attributes[name] for one in found[:1]]
                attribute_array([*values, value], name, where)
        except FormatError as error:
            bad.note(where.removeprefix("import "), os.fsdecode(record.path), error)
        else:
            found.append(index)
    return found


def join_blocks(
    blocks: Iterable[SampleBlock], buffer_bytes: int
) -> Generator[SampleBlock, None, None]:
    """Join small blocks that follow each other to blocks of at most ``buffer_bytes``.

    Args:
        blocks: blocks whose samples lie one after the other, all with the same attributes.
        buffer_bytes: most bytes of joined blocks.
    """
    sized = ((block, len(block.data), len(block.paths)) for block in blocks)
    for part in _parts(sized, buffer_bytes):
        if len(part) == 1:
            yield part[0]
            continue
        lengths = np.concatenate([block.lengths for block in part])
        yield SampleBlock(
            [path for block in part for path in block.paths],
            np.concatenate([block.data for block in part]),
            np.cumsum(lengths) - lengths,
            lengths,
            {
                name: np.concatenate([block.attributes[name] for block in part])
                for name in part[0].attributes
            },
            part[-1].cursor,
        )


def _parts(items: Iterable[tuple[_T, int, int]], buffer_bytes: int) -> Iterator[list[_T]]:
    """Yield lists of as many items as fit a block; each comes with its bytes and samples."""
    waiting: list[_T] = []
    used = samples = 0
    for item, size_bytes, count in items:
        used, samples = used + size_bytes, samples + count
        if waiting and (used > buffer_bytes or samples > BLOCK_SAMPLES_MAX):
            yield waiting
            waiting, used, samples = [], size_bytes, count
        waiting.append(item)
        if used >= buffer_bytes:  # full: so the next item is not made before this block is taken
            yield waiting
            waiting, used, samples = [], 0, 0
    if waiting:
        yield waiting


def make_block(records: Sequence[Record], where: str) -> SampleBlock:
    """Make one block of records.

    Args:
        records: at least one record, all with the same attributes.
        where: name of the shard, for errors.

    Raises:
        FormatError: the values of an attribute are not of one type.
    """
    parts = [record.data for record in records]
    sizes = np.array(list(map(len, parts)), np.int64)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    columns = {
        name: attribute_array([record.attributes[name] for record in records], name, where)
        for name in records[0].attributes
    }
    return SampleBlock(
        [record.path for record in records],
        np.frombuffer(data, np.uint8),
        np.cumsum(sizes) - sizes,
        sizes,
        columns,
    )


def attribute_array(values: Sequence[Value], name: str, where: str) -> npt.NDArray[Any]:
    """Return the values of an attribute as an array: int64, float64, bool, or object for text.

    Raises:
        FormatError: the values are not of one type; whole numbers among floats are allowed.
    """
    kinds = set(map(type, values))
    if kinds <= {str}:
        return np.array(values, object)
    if len(kinds) == 1 and isinstance(values[0], np.generic):
        return np.array(values)
    dtype = {frozenset([bool]): np.bool_, frozenset([int]): np.int64}.get(frozenset(kinds))
    if dtype is None and kinds <= {int, float}:
        dtype = np.float64
    if dtype is None:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise FormatError(f"{where}: attribute {name}: expected values of one type, got {names}")
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        raise FormatError(
            f"{where}: attribute {name}: expected whole numbers of 64 bits"
        ) from error


# ---- paths ---------------------------------------------------------------------------------------


def shard_prefixes(shards: Sequence[str], suffixes: Iterable[str]) -> list[bytes]:
    """Return the first path component of each shard's samples: its name without its suffix.

    Args:
        shards: paths of the shards.
        suffixes: suffixes in lower case; the first that fits is removed.

    Raises:
        UsageError: two shards have one name.
        DlfsError: a name is too long for a path.
    """
    known: dict[bytes, str] = {}
    for shard in shards:
        name = Path(shard).name
        for suffix in suffixes:
            if name.lower().endswith(suffix) and len(name) > len(suffix):
                name = name[: -len(suffix)]
                break
        prefix = os.fsencode(name)
        if prefix in known:
            raise UsageError(
                f"import {shard}: expected shards of different names, because they begin the "
                f"samples' paths, got that of {known[prefix]}"
            )
        check_path(prefix, f"import {shard}")
        known[prefix] = shard
    return list(known)


def number_path(prefix: bytes, number: int) -> bytes:
    """Return the path of a record that has no name."""
    return b"%s/%08d" % (prefix, number)


def text_path(text: bytes, where: str) -> bytes:
    """Return the path in a field of a record, normalised as those of archive members are.

    Raises:
        FormatError: the path is empty or absolute, or has a component ``..``.
        LimitError: the path is too long.
    """
    path = clean_path(text, where)
    if not path:
        raise FormatError(f"{where}: expected a path, got {show(text)!r}")
    return path


def find_shards(row: Format, paths: Sequence[str]) -> list[str]:
    """Return the files of a format of which each is opened alone; see ``Format.by_file``.

    Args:
        row: row of the format.
        paths: paths of files and folders.

    Raises:
        UsageError: a folder has no file of the format, or two files would have samples of one path.
    """
    if row.name in ("tar", "zip"):
        return list(paths)
    if row.name == "webdataset":
        return files_of(paths, "tar", noun="an archive")
    files = files_of(paths, row.name, noun=f"a file of format {row.name}")
    shard_prefixes(files, row.suffixes)
    return files


def files_of(paths: Sequence[str], format_name: str, *, noun: str) -> list[str]:
    """Return the files that paths stand for: a folder stands for the files of a format in it.

    Args:
        paths: paths of files and folders.
        format_name: name of the format, whose patterns the files' names match.
        noun: name of such a file in the error, such as ``a TFRecord file``.

    Raises:
        UsageError: a folder has no such file.
    """
    patterns = find_format(format_name).names
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            found.append(path)
            continue
        inside: list[str] = []
        for parent, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            fitting = [
                str(Path(parent, name))
                for name in sorted(names)
                if any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
            ]
            if parent == path:
                inside = list(filter(os.path.isfile, fitting))
            elif fitting:
                raise UsageError(
                    f"import {path}: expected {noun} in the folder itself, got {fitting[0]} in a "
                    "folder below; name the folders, or the files by a pattern"
                )
        if not inside:
            raise UsageError(f"import {path}: expected {noun} in the folder, got none")
        found.extend(inside)
    return found
