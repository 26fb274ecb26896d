"""DLFS through its sample API: epochs, batches on demand, cached batches, one sample at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.contestant import CHECKED, Ground, Sample, Watch, check_bytes, timed
from bench.datasets import DATASET, Scene

DEPTH = 128
"""Operations in flight: what fio and the bare reader are given too."""

WHOLE = 1.25
"""Share of the data that holds all of it, with room for batches under way."""


@contextmanager
def _open(scene: Scene, share: float, depth: int = DEPTH) -> Iterator[dlfs.Dataset]:
    memory_bytes = scene.memory_bytes(share)
    with (
        dlfs.open(str(scene.volume), memory_bytes=memory_bytes, depth=depth) as volume,
        volume.dataset(DATASET) as dataset,
    ):
        yield dataset.open()


def _share_text(share: float) -> str:
    return "all in memory" if share >= 1 else f"budget 1/{round(1 / share)}"


@dataclass
class Tally:
    """Counts batches, and keeps a few samples of them to be compared."""

    samples: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        self._batches = 0

    def add(self, batch: dlfs.Batch) -> None:
        """Count a batch."""
        self.samples += len(batch)
        self.bytes += int(batch.lengths.sum())
        if self._batches % 16 == 0 and len(self.kept) < CHECKED:
            position = (self._batches * 37) % len(batch)
            self.kept[int(batch.indices[position])] = batch.tobytes(position)
        self._batches += 1

    def sample(self, scene: Scene, watch: Watch, **notes: object) -> Sample:
        """What it comes to, after comparing the samples that were kept."""
        checked = check_bytes(scene, self.kept)
        return Sample(
            self.samples, self.bytes, watch.seconds, watch.cpu_seconds, checked, dict(notes)
        )


@dataclass(frozen=True)
class Epoch:
    """An epoch through ``Dataset.batches``, read ahead.

    Attributes:
        shuffle: ``global`` or ``chunk``.
        share: memory budget as a share of the data.
        whole: to the end; else it stops when its time is over.
        plan: how to read ahead.
    """

    shuffle: str
    share: float
    whole: bool = True
    plan: str = "auto"

    @property
    def label(self) -> str:
        """In tables."""
        plan = "" if self.plan == "auto" else f", plan {self.plan}"
        return f"DLFS {self.shuffle} epoch, {_share_text(self.share)}{plan}"

    def run(self, ground: Ground) -> Sample:
        """One epoch, or as much of it as there is time for."""
        scene, tally = ground.scene, Tally()
        ground.machine.drop_caches()
        with _open(scene, self.share) as dataset:
            seconds = 600 if self.whole else ground.limits.seconds
            with timed() as watch:
                until = time.perf_counter() + seconds
                epoch = dataset.batches(
                    scene.spec.batch,
                    seed=ground.limits.seed,
                    epoch=ground.round,
                    shuffle=self.shuffle,
                    plan=self.plan,
                )
                with epoch:
                    for batch in epoch:
                        tally.add(batch)
                        batch.release()
                        if time.perf_counter() > until:
                            break
                    plan = epoch.plan if tally.samples < len(scene) else ""
            stats = dataset.stats()
            plan = plan or self._plan_of(dataset, scene)
        return tally.sample(scene, watch, plan=plan, stats=stats)

    def _plan_of(self, dataset: dlfs.Dataset, scene: Scene) -> str:
        """The plan that the epoch had: asked of another, since it has ended."""
        with dataset.batches(scene.spec.batch, shuffle=self.shuffle, plan=self.plan) as other:
            return other.plan


@dataclass(frozen=True)
class Batches:
    """Random batches on demand through ``Dataset.read``: no look-ahead beyond a batch.

    Attributes:
        share: memory budget as a share of the data.
        depth: operations in flight.
    """

    share: float
    depth: int = DEPTH

    @property
    def label(self) -> str:
        """In tables."""
        depth = "" if self.depth == DEPTH else f", depth {self.depth}"
        return f"DLFS read() of random batches, {_share_text(self.share)}{depth}"

    def run(self, ground: Ground) -> Sample:
        """Batches of the samples that are plain files too, in the same order."""
        scene = ground.scene
        ground.machine.drop_caches()
        with _open(scene, self.share, self.depth) as dataset:
            order = scene.file_order(ground.round)
            with timed() as watch:
                tally = read_batches(dataset, order, scene.spec.batch, ground.limits.seconds)
            return tally.sample(scene, watch, stats=dataset.stats())


def read_batches(
    dataset: dlfs.Dataset,
    order: NDArray[np.int64],
    size: int,
    seconds: float,
    *,
    again: bool = False,
) -> Tally:
    """Read batches until the order or the time is over; with ``again``, until the time is."""
    tally = Tally()
    until = time.perf_counter() + seconds
    while True:
        for first in range(0, len(order), size):
            with dataset.read(order[first : first + size]) as batch:
                tally.add(batch)
            if time.perf_counter() > until:
                return tally
        if not again:
            return tally


@dataclass(frozen=True)
class Cached:
    """Random batches of samples that are in DLFS's memory: the second pass, views, no copy."""

    @property
    def label(self) -> str:
        """In tables."""
        return "DLFS read() of batches in memory"

    def run(self, ground: Ground) -> Sample:
        """One pass to fill the memory, untimed; then random batches over all samples."""
        scene = ground.scene
        with _open(scene, WHOLE) as dataset:
            everything = np.random.default_rng([scene.seed, ground.round]).permutation(len(scene))
            size = scene.spec.batch
            with dataset.batches(size, shuffle="chunk") as epoch:
                for batch in epoch:
                    batch.release()
            read_batches(dataset, everything, size, 600)
            before = dataset.stats()
            with timed() as watch:
                tally = read_batches(dataset, everything, size, ground.limits.seconds, again=True)
            reads = dataset.stats()["reads"] - before["reads"]
            return tally.sample(scene, watch, reads=reads)


@dataclass(frozen=True)
class Get:
    """``Dataset.get(path)``: one sample at a time, by its path, as bytes.

    Attributes:
        cold: nothing of the data in memory; else all of it.
    """

    cold: bool

    @property
    def label(self) -> str:
        """In tables."""
        return f"DLFS get(path), {'cold' if self.cold else 'warm'}"

    def run(self, ground: Ground) -> Sample:
        """Samples in the plain files' random order."""
        scene = ground.scene
        order = scene.file_order(ground.round)
        ground.machine.drop_caches()
        with _open(scene, 1 / 16 if self.cold else WHOLE) as dataset:
            dataset.index_of([scene.source.path(0)])  # loads the names
            if not self.cold:
                read_batches(dataset, order, scene.spec.batch, 600)
            paths = [scene.source.path(index) for index in order[:200_000].tolist()]
            tally, kept = Tally(), {}
            with timed() as watch:
                until = time.perf_counter() + ground.limits.seconds
                for number, path in enumerate(paths):
                    data = dataset.get(path)
                    tally.samples += 1
                    tally.bytes += len(data)
                    if number % 64 == 0:
                        if number < 64 * CHECKED:
                            kept[int(order[number])] = data
                        if time.perf_counter() > until:
                            break
        tally.kept = kept
        return tally.sample(scene, watch)
