"""Lance: `take` of row offsets, a batch at a time.

The file format is the default of the release, which stores values of this size without compression
and reads each by one request, more than a hundred of them at a time. Lance copies the rows of a
batch into one piece of memory, so that its array is returned as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.datasets import Source
from bench.peers.columns import joined, record_batches
from bench.peers.packages import DATA, needed
from bench.peers.peer import Joined, Peer, Reader

NAME = "samples.lance"


class Lance(Peer):
    """Lance: one table of one column."""

    name = "lance"
    about = "LanceDataset.take of a batch's rows (Lance documentation, Random Access)"
    packages = ("pylance", "pyarrow")

    def prepare(self, source: Source, folder: Path) -> None:
        lance, pyarrow = needed("lance", "pylance"), needed("pyarrow")
        schema = pyarrow.schema([(DATA, pyarrow.large_binary())])
        reader = pyarrow.RecordBatchReader.from_batches(schema, record_batches(source))
        lance.write_dataset(reader, str(folder / NAME))

    def open(self, folder: Path) -> Reader:
        table = needed("lance", "pylance").dataset(str(folder / NAME))

        def read(indices: Any) -> Joined:
            return joined(table.take(list(indices), columns=[DATA])[DATA].chunk(0))

        return Reader(read)  # Lance closes the table with the last reference


PEERS = (Lance(),)
