"""Samples with named fields as tensors: DLFS's Loader, and h5py in PyTorch's DataLoader.

Every contender gives batches of an epoch in random order: tensors of the fields with a fixed shape,
lists of tensors of those that vary, lists of str of text. The Loader reads in this process. The
DataLoader has two workers, which send their batches through shared memory, as PyTorch does; they
have been started when an epoch begins. Its files stay in the kernel's page cache after they were
read once, and the Loader has as much memory for a second epoch.

Each contender reads a first epoch, cold, or a second one after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import dlfs
from bench.contenders.samples import DEPTH, WHOLE, share_text
from bench.datasets import DATASET, Scene
from bench.field_samples import ELEMENTS, PLAIN, ROWS, TEXT, FieldSource, join_values
from bench.measurement import Environment, Measurement, Tally
from bench.peers.hdf5 import Rows
from bench.peers.packages import INDEX, needed
from bench.resources import timed, tree_cpu_seconds

WORKERS = 2
"""Worker processes of the DataLoader."""

Taken = tuple[Any, Callable[[int], bytes]]
"""Indices of a batch's samples, and a function that returns the bytes of one at a position."""


def _epoch_text(*, cold: bool) -> str:
    return "cold" if cold else "second epoch"


def _measure(
    environment: Environment,
    start: Callable[[int], Iterable[Any]],
    take: Callable[[Any], Taken],
    *,
    cold: bool,
) -> Measurement:
    """Measure the first epoch, with cold caches, or the second one after it.

    Args:
        environment: the data and the limits.
        start: begins an epoch of a number, and returns its batches.
        take: gives the indices and the samples of a batch.
        cold: measure the first one.
    """
    scene = environment.scene
    environment.machine.require_cold()
    if not cold:
        for _ in start(0):
            pass
    tally = Tally()
    with timed(tree_cpu_seconds) as watch:
        for batch in start(0 if cold else 1):
            indices, data = take(batch)
            tally.add(indices, int(scene.source.lengths[indices].sum()), data)
    return tally.result(scene.source, watch)


@dataclass(frozen=True)
class FieldLoader:
    """DLFS's Loader.

    Attributes:
        fields: samples with fields; else the same bytes without.
        cold: measure the first epoch; else the second.
        share: memory budget as a share of the data.
    """

    fields: bool = True
    cold: bool = True
    share: float = WHOLE

    @property
    def label(self) -> str:
        what = "fields" if self.fields else "the same bytes without fields"
        return f"DLFS Loader, {what}, {_epoch_text(cold=self.cold)}, {share_text(self.share)}"

    def run(self, environment: Environment) -> Measurement:
        needed("torch")
        from dlfs.adapters.torch import Loader

        scene = environment.scene
        name = DATASET if self.fields else PLAIN
        with (
            dlfs.open(
                str(scene.volume), memory_bytes=scene.memory_bytes(self.share), depth=DEPTH
            ) as volume,
            volume.dataset(name) as dataset,
        ):
            same = len(set(scene.source.lengths.tolist())) == 1
            loader = Loader(
                dataset.open(),
                scene.spec.batch,
                seed=scene.seed + environment.round,
                collate="stack" if same and not self.fields else "auto",
            )
            take = _take_fields if self.fields else _take_bytes
            found = _measure(environment, lambda _: loader, take, cold=self.cold)
            found.notes["stats"] = dataset.stats()
            return found


def _take_fields(batch: Any) -> Taken:
    return batch.indices.numpy(), lambda at: _sample_bytes(batch, at)


def _take_bytes(batch: Any) -> Taken:
    return batch.indices.numpy(), lambda at: batch.samples[at].numpy().tobytes()


def _sample_bytes(fields: Mapping[str, Any], position: int) -> bytes:
    return join_values({name: values[position] for name, values in fields.items()})


@dataclass(frozen=True)
class Hdf5Loader:
    """h5py in PyTorch's DataLoader.

    Attributes:
        rows: a sample is a row or a slice of contiguous datasets; else it is stored as users do.
        cold: measure the first epoch; else the second.
    """

    rows: bool
    cold: bool = True

    @property
    def label(self) -> str:
        how = "contiguous rows" if self.rows else "as its users store it"
        return f"h5py in DataLoader, {how}, {_epoch_text(cold=self.cold)}"

    def run(self, environment: Environment) -> Measurement:
        torch = needed("torch")
        scene = environment.scene
        order: list[int] = []  # of the next epoch
        loader = torch.utils.data.DataLoader(
            _Hdf5Samples(scene, rows=self.rows),
            scene.spec.batch,
            sampler=order,
            num_workers=WORKERS,
            persistent_workers=True,
            collate_fn=_collate,
        )
        list(loader)  # starts the workers

        def start(epoch: int) -> Iterator[Any]:
            order[:] = scene.random_order(environment.round, epoch).tolist()
            return iter(loader)

        return _measure(environment, start, _take_collated, cold=self.cold)


class _Hdf5Samples:
    """Map-style dataset of samples in HDF5. Each worker opens its files itself."""

    def __init__(self, scene: Scene, *, rows: bool) -> None:
        assert isinstance(scene.source, FieldSource)
        self._folder, self._files, self._source = scene.folder, scene.files, scene.source
        self._rows = rows
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self._rows and self._source.has_files:
            path = self._files / os.fsdecode(self._source.path(index))
            with needed("h5py").File(path) as file:
                return {INDEX: index, **{name: file[name][()] for name in self._source.fields}}
        if not self._columns:
            file = needed("h5py").File(self._folder / (ROWS if self._rows else ELEMENTS))
            make = Rows if self._rows else _elements
            self._columns = {name: make(file, name) for name in self._source.fields}
        sample = {name: column[index] for name, column in self._columns.items()}
        if self._rows and TEXT in sample:
            sample[TEXT] = sample[TEXT].tobytes().decode()
        return {INDEX: index, **sample}


def _elements(file: Any, name: str) -> Any:
    return file[name].asstr() if name == TEXT else file[name]


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the values of each field: arrays of one shape are stacked, others stay a list.

    Images become one tensor and their lengths: a tensor for each would need a descriptor each.
    """
    torch = needed("torch")
    found: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        shapes = {np.shape(value) for value in values}
        if isinstance(values[0], str):
            found[name] = values
        elif len(shapes) == 1:
            found[name] = torch.utils.data.default_collate(values)
        elif values[0].ndim == 1:
            lengths = [len(value) for value in values]
            found[name] = (torch.cat([torch.from_numpy(value) for value in values]), lengths)
        else:
            found[name] = [torch.from_numpy(value) for value in values]
    return found


def _take_collated(batch: dict[str, Any]) -> Taken:
    torch = needed("torch")
    fields = {
        name: torch.split(*values) if isinstance(values, tuple) else values
        for name, values in batch.items()
    }
    return fields.pop(INDEX).numpy(), lambda at: _sample_bytes(fields, at)
