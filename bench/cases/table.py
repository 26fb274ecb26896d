"""The cases as data: which contenders read which data set, and which floors must hold.

A floor compares one
contender with others of its own case in each round. The median of the rounds' ratios counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.contenders.bare import BareCopy, BareUring, FreshMemory
from bench.contenders.catalogs import ListDatasets, TinyImports
from bench.contenders.checkpoint import RANKS, Checkpoint
from bench.contenders.directory import DictLookup, Find, Load
from bench.contenders.fields import FieldLoader, Hdf5Loader
from bench.contenders.files import Files, ParallelFiles
from bench.contenders.fio import FioRead, FioWrite
from bench.contenders.imports import Import, ImportByWorkers, ReadBesideWrite
from bench.contenders.initiators import BareInitiator, Idle, Initiator, SpdkPerf
from bench.contenders.mounts import MountFiles
from bench.contenders.remote import FetchShards, ImportShards
from bench.contenders.samples import DEPTH, WHOLE, Batches, Cached, Epoch, Get
from bench.contenders.service import (
    ServiceBatches,
    ServiceCached,
    ServiceClients,
    ServiceEpoch,
)
from bench.contenders.turns import FilesInTurns
from bench.contenders.walks import COMMANDS, Walk
from bench.measurement import Contender, Measurement
from dlfs.base.units import KIB, MIB

Metric = Callable[[Measurement], float]
"""A value computed from one run; larger is better."""


def rate(run: Measurement) -> float:
    """Return samples per second."""
    return run.samples / run.seconds


def bandwidth(run: Measurement) -> float:
    """Return bytes of samples per second."""
    return run.bytes / run.seconds


def per_core(run: Measurement) -> float:
    """Return samples per second of one core, by elapsed or CPU time, whichever is longer."""
    return run.samples / max(run.seconds, run.cpu_seconds)


def per_cpu_second(run: Measurement) -> float:
    """Return samples per second of CPU time."""
    return run.samples / max(run.cpu_seconds, 1e-9)


def per_cpu_second_plus_1_us(run: Measurement) -> float:
    """Return samples per second of CPU time, with 1 us of CPU time added to each sample."""
    return run.samples / (max(run.cpu_seconds, 1e-9) + 1e-6 * run.samples)


def per_cpu_second_plus_30_ms(run: Measurement) -> float:
    """Return samples per second of CPU time, with 30 ms of CPU time added to each sample."""
    return run.samples / (run.cpu_seconds + 0.03 * run.samples)


def per_second(run: Measurement) -> float:
    """Return how many such runs would fit in a second."""
    return 1 / run.seconds


def load_bandwidth(run: Measurement) -> float:
    """Return bytes per second of the load of a checkpoint."""
    return run.bytes / float(run.notes["load_seconds"])


def stalls_per_second(run: Measurement) -> float:
    """Return how many stalls of a training step by ``async_save`` would fit in a second."""
    return 1 / max(float(run.notes["overlapped_stall_seconds"]), 1e-6)


def shared_share(run: Measurement) -> float:
    """Return shared memory over the memory of all processes: 1 if nothing exists twice."""
    return float(run.notes["resident_bytes"]) / float(run.notes["pss_bytes"])


def per_resident_byte(run: Measurement) -> float:
    """Return samples per byte of resident memory."""
    return 1 / float(run.notes["resident_bytes"])


@dataclass(frozen=True)
class Floor:
    """A ratio that a contender must reach.

    Attributes:
        text: description for tables.
        of: contender that must reach the floor.
        at_least: least ratio.
        metric: value that is compared.
        against: contenders to compare with; the slowest of them counts.
        against_metric: value of these contenders to compare with, if it is another one.
        base: value to compare with if there is no other contender.
        either: group of the floor; one met floor of a group is enough. Empty: no group.
    """

    text: str
    of: Contender
    at_least: float
    metric: Metric
    against: tuple[Contender, ...] = ()
    against_metric: Metric | None = None
    base: float = 0.0
    either: str = ""


@dataclass(frozen=True)
class Case:
    """Contenders that are compared on one data set.

    Attributes:
        name: name that ``--cases`` selects.
        dataset: key of the data set.
        about: description for tables.
        contenders: contenders in the order of the first round.
        floors: ratios that must hold.
    """

    name: str
    dataset: str
    about: str
    contenders: tuple[Contender, ...]
    floors: tuple[Floor, ...] = ()


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
COLD_8 = Files(cold=True, programs=8)
SOURCE_READ = ParallelFiles()

GLOBAL_16 = Epoch("global", 1 / 16, whole=False)
GLOBAL_8 = Epoch("global", 1 / 8)
GLOBAL_ALL = Epoch("global", WHOLE)
CHUNK = Epoch("chunk", 1 / 16)
READ_16, READ_ALL = Batches(1 / 16), Batches(WHOLE)
CACHED = Cached()
SERVICE_CACHED, SERVICE_8 = ServiceCached(), ServiceClients(8)
SERVICE_EPOCH_16, SERVICE_EPOCH_ALL = ServiceEpoch(1 / 16, whole=False), ServiceEpoch(WHOLE)
SERVICE_READ_16, SERVICE_READ_ALL = ServiceBatches(1 / 16), ServiceBatches(WHOLE)
GET_COLD, GET_WARM = Get(cold=True), Get(cold=False)
FIND_PACKED, FIND = Find(packed=True), Find(packed=False)
LOAD, LOAD_NAMES = Load(names=False), Load(names=True)
IMPORT, IMPORT_PATH = Import("shuffled"), Import("path")
READ_BESIDE_WRITE = ReadBesideWrite()
BY_ONE, BY_TWO = ImportByWorkers(1), ImportByWorkers(2)
SLOW_BY_ONE, SLOW_BY_TWO = ImportByWorkers(1, 20), ImportByWorkers(2, 20)
IMPORT_SHARDS, FETCH_SHARDS = ImportShards(), FetchShards()
NATIVE_COLD, NATIVE_WARM = MountFiles("native", "cold"), MountFiles("native", "warm")
NATIVE_COLD_8 = MountFiles("native", "cold", programs=8)
URING_COLD, URING_WARM = MountFiles("uring", "cold"), MountFiles("uring", "warm")
NATIVE_SERVED, URING_SERVED = MountFiles("native", "served"), MountFiles("uring", "served")
URING_COLD_8 = MountFiles("uring", "cold", programs=8)
CHECKPOINT = Checkpoint()
TINY_FEW, TINY_MANY = TinyImports(few=True), TinyImports(few=False)
LIST, LIST_PROGRAM = ListDatasets(program=False), ListDatasets(program=True)
SQUASH_COLD = MountFiles("squashfuse", "cold")
SQUASH_WARM = MountFiles("squashfuse", "warm")


def _random(dataset: str, about: str, *floors: Floor) -> Case:
    fios = (FIO_256K,) if dataset == "110k" else (FIO_4K, FIO_4K_32)
    contenders = (GLOBAL_16, READ_16, COLD, *fios, URING)
    return Case(f"random-{dataset}", dataset, about, contenders, floors)


def _epoch(dataset: str, *floors: Floor) -> Case:
    about = "a whole epoch in global order, cold, budget as large as the data"
    return Case(f"epoch-{dataset}", dataset, about, (GLOBAL_ALL, COLD, FIO_256K, TOUCH), floors)


def _chunk(dataset: str, *floors: Floor) -> Case:
    about = "chunk shuffle, cold, budget 1/16 of the data"
    return Case(f"chunk-{dataset}", dataset, about, (CHUNK, COLD, FIO_256K), floors)


def _planner(dataset: str, *floors: Floor) -> Case:
    about = "global order by the planner's choice, cold, budget 1/8 of the data"
    contenders = (GLOBAL_8, URING, FIO_4K, FIO_256K)
    return Case(f"planner-{dataset}", dataset, about, contenders, floors)


def _cached(dataset: str, *floors: Floor) -> Case:
    about = "batches of samples in memory, random order"
    return Case(f"cached-{dataset}", dataset, about, (CACHED, COPY, WARM), floors)


def _service_cold(dataset: str) -> Case:
    about = "cold, through a node service and without, data larger and smaller than the memory"
    pairs: dict[str, tuple[Contender, Contender]] = {
        "epoch, all in memory": (SERVICE_EPOCH_ALL, GLOBAL_ALL),
        "epoch, budget 1/16": (SERVICE_EPOCH_16, GLOBAL_16),
        "read(), all in memory": (SERVICE_READ_ALL, READ_ALL),
        "read(), budget 1/16": (SERVICE_READ_16, READ_16),
    }
    floors = tuple(
        Floor(f"{what}: 90% of in-process", served, 0.9, rate, (local,))
        for what, (served, local) in pairs.items()
    )
    contenders = tuple(contender for pair in pairs.values() for contender in pair)
    return Case(f"service-cold-{dataset}", dataset, about, contenders, floors)


def _memory(dataset: str) -> Case:
    about = "cold, with memory for all of the data and for a sixteenth"
    floors = (
        Floor("epoch: 90% of a sixteenth", GLOBAL_ALL, 0.9, rate, (GLOBAL_16,)),
        Floor("read(): 90% of a sixteenth", READ_ALL, 0.9, rate, (READ_16,)),
    )
    contenders = (GLOBAL_ALL, GLOBAL_16, READ_ALL, READ_16, TOUCH)
    return Case(f"memory-{dataset}", dataset, about, contenders, floors)


def _fields(dataset: str) -> Case:
    about = "samples with fields as tensors, first and second epoch of PyTorch's loaders"
    contenders: list[Contender] = [FIO_256K, FIO_SEQUENTIAL]
    floors = []
    for cold, share in ((True, 1 / 16), (False, WHOLE)):
        when = "cold" if cold else "second epoch"
        ours, plain = FieldLoader(True, cold, share), FieldLoader(False, cold, share)
        others = {"h5py": Hdf5Loader(False, cold), "h5py's rows": Hdf5Loader(True, cold)}
        contenders += [ours, plain, *others.values()]
        floors.append(Floor(f"{when}: 90% of the bytes without fields", ours, 0.9, rate, (plain,)))
        floors += [
            Floor(f"{when}: 5x {name}", ours, 5.0, rate, (peer,)) for name, peer in others.items()
        ]
        if cold:
            floors.append(Floor("cold: 90% of the disk", ours, 0.9, bandwidth, (FIO_256K,)))
    contenders.append(FieldLoader(cold=True, share=WHOLE))
    return Case(f"fields-{dataset}", dataset, about, tuple(contenders), tuple(floors))


def _import(dataset: str) -> Case:
    about = "a folder of files into a volume"
    floor = Floor(
        "90% of the files read beside fio's writes",
        IMPORT,
        0.9,
        bandwidth,
        (READ_BESIDE_WRITE,),
    )
    contenders = (IMPORT, IMPORT_PATH, READ_BESIDE_WRITE, SOURCE_READ, FIO_WRITE)
    return Case(f"import-{dataset}", dataset, about, contenders, (floor,))


def _mount(dataset: str) -> Case:
    about = "open + read + close of random files through FUSE"
    more = (NATIVE_SERVED, URING_SERVED, NATIVE_COLD_8, URING_COLD_8, COLD_8)
    cold = (NATIVE_COLD, URING_COLD, SQUASH_COLD, COLD, FIO_4K_1, *more)
    warm = (NATIVE_WARM, URING_WARM, SQUASH_WARM, WARM)
    contenders = (*cold, *warm)
    floors = (
        Floor("native: 1.5x squashfuse, cold", NATIVE_COLD, 1.5, rate, (SQUASH_COLD,)),
        Floor("native: 1.5x squashfuse, warm", NATIVE_WARM, 1.5, rate, (SQUASH_WARM,)),
        Floor("native: plain files, cold", NATIVE_COLD, 1.0, rate, (COLD,)),
        Floor("io_uring: plain files, cold", URING_COLD, 1.0, rate, (COLD,)),
        Floor("io_uring: plain files, cold, 8 programs", URING_COLD_8, 1.0, rate, (COLD_8,)),
        Floor("native: 80% of plain files, warm", NATIVE_WARM, 0.8, rate, (WARM,)),
        Floor("io_uring: 80% of plain files, warm", URING_WARM, 0.8, rate, (WARM,)),
    )
    return Case(f"mount-{dataset}", dataset, about, contenders, floors)


def _turns(dataset: str) -> Case:
    about = "large files through a mount with memory for half of one, in turns of 256 KiB, cold"
    native, uring = FilesInTurns("native"), FilesInTurns("uring")
    plain = FilesInTurns("")
    floors = tuple(
        Floor(f"{name}: 80% of plain files", ours, 0.8, bandwidth, (plain,))
        for name, ours in (("native", native), ("io_uring", uring))
    )
    return Case(f"turns-{dataset}", dataset, about, (native, uring, plain), floors)


def _walk(dataset: str) -> Case:
    about = "all files in the order of a directory tree, cold"
    contenders: list[Contender] = []
    floors = []
    for program in COMMANDS:
        ours, plain = Walk(program, mounted=True), Walk(program, mounted=False)
        contenders += [ours, plain]
        floors.append(Floor(f"{program}: 5x plain files", ours, 5.0, rate, (plain,)))
    return Case(f"walk-{dataset}", dataset, about, tuple(contenders), tuple(floors))


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
        Floor("a fifth of plain files' CPU time", GLOBAL_16, 5.0, per_cpu_second, (COLD,)),
        Floor(
            "CPU time of the bare io_uring reader + 1 us",
            GLOBAL_16,
            1.0,
            per_cpu_second,
            (URING,),
            per_cpu_second_plus_1_us,
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
            Floor("directory and cache are there once", SERVICE_8, 0.95, shared_share, base=1.0),
        ),
    ),
    _service_cold("4k"),
    _service_cold("110k"),
    _memory("4k"),
    _memory("110k"),
    Case(
        "get-4k",
        "4k",
        "one sample at a time by its path",
        (GET_COLD, COLD, FIO_4K_1, GET_WARM, WARM),
    ),
    Case(
        "directory",
        "512",
        "the sample directory: lookups and loading",
        (FIND_PACKED, FIND, DictLookup(), LOAD, LOAD_NAMES, FIO_SEQUENTIAL),
        (
            Floor("5M batched lookups/s/core", FIND_PACKED, 1.0, per_core, base=5e6),
            Floor("32 B resident per sample", LOAD, 1.0, per_resident_byte, base=1 / 32),
            Floor("ready 1 s after open", LOAD, 1.0, per_second, base=1.0, either="ready"),
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
    _fields("cosmoflow"),
    _fields("unet3d"),
    _fields("caption"),
    _import("4k"),
    _import("110k"),
    Case(
        "import-workers",
        "4k",
        "a folder of files by one and two workers; opening a file takes 20 ms, or none",
        (SLOW_BY_ONE, SLOW_BY_TWO, BY_ONE, BY_TWO),
        (
            Floor("0.7 of the time of one", SLOW_BY_TWO, 1 / 0.7, rate, (SLOW_BY_ONE,)),
            Floor("the time of one", BY_TWO, 1.0, rate, (BY_ONE,)),
        ),
    ),
    Case(
        "import-http",
        "110k",
        "tar shards from a web server into a volume",
        (IMPORT_SHARDS, FETCH_SHARDS, FIO_WRITE),
        (Floor("90% of fsspec alone", IMPORT_SHARDS, 0.9, bandwidth, (FETCH_SHARDS,)),),
    ),
    Case(
        "checkpoint",
        "state",
        f"a training state of {RANKS} ranks: save, cold load, and async_save",
        (CHECKPOINT, FIO_WRITE, FIO_SEQUENTIAL),
        (
            Floor("90% of fio's sequential writes", CHECKPOINT, 0.9, bandwidth, (FIO_WRITE,)),
            Floor(
                "load: 90% of fio's sequential reads",
                CHECKPOINT,
                0.9,
                load_bandwidth,
                (FIO_SEQUENTIAL,),
                bandwidth,
            ),
            Floor(
                "a step stalls under 50 ms (async_staging)",
                CHECKPOINT,
                1.0,
                stalls_per_second,
                base=20,
            ),
        ),
    ),
    Case(
        "import-many",
        "tiny",
        "the 10,000th import of one sample into a volume, and the listing of its datasets",
        (TINY_FEW, TINY_MANY, LIST, LIST_PROGRAM),
        (
            Floor(
                "CPU time of the tenth import + 30 ms",
                TINY_MANY,
                1.0,
                per_cpu_second,
                (TINY_FEW,),
                per_cpu_second_plus_30_ms,
            ),
            Floor("listed after 0.3 s", LIST, 1.0, per_second, base=1 / 0.3),
        ),
    ),
    _mount("4k"),
    _mount("110k"),
    _walk("4k"),
    _turns("60m"),
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
    _walk("corpus"),
)
