"""DLFS through its sample API: epochs, batches on demand, cached batches, single samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.datasets import DATASET, Scene
from bench.measurement import CHECKED, Environment, Measurement, Tally
from bench.resources import timed

DEPTH = 128
"""Operations in flight, the same for fio and the bare reader."""

WHOLE = 1.25
"""Memory as a share of the data that is enough for all of it and the batches in progress."""

UNLIMITED_SECONDS = 600
"""Time limit of passes that are to run to their end."""


@contextmanager
def open_dataset(scene: Scene, share: float, depth: int = DEPTH) -> Iterator[dlfs.Dataset]:
    """Open a scene's dataset with memory for a share of the data."""
    memory_bytes = scene.memory_bytes(share)
    with (
        dlfs.open(str(scene.volume), memory_bytes=memory_bytes, depth=depth) as volume,
        volume.dataset(DATASET) as dataset,
    ):
        yield dataset.open()


def fill_memory(dataset: dlfs.Dataset, batch: int) -> None:
    """Read all samples into the dataset's memory: in several passes if it is provided slowly."""
    before, fewest = dataset.stats()["reads"], math.inf
    reads = math.inf
    while reads > 0:
        with dataset.batches(batch, shuffle="chunk") as epoch:
            for found in epoch:
                found.release()
        after = dataset.stats()["reads"]
        before, reads = after, after - before
        if reads >= fewest:
            break  # there is not memory for all
        fewest = reads


def share_text(share: float) -> str:
    return "all in memory" if share >= 1 else f"budget 1/{round(1 / share)}"


@dataclass(frozen=True)
class Epoch:
    """An epoch through ``Dataset.batches``, read ahead.

    Attributes:
        shuffle: ``global`` or ``chunk``.
        share: memory budget as a share of the data.
        whole: read to the end; else stop when the time is over.
    """

    shuffle: str
    share: float
    whole: bool = True

    @property
    def label(self) -> str:
        return f"DLFS {self.shuffle} epoch, {share_text(self.share)}"

    def run(self, environment: Environment) -> Measurement:
        environment.machine.drop_caches()
        with open_dataset(environment.scene, self.share) as dataset:
            return measure_epoch(dataset, environment, self.shuffle, whole=self.whole)


def measure_epoch(
    dataset: dlfs.Dataset,
    environment: Environment,
    shuffle: str,
    *,
    whole: bool,
    servers: Sequence[int] = (),
) -> Measurement:
    """Measure an epoch to its end, or until the time is over.

    The CPU time of the processes that serve the dataset counts as well.
    """
    scene, tally = environment.scene, Tally()
    seconds = UNLIMITED_SECONDS if whole else environment.limits.seconds
    with timed(servers=servers) as watch:
        until = time.perf_counter() + seconds
        epoch = dataset.batches(
            scene.spec.batch,
            seed=environment.limits.seed,
            epoch=environment.round,
            shuffle=shuffle,
        )
        with epoch:
            for batch in epoch:
                tally.add_batch(batch)
                batch.release()
                if time.perf_counter() > until:
                    break
            plan = epoch.plan if tally.samples < len(scene) else ""
    stats = dataset.stats()
    if not plan:  # the epoch has ended; another one has the same plan
        with dataset.batches(scene.spec.batch, shuffle=shuffle) as other:
            plan = other.plan
    return tally.result(scene.source, watch, plan=plan, stats=stats)


@dataclass(frozen=True)
class Batches:
    """Random batches on demand through ``Dataset.read``, without reading ahead.

    They contain the samples that are plain files, too, in the same order.

    Attributes:
        share: memory budget as a share of the data.
        depth: operations in flight.
    """

    share: float
    depth: int = DEPTH

    @property
    def label(self) -> str:
        depth = "" if self.depth == DEPTH else f", depth {self.depth}"
        return f"DLFS read() of random batches, {share_text(self.share)}{depth}"

    def run(self, environment: Environment) -> Measurement:
        environment.machine.drop_caches()
        with open_dataset(environment.scene, self.share, self.depth) as dataset:
            return measure_batches(dataset, environment)


def measure_batches(
    dataset: dlfs.Dataset, environment: Environment, servers: Sequence[int] = ()
) -> Measurement:
    """Measure random batches of the samples that are plain files, until the time is over.

    The CPU time of the processes that serve the dataset counts as well.
    """
    scene = environment.scene
    order = scene.file_order(environment.round)
    with timed(servers=servers) as watch:
        tally = read_batches(dataset, order, scene.spec.batch, environment.limits.seconds)
    return tally.result(scene.source, watch, stats=dataset.stats())


def read_batches(
    dataset: dlfs.Dataset,
    order: NDArray[np.int64],
    size: int,
    seconds: float,
    *,
    again: bool = False,
) -> Tally:
    """Read batches until the order or the time is over; with ``again``, only until the time is."""
    tally = Tally()
    until = time.perf_counter() + seconds
    while True:
        for first in range(0, len(order), size):
            with dataset.read(order[first : first + size]) as batch:
                tally.add_batch(batch)
            if time.perf_counter() > until:
                return tally
        if not again:
            return tally


@dataclass(frozen=True)
class Cached:
    """Random batches of samples that are in DLFS's memory: views, without a copy.

    A first pass that fills the memory is not timed.
    """

    label = "DLFS read() of batches in memory"

    def run(self, environment: Environment) -> Measurement:
        with open_dataset(environment.scene, WHOLE) as dataset:
            return measure_cached(dataset, environment)


def measure_cached(
    dataset: dlfs.Dataset, environment: Environment, servers: Sequence[int] = ()
) -> Measurement:
    """Fill the memory, then measure random batches over all samples.

    The CPU time of the processes that serve the dataset counts as well.
    """
    scene, size = environment.scene, environment.scene.spec.batch
    order = scene.random_order(environment.round)
    fill_memory(dataset, size)
    read_batches(dataset, order, size, UNLIMITED_SECONDS)
    before = dataset.stats()["reads"]
    with timed(servers=servers) as watch:
        tally = read_batches(dataset, order, size, environment.limits.seconds, again=True)
    return tally.result(scene.source, watch, reads=dataset.stats()["reads"] - before)


@dataclass(frozen=True)
class Get:
    """Single samples through ``Dataset.get(path)``, as bytes.

    Attributes:
        cold: no sample is in memory; else all are.
    """

    cold: bool

    @property
    def label(self) -> str:
        return f"DLFS get(path), {'cold' if self.cold else 'warm'}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        order = scene.file_order(environment.round)
        environment.machine.drop_caches()
        with open_dataset(scene, 1 / 16 if self.cold else WHOLE) as dataset:
            dataset.index_of([scene.source.path(0)])  # loads the names
            if not self.cold:
                read_batches(dataset, order, scene.spec.batch, UNLIMITED_SECONDS)
            paths = [scene.source.path(index) for index in order[:200_000].tolist()]
            tally = Tally()
            with timed() as watch:
                until = time.perf_counter() + environment.limits.seconds
                for number, path in enumerate(paths):
                    data = dataset.get(path)
                    tally.samples += 1
                    tally.bytes += len(data)
                    if number % 64 == 0:
                        if number < 64 * CHECKED:
                            tally.remembered[int(order[number])] = data
                        if time.perf_counter() > until:
                            break
        return tally.result(scene.source, watch)
