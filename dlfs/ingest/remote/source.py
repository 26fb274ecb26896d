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
from typing import Any

from dlfs.base.arguments import Layout
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current, opening
from dlfs.ingest.order import packing_order
from dlfs.ingest.remote.fetching import Fetch
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.source import (
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
    """

    def __init__(self, source: Source, spool: Spool) -> None:
        super().__init__(source)
        self._spool = spool
        self.name = spool.show(source.name)
        self.bad.show = spool.show

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the source's blocks; see ``Source.blocks``."""
        self._source.buffer_bytes = min(self._source.buffer_bytes, self.buffer_bytes)
        with (
            self._spool.named(),
            closing(self._source.blocks(layout=layout, seed=seed)) as blocks,
        ):
            for block in blocks:
                yield block
                if block.ends_step:
                    self._spool.delete_committed()
        self._take_facts()
        self.left_out = self._source.left_out

    def finish(self) -> None:
        """Delete the local copies; see ``Source.finish``."""
        self._source.close()
        self._spool.remove()

    def close(self) -> None:
        """Close the source, and unlock the local copies for the next import."""
        self._source.close()
        self._spool.close()


class ArrivingShards(Source):
    """Objects of a format that are opened one after the other, each when it has been fetched.

    They are read in the given order for layout ``path``, and in an order drawn from the seed for
    ``shuffled``; the dataset writer shuffles within its window. The manifest of the spool keeps
    what a shard has besides samples, for an import that goes on behind it.

    Args:
        spool: the spool.
        limit_bytes: most bytes of copies.
        shards: the objects.
        open_shard: function that opens the copy of one as a source.
        fingerprint: differs for other objects and options.
    """

    def __init__(
        self,
        spool: Spool,
        limit_bytes: int,
        shards: Sequence[Fetch],
        open_shard: Callable[[str], Source],
        fingerprint: str,
    ) -> None:
        self.name = source_name([one.target for one in shards])
        self.bad = current()
        self.fingerprint = fingerprint
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._shards = shards
        self._open_shard = open_shard
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
        order = packing_order(len(self._shards), layout=layout, seed=seed)
        shards = [self._shards[number] for number in order.tolist()]
        present = self._find_present(shards)
        unknown = (number for number in range(present) if not self._take_facts(shards[number]))
        first = next(unknown, present)  # its facts are lost with an earlier spool
        ends = self._spool.fetch_in_order(shards, first, self._limit_bytes)[:-1]
        for number, shard in enumerate(shards[first:], first):
            self._spool.wait(number + 1)
            with closing(self._blocks_of(shard, number, layout, seed)) as blocks:
                for block in blocks:
                    if number >= present:
                        yield block
            ended = {"shard": number + 1, "count": 0} if number >= present else None
            yield SampleBlock.empty(ended, ends_step=number + 1 in ends)
        self.empty_directories = list(self._empty)

    def _blocks_of(
        self, shard: Fetch, number: int, layout: Layout, seed: int
    ) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of a shard behind those that an earlier import has used."""
        used, inner = 0, {}
        if number == self._at.get("shard", 0):
            used = self._used
            inner = {key: value for key, value in self._at.items() if key.startswith("inner")}
        # What was found when it was opened first counts since then.
        with opening(self.bad), self.bad.ignore() if used else nullcontext():
            source = self._open_shard(shard.target)
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
                    at = {"shard": number, "count": used, **inner}
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
        present = self._at.get("shard", 0)
        if self.bad.are_allowed:  # there may be bad ones behind the last sample
            return int(present)
        while present < len(shards) and self._facts_of(shards[present]).get("count") == self._used:
            present, self._used = present + 1, 0
            self._at = {"shard": present, "count": 0}
        return int(present)

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
