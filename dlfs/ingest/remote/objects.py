"""Objects that are samples, as the files of a folder are: from the spool's blocks into a dataset.

The paths, their order and their classes come from the listing, as those of a folder come from its
directories; see ``ingest.formats.folder``. The objects are fetched in the order of packing, and
read block by block while further ones are fetched.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlfs.base.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current
from dlfs.ingest.formats.folder import class_columns, count_hidden, outside_classes
from dlfs.ingest.order import packing_order, position_after
from dlfs.ingest.remote.blocks import Block, Division, offsets_of
from dlfs.ingest.remote.fetching import Fetch
from dlfs.ingest.remote.spool import Root, Spool
from dlfs.ingest.source import (
    Array,
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
    path: bytes
    fetch: Fetch


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
        self._position, self._group_bytes, self._passed = 0, 0, 0

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
            self._position = int(cursor.value["position"])
            self._group_bytes = int(cursor.value["group_bytes"])
            self._passed = position_after(count, cursor) - self._position
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Fetch and read every object once; see ``Source.blocks``."""
        order = packing_order(len(self._chosen), layout=layout, seed=seed)
        return stream_ahead(
            self._in_order(order, (layout, seed)), bad=self.bad, cancel=self._spool.cancel
        )

    def _choose(self, indices: Uint64Array) -> None:
        """Import only some of the samples."""
        self._chosen = indices
        self.sample_count = len(indices)
        items = [self._samples[index].fetch.item for index in indices.tolist()]
        if all(item.has_size for item in items):
            self.sample_bytes = sum(item.size_bytes for item in items)

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
                inside.append(_Sample(path, fetch))
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

    def _in_order(
        self, order: Uint64Array, kind: tuple[Layout, int]
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks in an order, and a block without samples where a step has to end."""
        indices = self._chosen[order][self._position :].tolist()
        if not indices[self._passed :]:
            return
        block_bytes = max(1, min(self.buffer_bytes, self._limit_bytes // 4))
        state = self._position, self._group_bytes
        division = Division(*state, block_bytes, self._limit_bytes // 2)
        fetches = [self._samples[index].fetch for index in indices]
        chosen = hashlib.blake2b(self._chosen.tobytes()).hexdigest()
        plan = fingerprint_of(self._spool.fingerprint, chosen, *kind, block_bytes)
        self._spool.fetch_blocks(fetches, plan, division, self._passed, self._limit_bytes)
        buffers = [np.empty(0, np.uint8) for _ in range(2)]
        done = 0
        while done < len(indices):
            block = self._spool.wait_for_block(begins_group=True)
            if block.begins_group:
                cursor = {"position": block.first, "group_bytes": 0}
                self._spool.end_group()
                yield SampleBlock.empty(cursor, ends_step=True)
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
                yield left
            buffers.reverse()

    def _read(self, block: Block, indices: Sequence[int], buffer: Array) -> SampleBlock:
        data = buffer[: block.size_bytes]
        self._spool.take_block(block, data)
        return SampleBlock(
            [self._samples[index].path for index in indices],
            data,
            *offsets_of(block),
            {name: values[np.array(indices)] for name, values in self._attributes.items()},
            {
                "position": block.first + len(block.sizes),
                "group_bytes": block.group_bytes + block.disk_bytes,
            },
        )
