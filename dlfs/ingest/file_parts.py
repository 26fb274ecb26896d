"""Divides sources of several files that are read file by file, and reads their parts.

``FilesInParts`` wraps such a source. A part is a run of files in the order in which the source
reads them, of about the bytes of a step of the import. An import of more than one part opens and
reads each part as other processes do (``FormatPart``): so both give the same samples in the same
order. The source of all files is opened before; it finds what a part needs to know of the others:

- ``Source.shared`` and ``file_facts``: the columns of all tables, joined, and the types of each.
- ``Source.learns``: the first sample of all decides on what others must have. Then the file with it
  is opened along with the files of each further part, and read up to this sample.

A source says by ``Source.undivided`` if its files have more to do with each other.

A source that has an index of all samples reads them in a shuffled order. There a part is a range of
this order (``IndexPart``), and its description has the place of each sample.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from errno import ESTALE
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from dlfs.base.arguments import Layout
from dlfs.base.closing import closed_on_error
from dlfs.errors import DeviceError
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import opening
from dlfs.ingest.descriptions import (
    File,
    FormatFiles,
    FormatFilesPart,
    IndexedPart,
    OptionValue,
    decode_sizes,
    decode_table,
    join_paths,
    malformed,
    split_paths,
)
from dlfs.ingest.isolation.messages import Array, to_bytes, to_text
from dlfs.ingest.isolation.source import IsolatedSource
from dlfs.ingest.order import file_part_ends, packing_order
from dlfs.ingest.records import IndexedSamples, ShardSource
from dlfs.ingest.registry import STDIN, KnownFiles, find_format, make_options
from dlfs.ingest.source import (
    Division,
    Int64Array,
    SampleBlock,
    Source,
    Uint64Array,
    WrappedSource,
    add_skipped,
    file_errors,
    file_state,
    without_first,
)

FOLDER_OPTIONS = {"index": ("auto", "none")}
"""Options that name a folder, with the values that do not."""


@dataclass(frozen=True, slots=True)
class FileOpener:
    """Opens files of a format.

    Attributes:
        format_name: name of the format.
        options: options of the format, by name.
    """

    format_name: str
    options: Mapping[str, object]

    def open(self, paths: Sequence[str], known: KnownFiles | None = None) -> Source:
        """Open files as one source.

        Args:
            paths: paths of the files.
            known: what the source of all files knows; None: they are all.

        Raises:
            DlfsError: a file cannot be opened.
        """
        row = find_format(self.format_name)
        made = make_options(row, self.options)
        if known is not None and known.shared:
            made = replace(known, options=made)
        return IsolatedSource(made, paths) if row.isolated else made.open(paths)

    def describe(self) -> FormatFiles:
        """Return the message of this opener."""
        return FormatFiles(
            to_bytes(self.format_name),
            {to_bytes(name): _encode_option(name, value) for name, value in self.options.items()},
        )

    @classmethod
    def of(cls, message: FormatFiles) -> FileOpener:
        """Return the opener of a message."""
        options = {to_text(name): _decode_option(value) for name, value in message.options.items()}
        return cls(to_text(message.format_name), options)


def _encode_option(name: str, value: object) -> OptionValue:
    if isinstance(value, str):
        is_folder = name in FOLDER_OPTIONS and value not in FOLDER_OPTIONS[name]
        return to_bytes(os.path.abspath(value) if is_folder else value)
    if isinstance(value, bool | int | float | None):
        return value
    assert isinstance(value, Sequence)
    return [to_bytes(one) for one in value]


def _decode_option(value: OptionValue) -> object:
    if isinstance(value, bytes):
        return to_text(value)
    return tuple(map(to_text, value)) if isinstance(value, list) else value


class FormatPart(WrappedSource):
    """Some files of a source, as another source of them.

    The cursors have the number of the part, so that an import of all parts can go on at them, too.

    Args:
        part: the description of the part.

    Raises:
        DeviceError: a file has changed since the source was divided.
        DlfsError: a file cannot be opened.
    """

    def __init__(self, part: FormatFilesPart) -> None:
        self._number = part.number
        learned = [] if part.learns_from is None else [part.learns_from]
        if not part.files:
            raise malformed("expected files")
        for file in (*learned, *part.files):
            _check_state(file)
        paths = [os.fsdecode(file.path) for file in (*learned, *part.files)]
        facts = [file.facts for file in part.files]
        source = FileOpener.of(part.opener).open(paths, KnownFiles(part.shared, facts))
        with closed_on_error(source):
            if learned:
                if not isinstance(source, ShardSource):
                    raise malformed("expected files that are read by this process")
                source.learns_from_first_shard = True
            source.buffer_bytes = part.buffer_bytes
            super().__init__(source)
            self.buffer_bytes = part.buffer_bytes
            self.gives_shuffled = self.gives_runs = False
        self._used = self._left = 0
        self._inner: dict[str, Any] = {}

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Go on behind the first samples of the part; see ``Source.seek``."""
        self._used, inner = count, None
        if cursor is not None and "count" not in cursor.value:
            cursor = None  # of an import that has not read the files as parts
        if cursor is not None:
            self._used = cursor.value["count"] + count - cursor.count
            self._inner = {
                key: value for key, value in cursor.value.items() if key.startswith("inner")
            }
            if self._inner:
                inner = Cursor(self._inner["inner"], self._inner["inner_count"])
        self._left = self._used - self._source.seek(self._used, inner)
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of the files; see ``Source.blocks``."""
        used, inner = self._used, self._inner
        with closing(self._source.blocks(layout=layout, seed=seed)) as blocks:
            for block in without_first(blocks, self._left):
                used += len(block.paths)
                if block.cursor is not None:
                    inner = {"inner": block.cursor, "inner_count": used}
                # Where samples cannot be counted, only the source's own cursors are places.
                is_place = block.cursor is not None or not self.bad.are_allowed
                cursor = {"part": self._number, "count": used, **inner}
                yield replace(block, cursor=cursor if is_place else None)
        self._take_facts()
        self.left_out = self._source.left_out


class IndexPart(WrappedSource):
    """Some samples of the index of a source, in the order in which they are packed.

    Args:
        part: the description of the part.

    Raises:
        FormatError: the description is none.
        DeviceError: a file has changed since the source was divided.
        DlfsError: a file cannot be opened.
    """

    def __init__(self, part: IndexedPart) -> None:
        sizes = decode_sizes(part.sizes)
        places = decode_table(part.places, "places", 3)
        segments = decode_table(part.segments, "segments", 5)
        paths = split_paths(part.paths)
        if len(places) != len(sizes) or (paths and len(paths) != len(sizes)) or not part.files:
            raise malformed("expected a place and a path of each sample, and files")
        for table in (places, segments):
            if len(table) and int(table[:, 0].max()) >= len(part.files):
                raise malformed("expected places in the files")
        _check_segments(places, sizes, segments)
        for file in part.files:
            _check_state(file)
        opener = FileOpener.of(part.opener)
        made: Any = make_options(find_format(opener.format_name), opener.options)
        if not hasattr(made, "open_described"):
            raise malformed("expected a format whose samples have an index")
        states = [(file.size_bytes, file.modified_ns) for file in part.files]
        found = IndexedSamples(places, sizes, segments, paths, states, part.first)
        source = made.open_described([os.fsdecode(file.path) for file in part.files], found)
        source.buffer_bytes = part.buffer_bytes
        super().__init__(source)
        self.buffer_bytes = part.buffer_bytes

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of the samples; see ``Source.blocks``."""
        with closing(self._source.blocks(layout=layout, seed=seed)) as blocks:
            yield from blocks
        self._take_facts()

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Return None: a part has no parts."""
        return Source.divide(self, layout=layout, seed=seed, part_bytes=part_bytes)


def _check_segments(places: Int64Array, sizes: Uint64Array, segments: Int64Array) -> None:
    """Check that segments lie in their samples: they are read to these places of a buffer."""
    pairs = zip(places[:, :2].tolist(), sizes.tolist(), strict=True)
    starts = {(shard, at): size for (shard, at), size in pairs} if len(segments) else {}
    for shard, at, offset, _, length in segments.tolist():
        if offset + length > starts.get((shard, at), 0):
            raise malformed("expected segments in their samples")


def _check_state(file: File) -> None:
    path = os.fsdecode(file.path)
    if b"\0" in file.path or not os.path.isabs(path):
        raise malformed("expected the absolute path of a file")
    with file_errors(f"import {path}"):
        if file_state(path) != (file.size_bytes, file.modified_ns):
            raise DeviceError(f"import {path}: the file changed during the import", ESTALE)


class FilesInParts(WrappedSource):
    """A source of several files, with the parts that it can be divided into.

    Args:
        source: the source of all files; closed with this object.
        opener: opener of the format.
    """

    def __init__(self, source: Source, opener: FileOpener) -> None:
        super().__init__(source)
        self._opener = opener
        self._states: list[tuple[int, int]] = []
        for path in source.separate_files:
            with file_errors(f"import {path}"):
                self._states.append(file_state(path))
        self._at: Mapping[str, Any] | None = None
        self._used = 0

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the source into runs of its files; see ``Source.divide``."""
        if self._source.gives_shuffled:
            return self._divide_index(layout, seed, part_bytes)
        self.undivided = "it is one file" if self._source.separate_files else self._source.undivided
        if len(self._source.separate_files) < 2:
            return None
        parts = self._find_parts(layout, seed, part_bytes)
        sizes = [sum(self._states[number][0] for number in part) for part in parts]
        learns_from = None
        if self._source.learns:
            first = packing_order(len(parts[0]), layout=layout, seed=seed)[0]
            learns_from = parts[0][int(first)]
        return Division(sizes, partial(self._describe, parts, learns_from))

    def _divide_index(self, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the samples of an index into ranges of the order of packing."""
        source, bounds = self._source, None
        if isinstance(source, ShardSource) and source.index is not None:
            source.buffer_bytes = min(source.buffer_bytes, self.buffer_bytes)
            order = source.order(layout, seed)
            bounds = source.part_bounds(order, layout, part_bytes)
        self.undivided = source.undivided
        if bounds is None:
            return None
        assert isinstance(source, ShardSource)
        assert source.index is not None
        totals = np.concatenate([[0], np.cumsum(source.index.sizes[order], dtype=np.int64)])
        sizes = np.diff(totals[bounds]).tolist()
        return Division(sizes, partial(self._describe_samples, source, order, bounds))

    def _describe_samples(
        self, source: ShardSource, order: Uint64Array, bounds: Sequence[int], part: int
    ) -> bytes:
        first, last = bounds[part], bounds[part + 1]
        samples = source.describe_samples(order[first:last])
        assert samples is not None
        used, numbers = np.unique(samples.places[:, 0], return_inverse=True)
        places, segments = samples.places.copy(), samples.segments.copy()
        places[:, 0] = numbers.reshape(-1)
        segments[:, 0] = np.searchsorted(used, segments[:, 0])
        files = [
            File(os.fsencode(os.path.abspath(source.shards[number])), *source.state_of(number), b"")
            for number in used.tolist()
        ]
        return msgspec.msgpack.encode(
            IndexedPart(
                self._opener.describe(),
                files,
                first,
                self.buffer_bytes,
                Array.of(samples.sizes),
                Array.of(places),
                Array.of(segments),
                join_paths(samples.paths),
            )
        )

    def _find_parts(self, layout: Layout, seed: int, part_bytes: int) -> list[list[int]]:
        """Return the numbers of the files of each part, rising."""
        order = packing_order(len(self._states), layout=layout, seed=seed)
        sizes = np.array([size for size, _ in self._states], np.uint64)
        bounds = [0, *file_part_ends(sizes[order], part_bytes), len(order)]
        return [sorted(order[first:last].tolist()) for first, last in pairwise(bounds)]

    def _describe(
        self, parts: Sequence[Sequence[int]], learns_from: int | None, part: int
    ) -> bytes:
        learned = learns_from if part else None
        return msgspec.msgpack.encode(
            FormatFilesPart(
                self._opener.describe(),
                part,
                self.buffer_bytes,
                list(map(self._file, parts[part])),
                self._source.shared,
                None if learned is None else self._file(learned),
            )
        )

    def _file(self, number: int) -> File:
        path, facts = os.fsencode(os.path.abspath(self._source.separate_files[number])), b""
        if self._source.file_facts:
            facts = self._source.file_facts[number]
        return File(path, *self._states[number], facts)

    # ---- reading all parts -----------------------------------------------------------------------

    @property
    def _has_parts(self) -> bool:
        """True if the parts are read one after the other."""
        if self.part_bytes is None or self._source.gives_shuffled or len(self._states) < 2:
            return False
        return sum(size for size, _ in self._states) > self.part_bytes

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Go on in the part that the cursor names; without one, read all; see ``Source.seek``."""
        if not self._has_parts:
            if cursor is not None and "part" in cursor.value:  # of workers, in the only part
                inner = cursor.value.get("inner")
                at = cursor.value.get("inner_count", 0)
                cursor = None if inner is None else Cursor(inner, at)
            return super().seek(count, cursor)
        if cursor is None:
            return 0
        self._at = cursor.value
        self._used = int(cursor.value["count"]) + count - cursor.count
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of all files; see ``Source.blocks``."""
        if self._has_parts:
            yield from self._blocks_of_parts(layout, seed)
            return
        with closing(self.blocks_of_source(layout=layout, seed=seed)) as blocks:
            yield from blocks
        self._take_facts()
        self.left_out = self._source.left_out

    def _blocks_of_parts(self, layout: Layout, seed: int) -> Iterator[SampleBlock]:
        assert self.part_bytes is not None
        found = self.divide(layout=layout, seed=seed, part_bytes=self.part_bytes)
        assert found is not None
        at = self._at or {"part": 0, "count": 0, "skipped": {}}
        skipped = Counter(at.get("skipped", {}))
        for number in range(at["part"], len(found)):
            part = self._open(found.describe(number))
            with closing(part):
                if number == at["part"] and self._used:
                    place = Cursor(at, at["count"]) if self._at else None
                    part.seek(self._used, place)
                with closing(part.blocks(layout=layout, seed=seed)) as blocks:
                    for block in blocks:
                        cursor = block.cursor and {**block.cursor, "skipped": dict(skipped)}
                        yield replace(block, cursor=cursor)
                add_skipped(skipped, part.skipped)
                self.left_out += part.left_out
                if number + 1 < len(found):
                    cursor = {"part": number + 1, "count": 0, "skipped": dict(skipped)}
                    yield SampleBlock.empty(cursor, ends_part=number)
        self.skipped = skipped

    def _open(self, description: bytes) -> FormatPart:
        """Open a part; what is found then, the source of all files has found as well."""
        message = msgspec.msgpack.decode(description, type=FormatFilesPart)
        with opening(self.bad), self.bad.ignore():
            return FormatPart(message)


def open_files(opener: FileOpener, paths: Sequence[str]) -> Source:
    """Open files or folders of a format as one source, which can be divided if it is by file."""
    source = opener.open(paths)
    if STDIN in paths or not find_format(opener.format_name).by_file:
        return source
    with closed_on_error(source):
        return FilesInParts(source, opener)
