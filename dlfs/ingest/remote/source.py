"""A source whose files are local copies of remote objects."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from dlfs.base.arguments import Layout
from dlfs.ingest.remote.spool import Spool
from dlfs.ingest.source import SampleBlock, Source, WrappedSource


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
        with (
            self._spool.named(),
            closing(self._source.blocks(layout=layout, seed=seed)) as blocks,
        ):
            yield from blocks
        self._take_facts()

    def finish(self) -> None:
        """Delete the local copies; see ``Source.finish``."""
        self._source.close()
        self._spool.remove()

    def close(self) -> None:
        """Close the source, and unlock the local copies for the next import."""
        self._source.close()
        self._spool.close()
