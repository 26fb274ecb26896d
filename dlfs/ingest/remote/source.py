"""Sources whose files are local copies of remote objects.

``SpooledSource`` reads copies that are all there. ``ArrivingShards`` reads shards while further
ones are fetched, within the bound of the spool: each is opened when it has been fetched. Its blocks
say where a step of the import has to end, so that the spool can delete the copies of what is
committed; so do those of ``objects.ObjectsSource``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from dlfs.base.arguments import Layout
from dlfs.format.constants import ADDRESS_MAX
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current, opening
from dlfs.ingest.descriptions import ObjectFilesPart, malformed
from dlfs.ingest.file_parts import FileOpener
from dlfs.ingest.order import file_part_ends, packing_order
from dlfs.ingest.remote.described import describe_objects
from dlfs.ingest.remote.fetching import Fetch
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.source import (
    Division,
    SampleBlock,
    Source,
    WrappedSource,
    add_skipped,
    source_name,
    without_first,
)


class SpooledSource(WrappedSource):
    """A source of a format that reads the files of a spool. Errors name URLs.

    Args:
        source: the source; closed with this object.
        spool: the spool; closed with this object.
        is_copied: True if all objects were fetched before.
    """

    def __init__(self, source: Source, spool: Spool, *, is_copied: bool = False) -> None:
        super().__init__(source)
        self._spool = spool
        self._is_copied = is_copied
        self.name = spool.show(source.name)
        self.bad.show = spool.show

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the source's blocks; see ``Source.blocks``."""
        with (
            self._spool.named(),
            closing(self.blocks_of_source(layout=layout, seed=seed)) as blocks,
        ):
            for block in blocks:
                yield block
                if block.ends_step:
                    self._spool.delete_committed()
        self._take_facts()
        self.left_out = self._source.left_out

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the source, if its objects are fetched while it is read; see ``Source.divide``."""
        if self._is_copied:
            self.undivided = (
                "its objects are fetched before they are read; those of a format that is read file "
                "by file are fetched meanwhile if they are more than spool_bytes"
            )
            return None
        with self._spool.named():
            return super().divide(layout=layout, seed=seed, part_bytes=part_bytes)

    def finish(self) -> None:
        """Delete the local copies; see ``Source.finish``."""
        self._source.close()
        self._spool.remove()

    def close(self) -> None:
        """Close the source, and unlock the local copies for the next import."""
        self._source.close()
        self._spool.close()


class SpooledPart(SpooledSource):
    """A part of a source of objects. Its copies are deleted as soon as they are read, or closed."""

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the part's blocks; none of them ends a step. See ``Source.blocks``."""
        with closing(super().blocks(layout=layout, seed=seed)) as blocks:
            for block in blocks:
                yield replace(block, ends_step=False)

    def close(self) -> None:
        """Close the source, and delete its local copies."""
        self._source.close()
        self._spool.discard()


