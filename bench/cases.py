"""The cases, as data: who races over which data set, and which floors hold.

The floors are those of DESIGN.md, section 10, that concern a local volume. A floor compares one
contestant with others of its own case, round by round; the median of the rounds' ratios counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.contestant import Contestant, Sample
from bench.contestants.bare import BareCopy, BareUring, FreshMemory
from bench.contestants.directory import DictLookup, Find, Load
from bench.contestants.files import Files, ParallelFiles
from bench.contestants.fio import FioRead, FioWrite
from bench.contestants.imports import Import
from bench.contestants.initiators import BareInitiator, Idle, Initiator, SpdkPerf
from bench.contestants.mounts import MountFiles
from bench.contestants.samples import DEPTH, WHOLE, Batches, Cached, Epoch, Get
from bench.contestants.service import ServiceCached, ServiceClients
from dlfs.units import KIB, MIB

Metric = Callable[[Sample], float]
"""Of one run; more is better."""


def rate(sample: Sample) -> float:
    """Samples a second."""
    return sample.samples / sample.seconds


def bandwidth(sample: Sample) -> float:
    """Bytes of samples a second."""
    return sample.bytes / sample.seconds


def per_core(sample: Sample) -> float:
    """Samples a second of one core: by the clock or by CPU time, whichever is worse."""
    return sample.samples / max(sample.seconds, sample.cpu_seconds)


def cheapness(sample: Sample) -> float:
    """Samples for a second of CPU time."""
    return sample.samples / max(sample.cpu_seconds, 1e-9)


def cheapness_plus_1_us(sample: Sample) -> float:
    """The same with a microsecond of CPU time added to each sample."""
    return sample.samples / (max(sample.cpu_seconds, 1e-9) + 1e-6 * sample.samples)


def promptness(sample: Sample) -> float:
    """How often it would fit in a second."""
    return 1 / sample.seconds


def sharing(sample: Sample) -> float:
    """What is shared, against what all processes have of it together: 1, when it is there once."""
    return float(sample.notes["resident_bytes"]) / float(sample.notes["pss_bytes"])


def compactness(sample: Sample) -> float:
    """Samples in a byte of resident memory."""
    return 1 / float(sample.notes["resident_bytes"])


@dataclass(frozen=True)
class Floor:
    """What must be reached.

    Attributes:
        text: as people say it.
        of: who must reach it.
        at_least: the ratio to be reached.
        metric: what is compared.
        against: with whom; the slowest of them counts.
        against_metric: their metric, when it is another.
        base: with what, when there is nobody to compare with.
        either: floors of a case with the same word here hold when one of them does.
    """

    text: str
    of: Contestant
    at_least: float
    metric: Metric
    against: tuple[Contestant, ...] = ()
    against_metric: Metric | None = None
    base: float = 0.0
    either: str = ""


@dataclass(frozen=True)
class Case:
    """One race.

    Attributes:
        name: what ``--cases`` selects.
        dataset: key of its data set; None when it needs no more than a folder.
        contestants: who runs, in the order of the first round.
        floors: what must hold.
        about: one line.
    """

    name: str
    dataset: str
    about: str
    contestants: tuple[Contestant, ...]
    floors: tuple[Floor, ...] = field(default=())


FIO_4K = FioRead(4 * KIB, DEPTH)
FIO_4K_32 = FioRead(4 * KIB, 32)
FIO_4K_1 = FioRead(4 * KIB, 1)
FIO_256K = FioRead(256 * KIB, 32)
FIO_SEQUENTIAL = FioRead(MIB, 32, random=False)
FIO_WRITE = FioWrite()
URING = BareUring()
COPY = BareCopy()
TOUCH = FreshMemory()
COLD, WARM = Files(cold=True), Files(cold=False)
SOURCE_READ = ParallelFiles()

GLOBAL_16 = Epoch("global", 1 / 16, whole=False)
GLOBAL_8 = Epoch("global", 1 / 8)
GLOBAL_ALL = Epoch("global", WHOLE)
CHUNK = Epoch("chunk", 1 / 16)
READ_16 = Batches(1 / 16)
CACHED = Cached()
SERVICE_CACHED, SERVICE_8 = ServiceCached(), ServiceClients(8)
GET_COLD, GET_WARM = Get(cold=True), Get(cold=False)
FIND_PACKED, FIND = Find(packed=True), Find(packed=False)
LOAD, LOAD_NAMES = Load(names=False), Load(names=True)
IMPORT, IMPORT_PATH = Import("shuffled"), Import("path")
NATIVE_COLD, NATIVE_WARM = MountFiles("native", cold=True), MountFiles("native", cold=False)
PYFUSE3_COLD, PYFUSE3_WARM = MountFiles("pyfuse3", cold=True), MountFiles("pyfuse3", cold=False)
BARE_COLD, BARE_WARM = MountFiles("bare", cold=True), MountFiles("bare", cold=False)
LIBFUSE_COLD = MountFiles("libfuse", cold=True)
LIBFUSE_THREADS_COLD = MountFiles("libfuse-threads", cold=True)
NATIVE_TOGETHER = MountFiles("native", cold=True, together=True)
LIBFUSE_TOGETHER = MountFiles("libfuse", cold=True, together=True)
SQUASH_COLD = MountFiles("squashfuse", cold=True)
SQUASH_WARM = MountFiles("squashfuse", cold=False)


def _random(dataset: str, about: str, *floors: Floor) -> Case:
    fios = (FIO_256K,) if dataset == "110k" else (FIO_4K, FIO_4K_32)
    racers = (GLOBAL_16, READ_16, COLD, *fios, URING)
    return Case(f"random-{dataset}", dataset, about, racers, floors)


def _epoch(dataset: str, *floors: Floor) -> Case:
    about = "a whole epoch in global order, cold, budget as large as the data"
    return Case(f"epoch-{dataset}", dataset, about, (GLOBAL_ALL, COLD, FIO_256K, TOUCH), floors)


def _chunk(dataset: str, *floors: Floor) -> Case:
    about = "chunk shuffle, cold, budget 1/16 of the data"
    return Case(f"chunk-{dataset}", dataset, about, (CHUNK, COLD, FIO_256K), floors)


def _planner(dataset: str, *floors: Floor) -> Case:
    about = "global order by the planner's choice, cold, budget 1/8 of the data"
    racers = (GLOBAL_8, URING, FIO_4K, FIO_256K)
    return Case(f"planner-{dataset}", dataset, about, racers, floors)


def _cached(dataset: str, *floors: Floor) -> Case:
    about = "batches of samples in memory, random order"
    return Case(f"cached-{dataset}", dataset, about, (CACHED, COPY, WARM), floors)


def _get(dataset: str) -> Case:
    about = "one sample at a time by its path"
    racers = (GET_COLD, COLD, FIO_4K_1, GET_WARM, WARM)
    return Case(f"get-{dataset}", dataset, about, racers)


def _import(dataset: str) -> Case:
    about = "a folder of files into a volume"
    floor = Floor(
        "80% of the slower of source read and device write",
        IMPORT,
        0.8,
        bandwidth,
        (SOURCE_READ, FIO_WRITE),
    )
    racers = (IMPORT, IMPORT_PATH, SOURCE_READ, FIO_WRITE)
    return Case(f"import-{dataset}", dataset, about, racers, (floor,))


def _mount(dataset: str) -> Case:
    about = "open + read + close of random files through FUSE"
    libfuse = (LIBFUSE_COLD, LIBFUSE_THREADS_COLD, LIBFUSE_TOGETHER)
    ours = (NATIVE_COLD, NATIVE_TOGETHER, PYFUSE3_COLD)
    cold = (*ours, BARE_COLD, *libfuse, SQUASH_COLD, COLD, FIO_4K_1)
    warm = (NATIVE_WARM, PYFUSE3_WARM, BARE_WARM, SQUASH_WARM, WARM)
    racers = (*cold, *warm)
    bare = "pyfuse3 at its own bare limit, {} (90% counts as at it)"
    floors = (
        Floor("native: 1.5x squashfuse, cold", NATIVE_COLD, 1.5, rate, (SQUASH_COLD,)),
        Floor("native: 1.5x squashfuse, warm", NATIVE_WARM, 1.5, rate, (SQUASH_WARM,)),
        Floor("native: plain files, cold", NATIVE_COLD, 1.0, rate, (COLD,)),
        Floor("native: 80% of plain files, warm", NATIVE_WARM, 0.8, rate, (WARM,)),
        Floor(bare.format("cold"), PYFUSE3_COLD, 0.9, rate, (BARE_COLD,)),
        Floor(bare.format("warm"), PYFUSE3_WARM, 0.9, rate, (BARE_WARM,)),
    )
    return Case(f"mount-{dataset}", dataset, about, racers, floors)


def _nvme(dataset: str, block_bytes: int, depth: int) -> Case:
    about = f"initiators on one core against one target (--target), depth {depth}"
    schemes = ("nvme-tcp", "spdk")
    reads = tuple(Initiator(scheme, depth) for scheme in schemes)
    epochs = tuple(Initiator(scheme, depth, ahead=True) for scheme in schemes)
    perf = SpdkPerf(block_bytes, depth)
    bare = tuple(BareInitiator(block_bytes, depth, as_batch) for as_batch in (False, True))
    floors = tuple(
        Floor("90% of SPDK's perf tool", who, 0.9, rate, (perf,)) for who in (*reads, *epochs)
    )
    return Case(dataset, dataset, about, (*reads, perf, *epochs, *bare), floors)


CASES: tuple[Case, ...] = (
    _random(
        "4k",
        "global order, cold, data larger than the budget, one process",
        Floor("90% of fio's 4 KiB IOPS at the same depth", GLOBAL_16, 0.9, rate, (FIO_4K,)),
        Floor("3x plain files", GLOBAL_16, 3.0, rate, (COLD,)),
        Floor("a fifth of plain files' CPU time", GLOBAL_16, 5.0, cheapness, (COLD,)),
        Floor(
            "CPU time of the bare io_uring reader + 1 us",
            GLOBAL_16,
            1.0,
            cheapness,
            (URING,),
            cheapness_plus_1_us,
        ),
    ),
    _random(
        "110k",
        "global order, cold, data larger than the budget, one process",
        Floor("90% of a bare io_uring reader", GLOBAL_16, 0.9, bandwidth, (URING,)),
        Floor("3x plain files", GLOBAL_16, 3.0, rate, (COLD,)),
    ),
    _random("512", "global order, cold, budget 1/16: whatever the planner makes of it"),
    _epoch(
        "4k",
        Floor("70% of fio's 256 KiB bandwidth", GLOBAL_ALL, 0.7, bandwidth, (FIO_256K,)),
        Floor("10x plain files", GLOBAL_ALL, 10.0, rate, (COLD,)),
    ),
    _epoch(
        "512",
        Floor("70% of fio's 256 KiB bandwidth", GLOBAL_ALL, 0.7, bandwidth, (FIO_256K,)),
        Floor("30x plain files", GLOBAL_ALL, 30.0, rate, (COLD,)),
    ),
    _epoch(
        "110k",
        Floor("70% of fio's 256 KiB bandwidth", GLOBAL_ALL, 0.7, bandwidth, (FIO_256K,)),
    ),
    _chunk(
        "4k",
        Floor("85% of fio's 256 KiB bandwidth", CHUNK, 0.85, bandwidth, (FIO_256K,)),
        Floor("12x plain files", CHUNK, 12.0, rate, (COLD,)),
    ),
    _chunk("512"),
    _chunk("110k"),
    _planner("512", Floor("4x the IOPS-bound rate", GLOBAL_8, 4.0, rate, (URING,))),
    _planner("4k"),
    _cached("512", Floor("2M samples/s/core", CACHED, 1.0, per_core, base=2e6)),
    _cached("4k", Floor("1M samples/s/core", CACHED, 1.0, per_core, base=1e6)),
    _cached("110k", Floor("100k samples/s/core", CACHED, 1.0, per_core, base=1e5)),
    Case(
        "service-cached",
        "4k",
        "batches of samples in memory, through a node service and without",
        (SERVICE_CACHED, CACHED),
        (Floor("1.5x the cost of the in-process call", SERVICE_CACHED, 1 / 1.5, rate, (CACHED,)),),
    ),
    Case(
        "service-8",
        "4k",
        "8 processes on one node service, and one that reads by itself; samples in memory",
        (SERVICE_8, CACHED),
        (
            Floor("the rate of one in-process reader", SERVICE_8, 1.0, rate, (CACHED,)),
            Floor("directory and cache are there once", SERVICE_8, 0.95, sharing, base=1.0),
        ),
    ),
    _get("4k"),
    Case(
        "directory",
        "512",
        "the sample directory: lookups and loading",
        (FIND_PACKED, FIND, DictLookup(), LOAD, LOAD_NAMES, FIO_SEQUENTIAL),
        (
            Floor("5M batched lookups/s/core", FIND_PACKED, 1.0, per_core, base=5e6),
            Floor("32 B resident per sample", LOAD, 1.0, compactness, base=1 / 32),
            Floor("ready 1 s after open", LOAD, 1.0, promptness, base=1.0, either="ready"),
            Floor(
                "or ready at the disk's bandwidth",
                LOAD,
                0.9,
                bandwidth,
                (FIO_SEQUENTIAL,),
                either="ready",
            ),
        ),
    ),
    _import("4k"),
    _import("110k"),
    _mount("4k"),
    _nvme("nvme-4k", 4 * KIB, 32),
    _nvme("nvme-128k", 128 * KIB, 16),
    Case(
        "nvme-idle",
        "nvme-4k",
        "queue pairs that wait (--target)",
        (Idle("nvme-tcp"), Idle("spdk")),
    ),
    Case(
        "random-corpus",
        "corpus",
        "real small files in global order, cold, budget 1/16",
        (GLOBAL_16, READ_16, COLD, URING),
        (Floor("3x plain files", GLOBAL_16, 3.0, rate, (COLD,)),),
    ),
    _epoch("corpus"),
    _chunk("corpus"),
    _cached("corpus"),
    _import("corpus"),
    _mount("corpus"),
)
