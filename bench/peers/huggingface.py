"""Hugging Face datasets: an Arrow file mapped into memory, rows gathered by ``dataset[indices]``.

The column is plain binary, so nothing is decoded. In Arrow's format the rows of a batch are slices
of the mapping, which cost nothing until someone looks at them; they are put together in memory by
Arrow. That is twice as fast as the default format, which makes a Python object of each.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.peers.columns import DATA, INDEX, ColumnSamples, gathered
from bench.peers.packages import needed
from bench.peers.peer import GLOBAL, Peer, Source

NAME = "dataset"


class HuggingFaceReader:
    """An opened dataset."""

    own_order = GLOBAL

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._column = dataset.select_columns([DATA])

    def read(self, indices: Sequence[int]) -> ColumnSamples:
        """One gather."""
        return gathered(self._column[list(indices)][DATA])

    def epoch(self, seed: int, batch: int) -> Iterator[ColumnSamples]:
        """The dataset's `shuffle`: a permutation of its rows, kept in memory."""
        shuffled = self._dataset.shuffle(seed=seed, keep_in_memory=True)
        for table in shuffled.iter(batch_size=batch):
            yield gathered(table[DATA], table[INDEX].to_numpy())

    def close(self) -> None:
        """There is no close: the mapping goes with the last reference."""
        self._dataset = self._column = None


class HuggingFace:
    """Hugging Face datasets on disk."""

    name = "huggingface"
    about = "Dataset[indices], Arrow format, load_from_disk (datasets documentation, PyArrow)"
    packages = ("datasets", "pyarrow")
    random = True

    def prepare(self, source: Source, folder: Path) -> None:
        """`from_generator`, then `save_to_disk`; the cache in between is removed."""
        datasets = _datasets()
        features = datasets.Features(
            {INDEX: datasets.Value("int64"), DATA: datasets.Value("large_binary")}
        )
        cache = folder / "cache"
        dataset = datasets.Dataset.from_generator(
            lambda: ({INDEX: index, DATA: data} for index, _, data in source),
            features=features,
            cache_dir=str(cache),
            fingerprint="samples",  # else it pickles the source to tell whether it knows it
        )
        dataset.save_to_disk(folder / NAME)
        del dataset
        shutil.rmtree(cache)

    def open(self, folder: Path) -> HuggingFaceReader:
        """Map the files."""
        return HuggingFaceReader(_datasets().load_from_disk(folder / NAME).with_format("arrow"))


def _datasets() -> Any:
    """The package, which then neither draws progress bars nor asks its hub for anything."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets = needed("datasets")
    datasets.disable_progress_bars()
    return datasets


PEERS: tuple[Peer, ...] = (HuggingFace(),)
