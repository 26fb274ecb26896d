"""``measure``: what the devices, the network, the API and the mount of a volume give, one by one.

Every step reads the samples of one dataset, where they lie, and has its part of the time. The raw
reads of the members, and fio, have the request sizes and the depth with which DLFS reads. All of
them pass the page cache where the file system can (O_DIRECT), as DLFS does; caches of a device, or
of the host of a virtual machine, are neither emptied nor known. Nothing is written to the volume.

Threads: the caller's, and one for each member that is read raw.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dlfs
from dlfs._native.device import Kind, aligned_buffer
from dlfs._native.raw_reads import RawReads, read_raw
from dlfs.base.forks import Event
from dlfs.base.threads import ThreadPool, run_in_time
from dlfs.base.units import KIB, MIB, format_bytes
from dlfs.block import BlockDevice, FileUri, NvmeTcpUri, open_device, parse_uri
from dlfs.diagnosis.checks.targets import has_direct, measure_path
from dlfs.diagnosis.consuming import Counters, Run, add_runs, consume
from dlfs.diagnosis.fio import FileRange, FioResult, find_fio, run_fio
from dlfs.errors import UsageError
from dlfs.service.statistics import HIT_SHARE, IDLE_SHARE

DEPTH = 128
"""Requests in flight to each member, the default of ``dlfs.open``."""
BUFFER_BYTES_MAX = 512 * MIB
"""Most memory for raw reads in flight to all members; for more, the depth is smaller."""
BATCH = 256
"""Samples in a batch."""
MEMORY_SHARE, MEMORY_BYTES_MIN = 16, 32 * MIB
"""Memory for samples while the API is measured: a sixteenth of the data, and at least this."""
ALONE_READS, ALONE_SECONDS = 10_000, 10.0
"""Most reads one at a time, and longest time for them beyond their part, in seconds."""
PLACES = 4096
"""Samples whose places tell where the data of a member lies."""
BOUND_SHARE = 0.8
"""Share of a device's rate from which on an epoch is limited by the device."""

Say = Callable[[str], None]
"""Called with a few words at the beginning of each step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        step: ``device``, ``network``, ``api`` or ``mount``.
        what: what was read, and how.
        reads: reads or samples per second; 0 if they were not counted.
        read_bytes: bytes per second.
        latency_s: time of one read or round trip, in seconds; 0 if it was not measured.
        share: of ``fio``, the rate divided by its rate; of ``device``, the part of the time for
            which raw reads of the same number and size would keep the members busy; 0 if there
            is nothing to compare with.
        of: what it is compared with; empty for nothing.
        hit_share: part of the samples that were in memory already, 0..1.
    """

    step: str
    what: str
    reads: float = 0.0
    read_bytes: float = 0.0
    latency_s: float = 0.0
    share: float = 0.0
    of: str = ""
    hit_share: float = 0.0


@dataclass
class Report:
    """Measurements of a dataset.

    Attributes:
        dataset: name and version of the dataset.
        binds: sentence that names what limits an epoch.
        rows: the measurements, in the order in which they were made.
        notes: what was not measured, and why; what may be cached.
    """

    dataset: str
    binds: str = ""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """The range of a member that holds samples of the dataset."""

    device: BlockDevice
    first: int
    size_bytes: int


@dataclass(frozen=True)
class _Shape:
    """The samples: mean length, and the requests for one of them and for a chunk, in bytes."""

    mean_bytes: float
    request_bytes: int
    chunk_bytes: int


