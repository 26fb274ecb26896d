"""The sample directory: looking up paths in batches, and loading it into memory.

A synthetic directory of any number of paths is built once and written to a file in the format of a
dataset's directory. It is opened by the code that opens a dataset's directory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from bench.errors import WrongBytesError
from bench.measurement import Environment, Measurement
from bench.resources import timed
from dlfs._native.paths import pack_paths
from dlfs._native.segment import build_segment
from dlfs.base.units import KIB, MIB
from dlfs.block import open_device
from dlfs.directory import DirectoryIdentity, DirectorySizes, FrozenDirectory, load_directory
from dlfs.format.geometry import ChunkRun, DataSpace, Geometry
from dlfs.format.location import pack_locations
from dlfs.store.chunk_reader import read_into

CHUNK_BYTES = 256 * KIB
UUID_OF_BENCH = UUID("00000000-0000-4000-8000-00000000be0c")
IDENTITY = DirectoryIdentity(UUID_OF_BENCH, UUID_OF_BENCH, "the synthetic directory")
BATCH = 4096
LOOKED_UP = 1 << 18
"""Different paths that are looked up in a run."""
DICT_MAX = 2_000_000
CLASSES = 1000


def path_of(index: int) -> bytes:
    """Return a path like ImageNet's: a class, and a number."""
    return b"train/n%08d/n%08d_%08d.JPEG" % (index // CLASSES, index // CLASSES, index)


@dataclass(frozen=True)
class LaidDirectory:
    """A directory segment of ``count`` paths in a file."""

    path: Path
    sizes: DirectorySizes
    count: int


def lay_directory(folder: Path, count: int) -> LaidDirectory:
    """Write the segment of ``count`` paths to a file, unless an earlier run did."""
    path = folder / f"directory-{count}"
    note = folder / f"directory-{count}.sizes"
    if not note.exists():
        text, offsets = pack_paths([path_of(index) for index in range(count)])
        numbers = np.arange(count, dtype=np.uint64)
        locations = pack_locations(numbers * 4096, np.full(count, 4096), numbers & 0xFFFFFFFF)
        data_bytes = -(-count * 4096 // CHUNK_BYTES) * CHUNK_BYTES
        segment = build_segment(
            text,
            offsets,
            locations,
            dataset_uuid=UUID_OF_BENCH.bytes,
            data_bytes=data_bytes,
            chunk_bytes=CHUNK_BYTES,
        )
        with open(path, "wb") as file:
            file.write(segment.entries.data)
            file.write(segment.names.data)
            file.truncate(-(-file.tell() // CHUNK_BYTES) * CHUNK_BYTES)
        note.write_text(f"{segment.entries.nbytes} {segment.names.nbytes}")
    entries_bytes, names_bytes = map(int, note.read_text().split())
    return LaidDirectory(path, DirectorySizes(entries_bytes, names_bytes), count)


def open_directory(laid: LaidDirectory) -> FrozenDirectory:
    """Load a directory from its file into private memory; names are loaded on the first lookup."""
    chunks = laid.path.stat().st_size // CHUNK_BYTES
    geometry = Geometry.of_one_group(1, CHUNK_BYTES, 4096, 0, chunks)
    space = DataSpace(geometry, (ChunkRun(0, chunks),))

    def read(address: int, memory: memoryview) -> None:
        with open_device(str(laid.path)) as device:
            read_into([device], space, address, np.frombuffer(memory, np.uint8))

    return load_directory(IDENTITY, laid.sizes, read, root=None)


def _draw(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, count, LOOKED_UP)


@dataclass(frozen=True)
class Find:
    """Random paths looked up in batches of 4,096, one thread.

    Attributes:
        packed: look up paths in the packed form of native callers; else Python's bytes objects.
    """

    packed: bool

    @property
    def label(self) -> str:
        return f"DLFS index_of, batches of {'packed paths' if self.packed else 'bytes objects'}"

    def run(self, environment: Environment) -> Measurement:
        count = environment.limits.paths
        laid = lay_directory(environment.scene.folder, count)
        wanted = _draw(count, environment.round)
        paths = [path_of(index) for index in wanted.tolist()]
        batches = [paths[at : at + BATCH] for at in range(0, LOOKED_UP, BATCH)]
        packed = [pack_paths(batch) for batch in batches]
        with open_directory(laid) as directory:
            directory.find(batches[0])
            done = 0
            with timed() as watch:
                until = time.perf_counter() + environment.limits.seconds
                while time.perf_counter() < until:
                    at = done % len(batches)
                    if self.packed:
                        directory.find_packed(*packed[at])
                    else:
                        directory.find(batches[at])
                    done += 1
            total = int((directory.find(paths) == wanted).sum())
        if total != LOOKED_UP:
            raise WrongBytesError(f"looked up {LOOKED_UP} paths: {total} were right")
        return Measurement(done * BATCH, 0, watch.seconds, watch.cpu_seconds, total)


@dataclass(frozen=True)
class DictLookup:
    """The same lookups in a Python dictionary of at most two million paths, for scale."""

    label = "a Python dict of the same paths"

    def run(self, environment: Environment) -> Measurement:
        count = min(environment.limits.paths, DICT_MAX)
        table = {path_of(index): index for index in range(count)}
        paths = [path_of(index) for index in _draw(count, environment.round).tolist()]
        done = 0
        with timed() as watch:
            until = time.perf_counter() + environment.limits.seconds
            while time.perf_counter() < until:
                first = done % LOOKED_UP
                [table[path] for path in paths[first : first + BATCH]]
                done += BATCH
        return Measurement(done, 0, watch.seconds, watch.cpu_seconds)


@dataclass(frozen=True)
class Load:
    """The loading of a directory with O_DIRECT: entries are read and every block is verified.

    Attributes:
        names: also load the names, so that paths can be looked up.
    """

    names: bool

    @property
    def label(self) -> str:
        return f"DLFS directory from disk, {'ready for paths' if self.names else 'ready to read'}"

    def run(self, environment: Environment) -> Measurement:
        laid = lay_directory(environment.scene.folder, environment.limits.paths)
        environment.machine.drop_caches()
        with timed() as watch:
            directory = open_directory(laid)
            if self.names:
                directory.find([path_of(0)])
        with directory:
            if directory.name(laid.count - 1) != path_of(laid.count - 1):
                raise WrongBytesError("the last path differs")
        total = laid.sizes.entries_bytes + self.names * laid.sizes.names_bytes
        resident = laid.sizes.entries_bytes / laid.count
        notes = {"resident_bytes": resident, "mib": total / MIB}
        return Measurement(laid.count, total, watch.seconds, watch.cpu_seconds, 1, notes)
