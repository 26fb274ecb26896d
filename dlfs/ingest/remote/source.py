"""A source whose files are local copies of remote objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing

from dlfs.base.arguments import Layout
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.source import SampleBlock, Source


class SpooledSource(Source):
    """A source of a format that reads the files of a spool. Errors name URLs.

    Args:
        source: the source; closed with this object.
        spool: the spool; closed with this object.
    """

    def __init__(self, source: Source, spool: Spool) -> None:
        self._source = source
        self._spool = spool
        self.name = spool.show(source.name)
        self.sample_count = source.sample_count
        self.sample_bytes = source.sample_bytes
        self.gives_shuffled = source.gives_shuffled
        self._take_counts()

    def _take_counts(self) -> None:
        self.skipped = Counter(self._source.skipped)
        self.empty_directories = self._source.empty_directories

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Leave out samples of the wrapped source; see ``Source.leave_out``."""
        count = self._source.leave_out(is_known)
        self.sample_count = self._source.sample_count
        self.sample_bytes = self._source.sample_bytes
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the source's blocks; see ``Source.blocks``."""
        with (
            self._spool.named(),
            closing(self._source.blocks(layout=layout, seed=seed)) as blocks,
        ):
            yield from blocks
        self._take_counts()

    def finish(self) -> None:
        """Delete the local copies; see ``Source.finish``."""
        self._source.close()
        self._spool.remove()

    def close(self) -> None:
        """Close the source, and unlock the local copies for the next import."""
        self._source.close()
        self._spool.close()
