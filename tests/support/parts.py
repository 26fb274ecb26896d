"""Imports by workers in one process: the workers of a ``PartsWriter``, without any transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self
from uuid import UUID

import numpy as np

import dlfs
from dlfs.base.closing import Closing
from dlfs.block import BlockDevice
from dlfs.block.lease import boot_clock
from dlfs.dataset.part_writer import PartWriter
from dlfs.dataset.parts_writer import PartsWriter, WorkerStep
from dlfs.dataset.step_content import StepContent
from dlfs.errors import SpaceError
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.store.members import Opener
from dlfs.store.space import TakenRuns

ORIGIN = {"source": "a test", "fingerprint": "1"}
OPTIONS: dict[str, Any] = {"step_bytes": 40_000, "seed": 3, "stage_bytes": 15_000}
COUNTS = (25, 0, 9, 31)
"""Number of samples of each part."""


def part_samples(part: int, counts: Sequence[int] = COUNTS) -> dict[bytes, bytes]:
    """Return the samples of a part."""
    return {
        b"%d/%02d" % (part, i): bytes([i, part]) * (100 + 331 * i % 2900)
        for i in range(counts[part])
    }


def add_part(writer: Any, part: int, counts: Sequence[int] = COUNTS, first: int = 0) -> None:
    """Add the samples of a part from one on to any kind of writer in steps, some at a time."""
    samples = list(part_samples(part, counts).items())
    for begin in range(first, len(samples), 4):
        paths, parts = zip(*samples[begin : begin + 4], strict=True)
        lengths = np.array(list(map(len, parts)))
        offsets = np.cumsum(lengths) - lengths
        numbers = np.arange(begin, begin + len(paths))
        attributes = {"number": numbers, "part": np.full(len(paths), f"part {part}", object)}
        writer.add_batch(
            list(paths),
            b"".join(parts),
            offsets,
            lengths,
            attributes=attributes,
            cursor={"at": begin + len(paths)},
        )


class Worker(Closing):
    """A worker: it has devices of its own, and chunks that the coordinator grants it.

    Args:
        volume: the volume.
        name: name of the worker.
        slot: its number on this host.
        opener: opens its devices; by default as those of the volume.

    Attributes:
        steps: steps that it has written and not reported.
    """

    def __init__(
        self,
        volume: dlfs.Volume,
        parts: PartsWriter,
        name: str,
        slot: int = 0,
        opener: Opener | None = None,
    ) -> None:
        self.name, self.parts = name, parts
        session = volume._local("read")
        opener = opener or session.connection.options.opener
        self.geometry: Geometry = session.generation.geometry
        self.devices: list[BlockDevice] = []
        self.steps: list[StepContent] = []
        self._taken = TakenRuns([])
        self._left = 0
        for member in volume.members:
            device = opener(member.uri, writable=True)
            self.devices.append(device)
            device.begin_granted(slot)
            device.extend_grant(boot_clock() + 3600, incarnation=device.incarnation())

    def take(self, count: int) -> ChunkRun:
        """Return a run of the grants; ask for another grant if there is none."""
        if not self._left:
            granted = self.parts.grants.take(self.name, self.parts.unit)
            if not granted:
                raise SpaceError(f"worker {self.name}: nothing is left to grant")
            self._taken, self._left = TakenRuns(granted), sum(run.chunk_count for run in granted)
        run = self._taken.take(count)
        self._left -= run.chunk_count
        return run

    def writer(self, part: int) -> PartWriter:
        """Return a writer of a part, behind the steps that were committed."""
        parts = self.parts
        progress, schema = parts.progress(part), parts.schema
        return PartWriter(
            self, parts.options, part, self.steps.append, progress=progress, schema=schema
        )

    def write(self, part: int, counts: Sequence[int] = COUNTS) -> Self:
        """Write a whole part, from where it was left."""
        with self.writer(part) as writer:
            add_part(writer, part, counts, writer.source_count)
        return self

    def reports(self) -> list[WorkerStep]:
        """Return the steps that were not reported yet."""
        steps, self.steps = self.steps, []
        return [WorkerStep(self.name, step) for step in steps]

    def end(self) -> None:
        """End as a worker ends that is not needed any more."""
        self.close()
        self.parts.grants.give_back(self.name)

    def close(self) -> None:
        """Close the devices, as the end of the process does. Idempotent."""
        for device in self.devices:
            device.close()


def open_parts(volume: dlfs.Volume, name: str = "x", **options: Any) -> PartsWriter:
    """Open the coordinator's side of the import of a dataset."""
    given = {"part_count": len(COUNTS), "uuid": UUID(int=5), **OPTIONS, **options}
    return volume.parts_writer(name, ORIGIN, **given)


def import_plainly(volume: dlfs.Volume, counts: Sequence[int] = COUNTS, **options: Any) -> None:
    """Import the same parts in one process."""
    given = {"uuid": UUID(int=5), **OPTIONS, **options}
    with volume.step_writer("x", ORIGIN, **given) as writer:
        for part in range(writer.part, len(counts)):
            add_part(writer, part, counts)
            writer.end_part()
    volume.refresh()


def everything(volume: dlfs.Volume) -> tuple[Any, ...]:
    """Return all that an import decides: paths, places, checksums, columns, digests."""
    volume.refresh()
    assert list(volume.verify()) == []
    assert volume.unfinished() == []
    with volume["x"] as dataset:
        directory = dataset.session.directory
        columns = {key: dataset.column(key).tolist() for key in dataset.columns}
        return (
            directory.names(),
            directory.addresses().tolist(),
            directory.lengths().tolist(),
            directory.crcs().tolist(),
            directory.empty_directories(),
            columns,
            dataset.digests,
            dataset.info.attribute_bytes,
        )


def check_no_leak(volume: dlfs.Volume) -> None:
    """Check that every chunk is free, or of a dataset or the catalog."""
    volume.refresh()
    usage = volume.usage()
    assert usage.unfinished_bytes == 0
    used = usage.stored_bytes + usage.catalog_bytes
    assert usage.free_bytes + used == usage.capacity_bytes
