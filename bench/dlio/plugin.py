"""DLIO's data loader on DLFS's sample API, by DLIO's own option for such classes.

    ++workload.reader.data_loader_classname=bench.dlio.plugin.DlfsDataLoader
    ++workload.reader.data_loader_sampler=none

DLIO passes no options of its own to such a class, so two environment variables name its dataset:
``DLFS_DLIO_VOLUME``, a URI for ``dlfs.connect`` (``unix:...``) or ``dlfs.open``, and
``DLFS_DLIO_DATASET``. Threads, look-ahead, batch size, seed and rank are DLIO's own options. This
module imports DLIO, so that only DLIO should import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, FormatType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

import dlfs
from bench.dlio.feed import DATASET, DECODERS, VOLUME, Feed


class DlfsDataLoader(BaseDataLoader):
    """Passes batches of a DLFS dataset to DLIO, decoded as DLIO's own readers decode them.

    DLIO trains on one made-up image instead of the samples. A batch is that image repeated for each
    sample that was decoded. Like DLIO's own reader of TFRecords, it makes no copies of the image.
    """

    def __init__(
        self, format_type: FormatType, dataset_type: DatasetType, epoch_number: int
    ) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._feed: Feed | None = None

    def read(self) -> None:
        """Open the dataset. DLIO calls this once, before the first epoch."""
        uri = os.environ[VOLUME]
        volume = dlfs.connect(uri) if uri.startswith("unix:") else dlfs.open(uri)
        options = self._args
        self._feed = Feed(
            volume[os.environ[DATASET]],
            self.batch_size,
            DECODERS[self.format_type.value],
            seed=options.seed,
            rank=options.my_rank,
            world_size=options.comm_size,
            threads=max(1, options.read_threads),
            lookahead=max(1, options.prefetch_size),
        )

    def next(self) -> Iterator[np.ndarray]:
        """Yield an epoch's batches, ``uint8[batch_size, side, side]`` each."""
        super().next()
        assert self._feed is not None, "DLIO calls read() first"
        image = self._args.resized_image
        for count in self._feed.epoch(self.epoch_number):
            yield np.broadcast_to(image, (count, *image.shape))
        self.epoch_number += 1

    def finalize(self) -> None:
        """Do nothing. DLIO calls this after each epoch, and the next one uses the open dataset."""
