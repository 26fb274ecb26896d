"""Hugging Face datasets: an Arrow file mapped into memory, rows gathered by ``dataset[indices]``.

The column is plain binary, so that nothing is decoded. In Arrow's format the rows of a batch are
slices of the mapping, whose pages are not read yet; Arrow copies them into one piece of memory.
That is twice as fast as the default format, which makes a Python object of each row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source
from bench.peers.columns import gathered
from bench.peers.packages import DATA, INDEX, needed
from bench.peers.peer import GLOBAL, Joined, Peer, Reader

NAME = "dataset"


class HuggingFace(Peer):
    """Hugging Face datasets on disk, written by `from_generator` and `save_to_disk`."""

    name = "huggingface"
    about = "Dataset[indices], Arrow format, load_from_disk (datasets documentation, PyArrow)"
    packages = ("datasets", "pyarrow")

    def prepare(self, source: Source, folder: Path) -> None:
        datasets = _datasets()
        features = datasets.Features(
            {INDEX: datasets.Value("int64"), DATA: datasets.Value("large_binary")}
        )
        cache = folder / "cache"
        dataset = datasets.Dataset.from_generator(
            lambda: ({INDEX: index, DATA: data} for index, _, data in source),
            features=features,
            cache_dir=str(cache),
            fingerprint="samples",  # else it pickles the source to compute one
        )
        dataset.save_to_disk(folder / NAME)
        del dataset
        shutil.rmtree(cache)

    def open(self, folder: Path) -> Reader:
        dataset = _datasets().load_from_disk(folder / NAME).with_format("arrow")
        column = dataset.select_columns([DATA])

        def epoch(
            seed: int, batch: int
        ) -> Generator[tuple[NDArray[np.integer], Joined], None, None]:
            shuffled = dataset.shuffle(seed=seed, keep_in_memory=True)
            for table in shuffled.iter(batch_size=batch):
                yield table[INDEX].to_numpy(), gathered(table[DATA])

        # There is no call to close a dataset: the mapping ends with the last reference.
        return Reader(
            lambda indices: gathered(column[list(indices)][DATA]), epoch, own_order=GLOBAL
        )


def _datasets() -> Any:
    """Import the package, without progress bars and requests to its hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets = needed("datasets")
    datasets.disable_progress_bars()
    return datasets


PEERS = (HuggingFace(),)