def measure(
    uri: str,
    name: str | None,
    *,
    seconds: float,
    with_mount: bool = False,
    say: Say = lambda _: None,
) -> Report:
    """Measure what limits the reading of a dataset.

    Args:
        uri: URI of the volume, by its devices.
        name: name of the dataset; None: the only one.
        seconds: time for all steps together; opening and closing come on top.
        with_mount: also mount the volume, on a new directory, for a step.
        say: called at the beginning of each step.

    Raises:
        UsageError: the dataset has no samples, or hardly any that are not empty.
        DlfsError: the volume cannot be read.
    """
    with dlfs.open(uri) as volume, volume.dataset(name) as dataset:
        if dataset.sample_bytes == 0:
            raise UsageError(f"measure {uri}: expected a dataset with samples, got an empty one")
        report = Report(f"{dataset.name}@{dataset.version}")
        chosen, sample_bytes = (dataset.name, dataset.version), dataset.sample_bytes
        program = find_fio()
        parts = 5 + (2 if program else 0) + with_mount
        part_s = seconds / parts
        with ExitStack() as opened:
            places = _find_places(volume, dataset, opened)
            shape = _shape_of(volume, dataset, places)
            rates = _measure_devices(report, places, shape, part_s, program, say)
    _measure_network(report, [place.device.uri for place in places])
    memory_bytes = max(MEMORY_BYTES_MIN, sample_bytes // MEMORY_SHARE)
    with dlfs.open(uri, memory_bytes=memory_bytes) as volume, volume.dataset(*chosen) as dataset:
        say("random batches")
        run = _measure_random(dataset, part_s)
    report.rows.append(_api_row(f"read(), batches of {BATCH} random samples", run, rates))
    say("an epoch")
    run = _measure_epochs(uri, chosen, memory_bytes, 2 * part_s)
    what = f"batches(), the first epoch in global order, {run.seen.samples:,} samples"
    report.rows.append(_api_row(what, run, rates))
    report.notes.append(f"the API had {format_bytes(memory_bytes)} of memory for samples")
    report.binds = name_limit(
        run,
        report.rows[-1].share,
        sample_bytes,
        DEPTH * shape.chunk_bytes * len(places),
        over_network=_over_network(places),
    )
    if with_mount:
        say("files of a mount")
        report.rows.append(_measure_mount(uri, chosen, part_s, rates.requests))
    return report


# ---- devices -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Reads per second that all members together give, at two sizes.

    Attributes:
        request_bytes: bytes of a read of a sample.
        requests: such reads per second, at random.
        chunk_bytes: bytes of a read of a chunk.
        chunks: such reads per second, in sequence.
    """

    request_bytes: int
    requests: float
    chunk_bytes: int
    chunks: float

    def busy_share(self, reads: float, read_bytes: float, seconds: float) -> float:
        """Return the part of a time for which the devices were busy with some reads, about 0..1.

        The time of a read grows linearly with its size, between and beyond the two sizes.
        """
        if reads <= 0 or seconds <= 0:
            return 0.0
        small_s, large_s = 1 / self.requests, 1 / self.chunks
        difference = self.chunk_bytes - self.request_bytes
        slope = (large_s - small_s) / difference if difference else small_s / self.request_bytes
        mean_bytes = read_bytes / reads
        read_s = max(small_s + slope * (mean_bytes - self.request_bytes), small_s / 2)
        return reads * read_s / seconds


def _find_places(volume: dlfs.Volume, dataset: dlfs.Dataset, opened: ExitStack) -> list[_Place]:
    """Open the members that have samples of a dataset, and find where."""
    count = len(dataset)
    chosen = np.unique(np.linspace(0, count - 1, min(count, PLACES)).astype(np.int64))
    ranges: dict[str, tuple[int, int]] = {}
    for found in (dataset.stat(int(index)) for index in chosen):
        first, end = ranges.get(found.member, (1 << 63, 0))
        length = min(found.length_bytes, volume.chunk_bytes)
        ranges[found.member] = (
            min(first, found.offset_bytes),
            max(end, found.offset_bytes + length),
        )
    places = []
    for uri, (first, end) in ranges.items():
        if end <= first:
            continue  # empty samples
        device = opened.enter_context(closing(open_device(uri)))
        first -= first % device.block_bytes
        end = min(device.size_bytes, end + -end % device.block_bytes)
        places.append(_Place(device, first, end - first))
    if not places:
        raise UsageError(f"measure {volume.uri}: expected samples that are not empty")
    return places


def _shape_of(volume: dlfs.Volume, dataset: dlfs.Dataset, places: Sequence[_Place]) -> _Shape:
    mean = dataset.sample_bytes / len(dataset)
    block = max(place.device.block_bytes for place in places)
    smallest = min(place.size_bytes for place in places)
    chunk = min(volume.chunk_bytes, smallest)
    request = min(chunk, max(block, int(mean + block - 1) // block * block))
    return _Shape(mean, request, chunk - chunk % block)


def _measure_devices(
    report: Report,
    places: Sequence[_Place],
    shape: _Shape,
    part_s: float,
    program: str | None,
    say: Say,
) -> DeviceRates:
    """Read the members raw: at random, in sequence and one read at a time."""
    ranges = _ranges_for_fio(report, places, program)
    rates = {}
    for random, size in ((True, shape.request_bytes), (False, shape.chunk_bytes)):
        way = "random" if random else "sequential"
        depth = max(1, min(DEPTH, BUFFER_BYTES_MAX // (size * len(places))))
        what = f"{way} reads of {_size(size)}, depth {depth}"
        say(f"device: {what}")
        found = _read_all(places, size, depth, part_s, random=random)
        rate = sum(each.read_bytes / each.seconds for each in found)
        share, of = 0.0, ""
        if ranges and program is not None:
            say(f"fio: {what}")
            beside = run_fio(
                program, ranges, random=random, request_bytes=size, depth=depth, seconds=part_s
            )
            if isinstance(beside, FioResult):
                share, of = rate / beside.read_bytes, f"fio ({beside.engine})"
            else:
                report.notes.append(f"fio: {beside}")
        reads = sum(each.count / each.seconds for each in found)
        report.rows.append(Row("device", what, reads, rate, share=share, of=of))
        rates[random] = reads
    what = f"a read of {_size(shape.request_bytes)} alone"
    say(f"device: {what}")
    alone_s = run_in_time(lambda: _read_alone(places[0], shape, part_s / 2), part_s + ALONE_SECONDS)
    report.rows.append(Row("device", what, latency_s=alone_s))
    return DeviceRates(shape.request_bytes, rates[True], shape.chunk_bytes, rates[False])


def _read_alone(place: _Place, shape: _Shape, seconds: float) -> float:
    """Return the mean time of random reads, one at a time, in seconds."""
    offsets = _offsets(place, shape.request_bytes, seed=len(place.device.uri), random=True)
    buffer = aligned_buffer(shape.request_bytes, max(place.device.block_bytes, 4 * KIB))
    spent: list[float] = []
    began = time.monotonic()
    with place.device.native.queue(1, writable=False) as queue:
        for offset in offsets(ALONE_READS):
            before = time.monotonic()
            queue.transfer(Kind.READ, buffer, int(offset))
            spent.append(time.monotonic() - before)
            if time.monotonic() >= began + seconds:
                break
    return sum(spent) / len(spent)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / KIB:g} KiB"


def _ranges_for_fio(
    report: Report, places: Sequence[_Place], program: str | None
) -> list[FileRange]:
    """Return what fio is to read; none if it cannot."""
    paths = [each.path for each in _files(places)]
    if program is None:
        report.notes.append("fio is not installed: apt install fio to compare with it")
    elif len(paths) < len(places):
        report.notes.append("fio reads files and disks only")
    cached = [path for path in paths if not has_direct(path)]
    if not paths:
        report.notes.append("what the targets have cached is not known")
    elif cached:
        report.notes.append(
            f"{', '.join(cached)}: without O_DIRECT, reads may come from the page cache"
        )
    else:
        report.notes.append(
            "reads pass the page cache; what the device, or the host of a virtual machine, has "
            "cached is not known"
        )
    if program is None or len(paths) < len(places):
        return []
    return [
        FileRange(path, place.first, place.size_bytes)
        for path, place in zip(paths, places, strict=True)
    ]


def _files(places: Sequence[_Place]) -> list[FileUri]:
    parsed = [parse_uri(place.device.uri) for place in places]
    return [each for each in parsed if isinstance(each, FileUri)]


def _over_network(places: Sequence[_Place]) -> bool:
    return any(isinstance(parse_uri(place.device.uri), NvmeTcpUri) for place in places)


def _read_all(
    places: Sequence[_Place], request_bytes: int, depth: int, seconds: float, *, random: bool
) -> list[RawReads]:
    """Read all members at once, each in a thread."""
    stop = Event()

    def read(number: int) -> RawReads:
        place = places[number]
        return read_raw(
            place.device.native,
            _offsets(place, request_bytes, seed=number, random=random),
            request_bytes=request_bytes,
            depth=depth,
            seconds=seconds,
            stop=stop,
        )

    with ThreadPool(len(places), "dlfs-bench") as pool:
        try:
            return list(pool.map(read, range(len(places))))
        finally:
            stop.set()  # Ctrl-C, or another member has failed


def _offsets(
    place: _Place, request_bytes: int, *, seed: int, random: bool
) -> Callable[[int], NDArray[np.int64]]:
    """Return a function that gives the offsets of the next reads in a place."""
    block = place.device.block_bytes
    if random:
        count = max(1, (place.size_bytes - request_bytes) // block + 1)
        generator = np.random.default_rng(seed)
        return lambda wanted: place.first + block * generator.integers(0, count, wanted)
    count = max(1, place.size_bytes // request_bytes)
    position = 0

    def follow(wanted: int) -> NDArray[np.int64]:
        nonlocal position
        numbers = (position + np.arange(wanted, dtype=np.int64)) % count
        position = (position + wanted) % count
        return place.first + request_bytes * numbers

    return follow


# ---- network, API, mount -------------------------------------------------------------------------


def _measure_network(report: Report, uris: Sequence[str]) -> None:
    """Measure the round trip to each target."""
    parsed = [each for each in map(parse_uri, uris) if isinstance(each, NvmeTcpUri)]
    for host, port in dict.fromkeys((each.host, each.port) for each in parsed):
        try:
            round_trip_s, mtu = measure_path(host, port)
        except (OSError, TimeoutError) as error:
            report.notes.append(f"network: {host}:{port}: {error}")
            continue
        what = f"TCP round trip to {host}:{port}, path MTU {mtu}"
        report.rows.append(Row("network", what, latency_s=round_trip_s))


def _measure_random(dataset: dlfs.Dataset, seconds: float) -> Run:
    """Read batches of random samples."""
    generator = np.random.default_rng(0)
    counters = Counters(dataset.stats(), dataset.member_stats())
    batches = 0
    began = now = time.monotonic()
    while now < began + seconds:
        dataset.read(generator.integers(0, len(dataset), BATCH)).release()
        batches += 1
        now = time.monotonic()
    return counters.run_until(dataset, now - began, now - began, batches)


def _measure_epochs(uri: str, chosen: tuple[str, int], memory_bytes: int, seconds: float) -> Run:
    """Read the first epoch of a dataset, several times if it is short, each with new memory."""
    runs: list[Run] = []
    began = time.monotonic()
    while not runs or time.monotonic() < began + seconds:
        with (
            dlfs.open(uri, memory_bytes=memory_bytes) as volume,
            volume.dataset(*chosen) as dataset,
        ):
            left = max(0.01, began + seconds - time.monotonic())
            runs.append(consume(dataset, BATCH, left, shuffle="global", epochs_max=1))
    return add_runs(runs)


def _api_row(what: str, run: Run, rates: DeviceRates) -> Row:
    """Return the row of a run."""
    seen = run.seen
    share = rates.busy_share(run.reads, run.read_bytes, run.seconds)
    return Row(
        "api",
        what,
        seen.rate(seen.samples),
        seen.rate(seen.sample_bytes),
        share=share,
        of="device" if share else "",
        hit_share=seen.hit_share,
    )


@contextmanager
def _mounted(uri: str) -> Iterator[Path]:
    """Mount a volume on a new directory for the duration of a block."""
    from dlfs.mount.mountpoint import unmount
    from dlfs.mount.supervise.background import mount_volume

    with tempfile.TemporaryDirectory(prefix="dlfs-bench-") as folder:
        point = Path(folder) / "mnt"
        point.mkdir()
        mounted = mount_volume(uri, point, log=Path(folder) / "log")
        try:
            yield point
        finally:
            unmount(mounted.mountpoint, lazy=True)


def _measure_mount(uri: str, chosen: tuple[str, int], seconds: float, device_rate: float) -> Row:
    """Read files of a mount in random order, each once, by one program."""
    name, version = chosen
    with dlfs.open(uri) as volume, volume.dataset(*chosen) as dataset:
        count = len(dataset)
        wanted = np.random.default_rng(0).permutation(min(count, 1 << 20)) * (max(1, count >> 20))
        paths = dataset.paths_of(wanted)
    with _mounted(uri) as point:
        folder = os.fsencode(point / f"{name}@{version}")
        began = now = time.monotonic()
        read, read_bytes = 0, 0
        for path in paths:
            with open(os.path.join(folder, path), "rb", buffering=0) as file:
                read_bytes += len(file.readall())
            read += 1
            now = time.monotonic()
            if now >= began + seconds:
                break
    spent = max(now - began, 1e-9)
    what = f"open, read and close of {read:,} random files, one program"
    rate = read / spent
    return Row("mount", what, rate, read_bytes / spent, share=rate / device_rate, of="device")


# ---- verdict -------------------------------------------------------------------------------------

_BUSY = {
    "device": "latency: reading waits for the device, with too few requests in flight",
    "checking": "the processor: reading mostly computes checksums",
    "planning": "the processor: reading mostly finds and sorts samples",
}


def name_limit(
    run: Run, share: float, sample_bytes: int, in_flight_bytes: int, *, over_network: bool
) -> str:
    """Return a sentence that names what limits an epoch.

    Args:
        run: the epoch.
        share: part of the time for which the devices were busy, from ``busy_share``.
        sample_bytes: bytes of all samples of the dataset.
        in_flight_bytes: most bytes of reads in flight to all members at once.
        over_network: True if members are reached over NVMe/TCP.
    """
    seen = run.seen
    device = "network and target" if over_network else "device"
    if seen.samples == 0:
        return "binds: nothing was read in the time"
    if sample_bytes < in_flight_bytes:
        return (
            f"binds: not known: the samples have {format_bytes(sample_bytes)}, and up to "
            f"{format_bytes(in_flight_bytes)} are read at once; measure a larger dataset"
        )
    if seen.hit_share > HIT_SHARE:
        return "binds: memory: nearly all samples were there already"
    if share >= BOUND_SHARE:
        return f"binds: {device}: an epoch reads at {share:.0%} of the rate of raw reads"
    shares = seen.phase_shares
    if shares.get("rest", 0.0) > IDLE_SHARE:
        limit = "the program that takes the batches: reading rests"
    else:
        busy = {name: part for name, part in shares.items() if name in _BUSY}
        limit = _BUSY[max(busy, key=lambda name: busy[name], default="device")]
    return f"binds: {limit}; an epoch reads at {share:.0%} of the rate of raw reads"
