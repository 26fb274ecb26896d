"""Objects that are samples, as the files of a folder are: from the spool's blocks into a dataset.

The paths, their order and their classes come from the listing, as those of a folder come from its
directories; see ``ingest.formats.folder``. The objects are fetched in the order of packing, and
read block by block while further ones are fetched.

``DescribedObjects`` reads one part of such a source, in a process that has not listed the objects.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from dlfs.base.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current
from dlfs.ingest.descriptions import (
    ObjectsPart,
    decode_columns,
    encode_columns,
    join_paths,
    malformed,
    split_paths,
)
from dlfs.ingest.files import described_bytes
from dlfs.ingest.formats.folder import class_columns, count_hidden, outside_classes
from dlfs.ingest.isolation.messages import to_bytes, to_text
from dlfs.ingest.order import PartSize, packing_order, part_ends, position_after, round_up
from dlfs.ingest.remote.blocks import Block, BlockDivision, offsets_of
from dlfs.ingest.remote.described import describe_objects
from dlfs.ingest.remote.fetching import Fetch
from dlfs.ingest.remote.spool import Root, Spool
from dlfs.ingest.source import (
    Array,
    Division,
    SampleBlock,
    Source,
    Uint64Array,
    check_path,
    fingerprint_of,
    show,
    source_name,
    stream_ahead,
)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample: its path, its object, and the URL that names the object or its folder."""

    path: bytes
    fetch: Fetch
    url: str


_OBJECT_BYTES = 160
"""Bytes of an object in the description of a part besides its name: version, digests and size."""