class ArrivingShards(Source):
    """Objects of a format that are opened one after the other, each when it has been fetched.

    They are read in the given order for layout ``path``, and in an order drawn from the seed for
    ``shuffled``; the dataset writer shuffles within its window. The manifest of the spool keeps
    what a shard has besides samples, for an import that goes on behind it.

    Args:
        spool: the spool.
        limit_bytes: most bytes of copies.
        shards: the objects.
        opener: opens the copy of one as a source.
        fingerprint: differs for other objects and options.
    """

    _base = 0  # number of the first object in the order of the source

    def __init__(
        self,
        spool: Spool,
        limit_bytes: int,
        shards: Sequence[Fetch],
        opener: FileOpener,
        fingerprint: str,
    ) -> None:
        self.name = source_name([one.target for one in shards])
        self.bad = current()
        self.fingerprint = fingerprint
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._shards = shards
        self._opener = opener
        self._is_known: Callable[[bytes], bool] | None = None
        self._at: Mapping[str, Any] = {}
        self._used = 0
        self.skipped: Counter[str] = Counter()
        self._empty: dict[bytes, None] = {}

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Leave out samples of each shard when it is opened; see ``Source.leave_out``."""
        self._is_known = is_known
        return 0

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Go on in the shard that the cursor names; see ``Source.seek``."""
        self._used = count
        if cursor is not None:
            self._at = cursor.value
            self._used = cursor.value["count"] + count - cursor.count
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every shard once; see ``Source.blocks``."""
        shards, ends = self._in_order(layout, seed)
        present = self._find_present(shards)
        unknown = (number for number in range(present) if not self._take_facts(shards[number]))
        first = next(unknown, present)  # its facts are lost with an earlier spool
        self._spool.fetch_in_order(shards, first, ends, self._limit_bytes)
        parts = {} if self.part_bytes is None else {end: part for part, end in enumerate(ends)}
        for number, shard in enumerate(shards[first:], first):
            self._spool.wait(number + 1)
            with closing(self._blocks_of(shard, number, layout, seed)) as blocks:
                for block in blocks:
                    if number >= present:
                        yield block
            ended = self._cursor(number + 1, 0) if number >= present else None
            ends_step = number + 1 in ends
            yield SampleBlock.empty(ended, ends_step=ends_step, ends_part=parts.get(number + 1))
        self.empty_directories = list(self._empty)

    def _in_order(self, layout: Layout, seed: int) -> tuple[list[Fetch], list[int]]:
        """Return the shards in the order in which they are read, and where steps have to end."""
        order = packing_order(len(self._shards), layout=layout, seed=seed)
        shards = [self._shards[number] for number in order.tolist()]
        return shards, self._part_ends(shards, self.part_bytes or ADDRESS_MAX)

    def _part_ends(self, shards: Sequence[Fetch], part_bytes: int) -> list[int]:
        sizes = np.array([one.item.size_bytes for one in shards], np.uint64)
        return file_part_ends(sizes, part_bytes, self._limit_bytes // 2)

    def _cursor(self, number: int, count: int, **inner: Any) -> dict[str, Any]:
        return {"shard": self._base + number, "count": count, **inner}

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the objects into runs in the order in which they are read; see ``Source``."""
        order = packing_order(len(self._shards), layout=layout, seed=seed)
        shards = [self._shards[number] for number in order.tolist()]
        bounds = [0, *self._part_ends(shards, part_bytes), len(shards)]
        sizes = [
            sum(one.item.size_bytes for one in shards[first:last])
            for first, last in pairwise(bounds)
        ]
        return Division(sizes, partial(self._describe, shards, bounds))

    def _describe(self, shards: Sequence[Fetch], bounds: Sequence[int], part: int) -> bytes:
        first, last = bounds[part], bounds[part + 1]
        chosen = shards[first:last]
        urls = self._spool.urls_of(chosen)
        sources, objects = describe_objects(
            (url, one.item) for url, one in zip(urls, chosen, strict=True)
        )
        opener = self._opener.describe()
        return msgspec.msgpack.encode(
            ObjectFilesPart(opener, sources, objects, first, self.buffer_bytes)
        )

    def _blocks_of(
        self, shard: Fetch, number: int, layout: Layout, seed: int
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of a shard behind those that an earlier import has used."""
        used, inner = 0, {}
        if number == self._at_shard:
            used = self._used
            inner = {key: value for key, value in self._at.items() if key.startswith("inner")}
        # What was found when it was opened first counts since then.
        with opening(self.bad), self.bad.ignore() if used else nullcontext():
            source = self._opener.open([shard.target])
        with closing(source):
            source.buffer_bytes = self.buffer_bytes
            if self._is_known is not None:
                self.left_out += source.leave_out(self._is_known)
            cursor = Cursor(inner["inner"], inner["inner_count"]) if inner else None
            left = used - source.seek(used, cursor)
            with closing(source.blocks(layout=layout, seed=seed)) as blocks:
                for block in without_first(blocks, left):
                    used += len(block.paths)
                    if block.cursor is not None:
                        inner = {"inner": block.cursor, "inner_count": used}
                    at = self._cursor(number, used, **inner)
                    # Where samples cannot be counted, only the shard's own cursors are places.
                    is_place = block.cursor is not None or not self.bad.are_allowed
                    yield replace(block, cursor=at if is_place else None)
            self.left_out += source.left_out
            empty = [os.fsdecode(path) for path in source.empty_directories]
            skipped = dict(source.skipped)
        facts = {"of": self.fingerprint, "count": used, "skipped": skipped, "empty": empty}
        self._spool.note_facts(shard, facts)
        self._take_facts(shard)

    def _find_present(self, shards: Sequence[Fetch]) -> int:
        """Return the number of the first shard that has samples to read, as far as is known."""
        present = self._at_shard
        if self.bad.are_allowed:  # there may be bad ones behind the last sample
            return present
        while present < len(shards) and self._facts_of(shards[present]).get("count") == self._used:
            present, self._used = present + 1, 0
            self._at = self._cursor(present, 0)
        return present

    @property
    def _at_shard(self) -> int:
        """Number of the shard in which the import goes on."""
        return int(self._at.get("shard", self._base)) - self._base

    def _facts_of(self, shard: Fetch) -> Mapping[str, Any]:
        facts = self._spool.facts_of(shard)
        return facts if facts.get("of") == self.fingerprint else {}

    def _take_facts(self, shard: Fetch) -> bool:
        """Add what a shard has besides samples; return False if it is not known."""
        facts = self._facts_of(shard)
        if not facts:
            return False
        add_skipped(self.skipped, facts["skipped"])
        self._empty.update(dict.fromkeys(map(os.fsencode, facts["empty"])))
        return True


class DescribedShards(ArrivingShards):
    """A part of the objects of another source of shards, in the order in which they are read.

    The copy of a shard is deleted as soon as it is read.

    Args:
        part: the description of the part.
        spool: the spool, which has taken the objects.
        limit_bytes: most bytes of copies.
    """

    def __init__(self, part: ObjectFilesPart, spool: Spool, limit_bytes: int) -> None:
        if not part.objects:
            raise malformed("expected objects")
        opener = FileOpener.of(part.opener)
        super().__init__(spool, limit_bytes, spool.objects, opener, spool.fingerprint)
        self._base = part.first
        self.buffer_bytes = part.buffer_bytes

    def _in_order(self, layout: Layout, seed: int) -> tuple[list[Fetch], list[int]]:
        """Return the shards as they are described, and an end behind each."""
        del layout, seed
        return [*self._shards], [*range(1, len(self._shards))]

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Return None: a part has no parts."""
        return Source.divide(self, layout=layout, seed=seed, part_bytes=part_bytes)
