"""Lance: `take` of row offsets, a batch at a time.

The default file format of the release, which keeps values of this size without compression and
reads each by one request; a hundred of them and more are under way at a time. Rows of a batch are
put together in memory by Lance, so its array is handed out as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.columns import DATA, ColumnSamples, record_batches
from bench.peers.packages import needed
from bench.peers.peer import Peer, Source

NAME = "samples.lance"


class LanceReader:
    """An opened table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def read(self, indices: Sequence[int]) -> ColumnSamples:
        """One `take`."""
        taken = self._table.take(list(indices), columns=[DATA])
        return ColumnSamples(taken[DATA].chunk(0))

    def close(self) -> None:
        """Lance has no close: the table and its files go with the last reference."""
        self._table = None


class Lance:
    """Lance, global order by `take`."""

    name = "lance"
    about = "LanceDataset.take of a batch's rows (Lance documentation, Random Access)"
    packages = ("pylance", "pyarrow")
    random = True

    def prepare(self, source: Source, folder: Path) -> None:
        """Write one table of one column, in record batches as they come."""
        lance, pyarrow = needed("lance", "pylance"), needed("pyarrow")
        schema = pyarrow.schema([(DATA, pyarrow.large_binary())])
        reader = pyarrow.RecordBatchReader.from_batches(schema, record_batches(source))
        lance.write_dataset(reader, str(folder / NAME))

    def open(self, folder: Path) -> LanceReader:
        """Open the table."""
        return LanceReader(needed("lance", "pylance").dataset(str(folder / NAME)))


PEERS: tuple[Peer, ...] = (Lance(),)
