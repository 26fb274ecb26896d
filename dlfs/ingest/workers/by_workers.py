"""``PartsImport``: imports the parts of a source by several workers, as their coordinator.

The source is divided into parts (``Source.divide``), a function of the source, layout, seed and
size of a step alone; so is the dataset, whatever workers there are. Chunks are granted and steps
committed by a ``PartsWriter``. When all parts are committed, it seals the dataset, with a second
pass if there is one, in this process.

Threads: the caller's, and those of ``ImportServer``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dlfs.base.arguments import Layout
from dlfs.base.processors import allowed_processors
from dlfs.base.units import GIB
from dlfs.base.wording import quote
from dlfs.block import BlockDevice, open_device
from dlfs.block.lease import DRIFT, boot_clock
from dlfs.block.slots import COORDINATOR_SLOT
from dlfs.connection.unfinished import PartProgress
from dlfs.dataset.parts_writer import PartsWriter
from dlfs.dataset.step_cutter import STEP_BYTES
from dlfs.dataset.step_writer import SKIPPED
from dlfs.errors import DlfsError, LockedError, UsageError
from dlfs.ingest.progress import WorkerProgress
from dlfs.ingest.source import Division, Source, add_skipped
from dlfs.ingest.workers.coordinator import Coordinator, GrantTimes
from dlfs.ingest.workers.engines import WORKERS_MAX
from dlfs.ingest.workers.import_setup import Before, ImportSetup, encode
from dlfs.ingest.workers.launching import ProcessLauncher
from dlfs.ingest.workers.listening import Listener
from dlfs.ingest.workers.publishing import ProgressSocket
from dlfs.ingest.workers.serving import ImportServer, Launcher
from dlfs.store.fencing import describe_running, imports_by_workers
from dlfs.volume.volume import Volume

RENEW_S = 2.0
"""Interval in which workers of this host tell that they live, in seconds, where writes have no
deadline."""
VALID_S = 30.0
"""Time without such a sign after which a worker of this host is killed, in seconds."""
DEFAULT_BYTES = 16 * GIB
"""Size from which on a source is imported by workers, unless the caller says otherwise."""
DEFAULT_PARTS = 4
"""Parts that such a source has at least."""
DEFAULT_WORKERS_MAX = 8
"""Most workers that are chosen so."""
STRAGGLER_FACTOR = 3.0
"""A worker is a straggler if the median of the others is this many times as fast."""
STRAGGLER_S = 10.0
"""Time that a worker must have been at its part to be one, in seconds."""

StartLauncher = Callable[[ExitStack, int, GrantTimes], tuple[Listener, Launcher]]
"""Makes the listener of an import and what starts its workers, at most a number of them, given the
durations of grants; both end with the stack."""


@dataclass(frozen=True)
class WorkersOptions:
    """What workers need to know besides the import.

    Attributes:
        count: number of workers.
        spool: directory for local copies of objects; None for the default.
        spool_bytes: most bytes of these copies of all workers together; None for the default.
        start: starts the workers; by default processes of this host.
    """

    count: int
    spool: str | None = None
    spool_bytes: int | None = None
    start: StartLauncher | None = None


def start_processes(stack: ExitStack, count: int, _times: GrantTimes) -> tuple[Listener, Launcher]:
    """Start workers that are processes of this host; see ``StartLauncher``."""
    listener = stack.enter_context(Listener())
    return listener, ProcessLauncher(count, listener.invitation)


def divide(source: Source, *, layout: Layout, seed: int, part_bytes: int, action: str) -> Division:
    """Divide a source for several workers.

    Raises:
        UsageError: it cannot be divided.
    """
    found = source.divide(layout=layout, seed=seed, part_bytes=part_bytes)
    if found is None:
        raise UsageError(
            f"{action}: expected a source that can be divided for workers, such as a folder or "
            f"several files of a format, got {source.name}: {source.undivided}; import it without "
            "workers"
        )
    return found


def default_workers(
    volume: Volume, name: str, source: Source, layout: Layout, seed: int, step_bytes: int | None
) -> int:
    """Return the number of workers for an import whose caller does not say it.

    There are some if the source is large and has parts, and the volume can grant chunks and has no
    unfinished import of another name: only one at a time can have workers.

    Args:
        volume: the volume.
        name: name of the dataset.
        source: the source.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        step_bytes: bytes of a step; None for the default.
    """
    cores = min(DEFAULT_WORKERS_MAX, allowed_processors())
    if cores < 2 or (source.sample_bytes is not None and source.sample_bytes <= DEFAULT_BYTES):
        return 0
    part_bytes = step_bytes or STEP_BYTES
    division = source.divide(layout=layout, seed=seed, part_bytes=part_bytes)
    if division is None or len(division) < DEFAULT_PARTS:
        return 0
    if sum(division.part_bytes) <= DEFAULT_BYTES:
        return 0
    others = any(unfinished.name != name for unfinished in volume.unfinished())
    return min(cores, len(division)) if not others and can_grant(volume) else 0


def can_grant(volume: Volume) -> bool:
    """Return True if workers may write to a volume."""
    try:
        with ExitStack() as stack:
            for member in volume.members:
                device = stack.enter_context(closing(open_device(member.uri, writable=True)))
                device.check_can_grant()
    except DlfsError:
        return False
    return True


@contextmanager
def coordinating(volume: Volume, name: str) -> Iterator[list[BlockDevice]]:
    """Open the devices of a volume as the coordinator of an import, which there is one of.

    On files and disks another process is refused, or finds that this one has ended, at once. On
    shared namespaces it takes the import over.

    Args:
        volume: the volume.
        name: name of the dataset.

    Raises:
        LockedError: another coordinator runs; the message names its import and its process.
        UsageError: workers cannot write to the volume.
        DlfsError: a device cannot be opened.
    """
    with ExitStack() as stack:
        devices = [
            stack.enter_context(closing(open_device(member.uri, writable=True)))
            for member in volume.members
        ]
        for device in devices:
            device.check_can_grant()
            if device.grants_expire:
                continue
            try:
                device.begin_granted(COORDINATOR_SLOT)
            except LockedError as error:
                raise _running(volume, name) from error
        yield devices


def _running(volume: Volume, name: str) -> LockedError:
    """Return the error that another coordinator runs."""
    volume.refresh()
    found = imports_by_workers(volume.session.catalog.unfinished)
    text = "another import by workers into this volume begins, or ends; try again"
    return LockedError(
        f"import {quote(name)} by workers: {describe_running(found[0]) if found else text}"
    )


class PartsImport:
    """The import of the parts of a source by workers.

    Args:
        volume: the volume.
        devices: its devices, as ``coordinating`` gives them.
        source: the source.
        division: its parts.
        writer: commits the steps.
        options: what workers need to know.
        labels: label of each class of the version that is appended to.
        show: called with samples, bytes and the workers, about four times a second.
    """

    def __init__(
        self,
        volume: Volume,
        devices: Sequence[BlockDevice],
        source: Source,
        division: Division,
        writer: PartsWriter,
        options: WorkersOptions,
        *,
        labels: Mapping[str, int],
        show: Callable[[int, int, Sequence[WorkerProgress]], None],
    ) -> None:
        self._volume, self._devices = volume, devices
        self._source, self._division = source, division
        self._writer, self._options, self._show = writer, options, show
        self._labels = labels
        self._begun_s = boot_clock()
        self._bad_before = writer.bad.count
        self._good_before, self._bytes_before = writer.imported
        self.done = 0, 0

    def run(self) -> None:
        """Import all parts that are not complete.

        Raises:
            TooManyBadError: more records are bad than allowed.
            DlfsError: the import failed; the steps that were committed are kept.
        """
        if self._writer.is_read:
            return
        with ExitStack() as stack:
            times = grant_times(self._devices)
            coordinator = self._coordinator = self._make_coordinator(times)
            count = min(self._options.count, max(1, coordinator.wanted_workers))
            listener, launcher = (self._options.start or start_processes)(stack, count, times)
            server = ImportServer(
                coordinator,
                self._writer,
                self._devices,
                self._describe,
                listener,
                launcher,
                stack.enter_context(ProgressSocket(self._volume.uuid, self.describe)),
                self._tick,
            )
            server.run()
        self._check_bad(is_end=True)

    def _make_coordinator(self, times: GrantTimes) -> Coordinator:
        writer, options = self._writer, self._options
        sizes = self._division.part_bytes
        spool_bytes = options.spool_bytes
        setup = ImportSetup.of(
            writer.options,
            volume_uri=self._volume.uri,
            volume_uuid=self._volume.uuid,
            skips_bad=self._source.bad.are_allowed,
            labels=self._labels,
            spool=options.spool,
            spool_bytes=None if spool_bytes is None else max(1, spool_bytes // options.count),
        )
        return Coordinator(
            sizes,
            {part: writer.progress(part) for part in range(len(sizes))},
            writer.grants,
            times,
            chunk_bytes=self._volume.chunk_bytes,
            setup=encode(setup),
            slots=WORKERS_MAX,
            now_s=boot_clock(),
        )

    def _describe(self, part: int, before: PartProgress) -> tuple[bytes, bytes]:
        description = self._division.describe(part)
        return description, encode(Before.of(before, self._writer.schema))

    def _tick(self) -> None:
        coordinator = self._coordinator
        self.done = coordinator.done
        self._check_bad(is_end=False)
        self._show(*self.done, find_progress(coordinator, boot_clock()))

    def describe(self) -> dict[str, Any]:
        """Return the progress, as values of JSON.

        Returns:
            ``pid``, and ``seconds`` since the start of this process's share; ``name``
            of the dataset; ``parts``, and ``parts_done``, those that are committed; ``samples`` and
            ``bytes`` so far, those of earlier runs included; ``bytes_total``, an estimate;
            ``new_bytes`` of this run; and ``workers``, a list of what ``WorkerProgress`` has.
        """
        now_s, coordinator = boot_clock(), self._coordinator
        samples, new_bytes = coordinator.done
        return {
            "pid": os.getpid(),
            "seconds": now_s - self._begun_s,
            "name": self._writer.name,
            "parts": len(coordinator.parts),
            "parts_done": sum(part.is_committed for part in coordinator.parts),
            "samples": self._good_before + samples,
            "bytes": self._bytes_before + new_bytes,
            "bytes_total": self._source.sample_bytes or sum(self._division.part_bytes),
            "new_bytes": new_bytes,
            "workers": [asdict(worker) for worker in find_progress(coordinator, now_s)],
        }

    def _check_bad(self, *, is_end: bool) -> None:
        good = self._good_before + self.done[0]
        bad = self._bad_before + self._coordinator.bad_count
        self._source.bad.check_others(bad, good, self._source.sample_count, is_end=is_end)


def grant_times(devices: Sequence[BlockDevice]) -> GrantTimes:
    """Return the durations of grants on some devices.

    Raises:
        UsageError: grants expire on some of them only.
    """
    found = [device.lease_times for device in devices]
    times = [each for each in found if each is not None]
    if not times:
        return GrantTimes(RENEW_S, VALID_S, None)
    if len(times) < len(found):
        kinds = [devices[found.index(None)].uri, devices[found.index(times[0])].uri]
        raise UsageError(
            f"import with workers: expected members of one kind, got {kinds[0]}, which is of this "
            f"host, and {kinds[1]}, which other hosts reach"
        )
    return GrantTimes(
        min(each.renew_s for each in times),
        min(each.valid_s for each in times),
        max(each.drain_s for each in times) * DRIFT,
    )


def find_progress(coordinator: Coordinator, now_s: float) -> list[WorkerProgress]:
    """Return what each worker does, and whether it holds the others up."""
    rates = {
        number: (worker.steps_bytes + worker.step_bytes) / max(now_s - worker.began_s, 1e-3)
        for number, worker in coordinator.workers.items()
        if worker.part is not None
    }
    found = []
    for number, worker in coordinator.workers.items():
        others = sorted(rate for each, rate in rates.items() if each != number)
        rate = rates.get(number, 0.0)
        is_slow = bool(others) and rate * STRAGGLER_FACTOR < others[len(others) // 2]
        found.append(
            WorkerProgress(
                name=f"{worker.hello.host}:{worker.hello.pid}",
                part=worker.part,
                part_bytes=worker.steps_bytes + worker.step_bytes,
                part_total=None
                if worker.part is None
                else coordinator.parts[worker.part].size_bytes,
                bytes_done=worker.done_bytes,
                bytes_per_second=rate,
                is_straggler=is_slow and number in rates and now_s - worker.began_s > STRAGGLER_S,
            )
        )
    return found


def skipped_in_parts(writer: PartsWriter, count: int) -> Counter[str]:
    """Return the entries that were left out of the parts of a source, by reason."""
    found: Counter[str] = Counter()
    for part in range(count):
        cursor = writer.progress(part).cursor
        skipped = {} if cursor is None else cursor.value.get(SKIPPED, {})
        if isinstance(skipped, dict):
            add_skipped(found, skipped)
    return found