class ObjectsSource(Source):
    """The objects under one or several URLs; see ``FolderSource`` and ``ImageFolderSource``.

    Args:
        spool: the spool, which has listed the objects.
        limit_bytes: most bytes of copies.
        has_classes: True if the first folder of an object is its class.

    Raises:
        FormatError: two samples have one path.
        UsageError: an object is in no class folder, or not one folder is given for these.
        LimitError: a path is too long for a sample.
    """

    gives_shuffled = True

    def __init__(self, spool: Spool, limit_bytes: int, *, has_classes: bool) -> None:
        self.name = source_name(spool.paths)
        self.bad = current()
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._urls = {root.path: url for root, url in zip(spool.roots, spool.sources, strict=True)}
        keys = sorted(one.key for root in spool.roots for one in root.objects)
        spool.fingerprint = fingerprint_of(limit_bytes, keys)
        self._hidden: set[bytes] = set()
        self._samples = self._find(spool.roots, has_classes)
        self._attributes: Mapping[str, Array] = {}
        wanted = np.ones(len(self._samples), np.bool_)
        if has_classes:
            names = Counter(os.fsdecode(path.rpartition(b"/")[2]) for path in sorted(self._hidden))
            self.skipped = count_hidden(names)
            self._attributes, outside = class_columns(one.path for one in self._samples)
            for index in outside:
                path = self._samples[index].path
                self.bad.note(self.name, os.fsdecode(path), outside_classes(self.name, path))
            wanted[outside] = False
        self._choose(np.flatnonzero(wanted).astype(np.uint64))
        self._base = self._position = self._group_bytes = self._passed = 0

    def file_paths(self) -> list[bytes]:
        """Return the paths of all samples."""
        return [one.path for one in self._samples]

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Do not fetch samples that the dataset has; see ``Source.leave_out``."""
        before = self._chosen.tolist()
        left = [index for index in before if not is_known(self._samples[index].path)]
        self._choose(np.array(left, np.uint64))
        return len(before) - len(left)

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Do not fetch the first objects in the order of packing; see ``Source.seek``."""
        self._position = count
        if cursor is not None:  # of the beginning of a block, where the division goes on
            self._position = int(cursor.value["position"]) - self._base
            self._group_bytes = int(cursor.value["group_bytes"])
            self._passed = position_after(count, cursor) - self._base - self._position
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Fetch and read every object once; see ``Source.blocks``."""
        order = packing_order(len(self._chosen), layout=layout, seed=seed)
        size = None if self.sample_bytes is None else self.part_bytes
        ends = None if size is None else self._part_ends(order, layout, size)
        return self._stream(order, (layout, seed), ends)

    def _stream(
        self, order: Uint64Array, kind: tuple[Layout, int], ends: Sequence[int] | None
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks in an order, while a thread makes the next one."""
        made = self._in_order(order, kind, ends)
        return stream_ahead(made, bad=self.bad, cancel=self._spool.cancel)

    def _choose(self, indices: Uint64Array) -> None:
        """Import only some of the samples."""
        self._chosen = indices
        self.sample_count = len(indices)
        items = [self._samples[index].fetch.item for index in indices.tolist()]
        self.undivided = "its listing does not have the sizes of the objects"
        if all(item.has_size for item in items):
            self.sample_bytes = sum(item.size_bytes for item in items)

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def _block_bytes(self) -> int:
        return max(1, min(self.buffer_bytes, self._limit_bytes // 4))

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the objects into ranges of the order of packing; see ``Source.divide``."""
        if self.sample_bytes is None:
            return None
        order = packing_order(len(self._chosen), layout=layout, seed=seed)
        bounds = [0, *self._part_ends(order, layout, part_bytes), len(order)]
        totals = np.concatenate([[0], np.cumsum(self._sizes(order), dtype=np.int64)])
        return Division(np.diff(totals[bounds]).tolist(), partial(self._describe, order, bounds))

    def _sizes(self, order: Uint64Array) -> Uint64Array:
        """Return the size of each object in an order."""
        samples = (self._samples[index] for index in self._chosen[order].tolist())
        return np.fromiter((one.fetch.item.size_bytes for one in samples), np.uint64)

    def _part_ends(self, order: Uint64Array, layout: Layout, part_bytes: int) -> list[int]:
        """Return where the parts of an order of packing end; see ``order.part_ends``."""
        objects = self._chosen[order]
        described = np.fromiter((2 * len(one.path) for one in self._samples), np.int64)
        described += _OBJECT_BYTES
        for values in self._attributes.values():
            described += described_bytes(values)
        limits = PartSize(
            part_bytes, self._block_bytes, layout != "path", disk_bytes=self._limit_bytes // 2
        )
        return part_ends(self._sizes(order), described[objects], limits)

    def _describe(self, order: Uint64Array, bounds: Sequence[int], part: int) -> bytes:
        first, last = bounds[part], bounds[part + 1]
        objects = self._chosen[order[first:last]]
        samples = [self._samples[index] for index in objects.tolist()]
        sources, described = describe_objects((one.url, one.fetch.item) for one in samples)
        columns = {name: values[objects] for name, values in self._attributes.items()}
        return msgspec.msgpack.encode(
            ObjectsPart(
                to_bytes(self.name),
                sources,
                self._block_bytes,
                first,
                described,
                join_paths(one.path for one in samples),
                encode_columns(columns),
            )
        )

    # ---- listing ---------------------------------------------------------------------------------

    def _find(self, roots: Sequence[Root], has_classes: bool) -> list[_Sample]:
        """Return the samples in the order of a folder's walk."""
        if has_classes and (len(roots) != 1 or not roots[0].is_folder):
            raise UsageError(
                f"import {roots[-1].path}: expected one folder of class folders, got "
                f"{'an object' if len(roots) == 1 else f'{len(roots)} URLs'}"
            )
        is_alone = len(roots) == 1 and roots[0].is_folder
        found: list[_Sample] = []
        known: dict[bytes, Fetch] = {}
        for root in sorted(roots, key=lambda root: (os.fsencode(root.name), root.is_folder)):
            inside: list[_Sample] = []
            for fetch in root.objects:
                name = os.fsencode(fetch.item.name)
                if has_classes and self._is_hidden(name):
                    continue
                path = b"/".join(filter(None, [b"" if is_alone else os.fsencode(root.name), name]))
                check_path(path, f"import {fetch.item.shown}")
                other = known.setdefault(path, fetch)
                if other is not fetch:
                    error = FormatError(
                        f"import: expected each path once, got {show(path)} in "
                        f"{other.item.shown} and in {fetch.item.shown}"
                    )
                    self.bad.note(self.name, os.fsdecode(path), error)
                    continue
                inside.append(_Sample(path, fetch, self._urls[root.path]))
            inside.sort(key=lambda one: one.path)
            found += inside
        return found

    def _is_hidden(self, name: bytes) -> bool:
        parts = name.split(b"/")
        for depth, part in enumerate(parts):
            if part.startswith(b"."):
                self._hidden.add(b"/".join(parts[: depth + 1]))
                return True
        return False

    # ---- reading ---------------------------------------------------------------------------------

    def _in_order(
        self, order: Uint64Array, kind: tuple[Layout, int], ends: Sequence[int] | None
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks in an order, and a block without samples where a step has to end.

        Args:
            order: the order.
            kind: layout and seed.
            ends: positions at which parts end, but the last one; None if they are unknown.
        """
        indices = self._chosen[order][self._position :].tolist()
        if not indices[self._passed :]:
            return
        block_bytes = self._block_bytes
        state = self._position, self._group_bytes
        bound = self._limit_bytes // 2 if ends is None else None
        division = BlockDivision(*state, block_bytes, bound, ends or ())
        parts = {end: number for number, end in enumerate(ends or ())}
        fetches = [self._samples[index].fetch for index in indices]
        chosen = hashlib.blake2b(self._chosen.tobytes()).hexdigest()
        plan = fingerprint_of(self._spool.fingerprint, chosen, *kind, block_bytes, ends)
        self._spool.fetch_blocks(fetches, plan, division, self._passed, self._limit_bytes)
        buffers = [np.empty(0, np.uint8) for _ in range(2)]
        done = 0
        while done < len(indices):
            block = self._spool.wait_for_block(begins_group=True)
            if block.begins_group:
                self._spool.end_group()
                yield SampleBlock.empty(self._cursor(block.first, 0), ends_step=True)
                block = self._spool.wait_for_block(begins_group=False)
            if not len(buffers[0]):
                buffers[0] = np.empty(block_bytes, np.uint8)
            large = np.empty(block.size_bytes, np.uint8) if block.size_bytes > block_bytes else None
            buffer = buffers[0] if large is None else large
            made = self._read(block, indices[done : done + len(block.sizes)], buffer)
            done += len(made.paths)
            left = made.behind(min(self._passed, len(made.paths))) if self._passed else made
            self._passed = max(0, self._passed - len(made.paths))
            if left.paths:
                yield replace(left, ends_part=parts.get(block.first + len(made.paths)))
            buffers.reverse()

    def _read(self, block: Block, indices: Sequence[int], buffer: Array) -> SampleBlock:
        data = buffer[: block.size_bytes]
        self._spool.take_block(block, data)
        return SampleBlock(
            [self._samples[index].path for index in indices],
            data,
            *offsets_of(block),
            {name: values[np.array(indices)] for name, values in self._attributes.items()},
            self._cursor(block.first + len(block.sizes), block.group_bytes + block.disk_bytes),
        )

    def _cursor(self, position: int, group_bytes: int) -> dict[str, int]:
        return {"position": self._base + position, "group_bytes": group_bytes}


class DescribedObjects(ObjectsSource):
    """A part of the objects of another source, in the order in which they are packed.

    The copy of a block is deleted as soon as it is read: a part that is begun anew by another
    process is fetched anew.

    Args:
        part: the description of the part.
        spool: the spool, which has taken the objects.
        limit_bytes: most bytes of copies; at least those of one block are needed, and taken.

    Raises:
        FormatError: the description is none.
    """

    def __init__(self, part: ObjectsPart, spool: Spool, limit_bytes: int) -> None:
        self.name = to_text(part.name)
        self.bad = current()
        self._spool = spool
        paths = split_paths(part.sample_paths)
        if len(paths) != len(spool.objects):
            raise malformed("expected as many paths as objects")
        self._samples = [
            _Sample(path, fetch, "") for path, fetch in zip(paths, spool.objects, strict=True)
        ]
        self._attributes = decode_columns(part.attributes, len(paths))
        self._described_block_bytes = part.block_bytes
        self._limit_bytes = max(limit_bytes, round_up(part.block_bytes))
        self._choose(np.arange(len(paths), dtype=np.uint64))
        self._base = part.first
        self._position = self._group_bytes = self._passed = 0

    @property
    def _block_bytes(self) -> int:
        return self._described_block_bytes

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every object of the part once; layout and seed have given the part its order."""
        return self._stream(np.arange(len(self._chosen), dtype=np.uint64), (layout, seed), [])

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Return None: a part has no parts."""
        return Source.divide(self, layout=layout, seed=seed, part_bytes=part_bytes)

    def _read(self, block: Block, indices: Sequence[int], buffer: Array) -> SampleBlock:
        made = super()._read(block, indices, buffer)
        self._spool.end_group()
        self._spool.delete_committed()
        return made
