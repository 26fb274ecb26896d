"""Data sets: the bytes of their samples, their plain files, and the volume that holds them.

A synthetic sample is a part of a fixed pool of random bytes behind the sample's own index. Any
sample can be made again at any time, as fast as memory is copied, and none compresses. Index ``i``
is the ``i``-th path in path order.

A `Scene` is a data set laid out on the disk under test. Its plain files are a uniform random subset
of the samples where there are more samples than files are allowed, because creating millions of
files takes longer than measuring.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.errors import BadArgumentError
from dlfs.base.units import GIB, KIB, MIB
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import import_dataset

DATASET = "samples"
"""Name of the dataset in every volume of the benchmarks."""

POOL_BYTES = 64 * MIB
INDEX_BYTES = 8
DIRECTORY_SAMPLES = 1000
"""Synthetic samples in one folder."""
WRITE_BYTES = 16 * MIB
"""Bytes of samples that are written to a volume or file at once."""
CORPUS_PACKAGE = "linux-source-6.1"
CORPUS_ARCHIVE = Path("/usr/src/linux-source-6.1.tar.xz")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Parameters of a data set.

    Attributes:
        key: name by which cases and ``--sizes`` refer to it.
        mean_bytes: mean length of a sample.
        spread: sigma of the lognormal distribution of lengths; 0: all have one length.
        total_bytes: bytes of all samples, unless ``--size`` is given.
        quick_bytes: bytes of all samples with ``--quick``.
        batch: samples of one batch.
        about: description for tables.
    """

    key: str
    mean_bytes: int
    spread: float
    total_bytes: int
    quick_bytes: int
    batch: int
    about: str


SPECS = (
    DatasetSpec("512", 512, 0.0, 512 * MIB, 256 * MIB, 1024, "512 B samples"),
    DatasetSpec("4k", 4 * KIB, 0.0, 1 * GIB, 512 * MIB, 1024, "4 KiB samples"),
    DatasetSpec(
        "110k", 110 * KIB, 0.6, 1536 * MIB, 1 * GIB, 128, "lognormal around 110 KiB, as ImageNet's"
    ),
    DatasetSpec("corpus", 16 * KIB, 0.0, 0, 0, 1024, "the files of a folder: --corpus"),
    DatasetSpec("cosmoflow", 2 * MIB, 0.0, 1 * GIB, 512 * MIB, 16, "cubes and their targets"),
    DatasetSpec("unet3d", 10 * MIB, 0.0, 1 * GIB, 512 * MIB, 4, "scans and their masks"),
    DatasetSpec("60m", 60 * MIB, 0.0, 420 * MIB, 420 * MIB, 1, "files of many records"),
    DatasetSpec("caption", 110 * KIB, 0.6, 1 * GIB, 512 * MIB, 128, "images and captions"),
    DatasetSpec("state", 32 * MIB, 0.0, 2000 * MIB, 512 * MIB, 1, "a training state"),
    DatasetSpec("tiny", 10, 0.0, MIB, MIB, 1, "datasets of one sample"),
    # Batches of 8 and 32 MiB. A batch begins and ends with a queue that is not full, and costs
    # Python about 0.1 ms. spdk_nvme_perf, the contender here, has no batches.
    DatasetSpec("nvme-4k", 4 * KIB, 0.0, 512 * MIB, 256 * MIB, 2048, "4 KiB samples on --target"),
    DatasetSpec(
        "nvme-128k", 128 * KIB, 0.0, 1024 * MIB, 256 * MIB, 256, "128 KiB samples on --target"
    ),
)
OWN_KEYS = ("state", "tiny")
"""Keys of data sets that contenders write themselves; they have no plain files."""
STATE_TENSORS = 64
TARGET_KEYS = ("nvme-4k", "nvme-128k")
"""Keys of data sets that lie on a namespace and have no plain files."""

LENGTH_MIN, LENGTH_MAX = 1 * KIB, 1 * MIB
"""Bounds of lognormal lengths, in bytes."""


def spec_of(key: str) -> DatasetSpec:
    """Return the parameters of a data set."""
    return next(spec for spec in SPECS if spec.key == key)


# ---- sources -------------------------------------------------------------------------------------


class Source:
    """The samples of a data set, 0..n-1, any of them at any time.

    Attributes:
        lengths: length of each sample in bytes, ``int64[n]``.
    """

    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield ``(index, path, data)`` of each sample in index order."""
        for index in range(len(self)):
            yield index, self.path(index), self.data(index)

    def path(self, index: int) -> bytes:
        """Return the relative path of a sample. Paths rise with the index and are unique."""
        raise NotImplementedError

    def data(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        raise NotImplementedError

    def total_bytes(self) -> int:
        """Return the bytes of all samples."""
        return int(self.lengths.sum())

    def ranges(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of samples, first and end, of at most so many bytes or one sample each."""
        ends = np.cumsum(self.lengths)
        first = 0
        while first < len(self):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + size_bytes, side="right"))
            last = max(first + 1, last)
            yield first, last
            first = last


class SyntheticSource(Source):
    """Samples of random bytes behind the index, the same for the same spec, size and seed."""

    def __init__(self, spec: DatasetSpec, total_bytes: int, seed: int) -> None:
        random = np.random.default_rng([seed, spec.mean_bytes])
        self.lengths = self._draw_lengths(spec, total_bytes, random)
        self._pool = _pool(seed)
        longest = max(LENGTH_MAX, int(self.lengths.max()))
        self._starts = random.integers(0, POOL_BYTES - longest, len(self.lengths))

    def _draw_lengths(
        self, spec: DatasetSpec, total_bytes: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the length of each sample in bytes."""
        least = 64 if spec.mean_bytes <= 10 * MIB else 1
        count = max(least, total_bytes // spec.mean_bytes)
        if not spec.spread:
            return np.full(count, spec.mean_bytes, np.int64)
        mu = np.log(spec.mean_bytes) - spec.spread**2 / 2
        drawn = random.lognormal(mu, spec.spread, count)
        return np.clip(drawn, LENGTH_MIN, LENGTH_MAX).astype(np.int64)

    def path(self, index: int) -> bytes:
        return b"c%05d/%08d.bin" % (index // DIRECTORY_SAMPLES, index)

    def data(self, index: int) -> bytes:
        start, length = int(self._starts[index]), int(self.lengths[index])
        head = index.to_bytes(INDEX_BYTES, "little")
        return head + self._pool[start : start + length - INDEX_BYTES].tobytes()


@functools.cache
def _pool(seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(POOL_BYTES), np.uint8)


class StateSource(Source):
    """The tensors of a training state, all of one length; only their lengths are known."""

    def __init__(self, total_bytes: int) -> None:
        length = max(16, total_bytes // STATE_TENSORS // 16 * 16)
        self.lengths = np.full(STATE_TENSORS, length, np.int64)


class FolderBytes(Source):
    """Samples that are files of a folder, read each time they are asked for."""

    def __init__(
        self, folder: Path, paths: list[bytes], lengths: NDArray[np.int64] | None = None
    ) -> None:
        self._folder = os.fsencode(folder)
        self._paths = paths
        if lengths is None:
            sizes = (os.stat(self._folder + b"/" + path).st_size for path in paths)
            lengths = np.fromiter(sizes, np.int64, count=len(paths))
        self.lengths = lengths

    def path(self, index: int) -> bytes:
        return self._paths[index]

    def data(self, index: int) -> bytes:
        with open(self._folder + b"/" + self._paths[index], "rb") as file:
            return file.read()


class Subset(Source):
    """Some samples of another source, numbered anew from 0."""

    def __init__(self, base: Source, chosen: NDArray[np.int64]) -> None:
        self._base, self._chosen = base, chosen
        self.lengths = base.lengths[chosen]

    def path(self, index: int) -> bytes:
        return self._base.path(int(self._chosen[index]))

    def data(self, index: int) -> bytes:
        return self._base.data(int(self._chosen[index]))


def random_subset(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Choose at most so many of ``count`` samples, uniformly at random; indices rise."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng([seed, 3]).choice(count, most, replace=False))


# ---- writing -------------------------------------------------------------------------------------


def volume_bytes(count: int, sample_bytes: int) -> int:
    """Return the size of a volume that a data set and its directory fit in.

    Samples that are not small against a chunk leave ends of chunks unused: up to half of all.
    """
    padded = sample_bytes * 2 if sample_bytes > 16 * KIB * count else sample_bytes * 9 // 8
    return (padded + count * 256 + 64 * MIB) // MIB * MIB


def write_volume(volume: str, source: Source, name: str = DATASET) -> int:
    """Write a source as a dataset of a volume, and return the bytes that its chunks take."""
    count, total = len(source), source.total_bytes()
    with dlfs.open(volume) as opened:
        with opened.writer(name, expected_bytes=total, expected_samples=count) as writer:
            for first, last in source.ranges(WRITE_BYTES):
                lengths = source.lengths[first:last]
                data = b"".join(map(source.data, range(first, last)))
                paths = list(map(source.path, range(first, last)))
                writer.add_batch(paths, data, np.cumsum(lengths) - lengths, lengths)
        return opened.dataset(name).info.stored_bytes


def make_volume(volume: Path, source: Source) -> int:
    """Format a volume in a file and write a source into it, as `write_volume`."""
    size_bytes = volume_bytes(len(source), source.total_bytes())
    dlfs.format_volume(str(volume), size_bytes=size_bytes)
    return write_volume(str(volume), source)


def write_files(source: Source, root: Path) -> None:
    """Write each sample as a file, in path order, as unpacking an archive would."""
    made: set[bytes] = set()
    for _, path, data in source:
        target = os.fsencode(root) + b"/" + path
        parent = os.path.dirname(target)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        with open(target, "wb", buffering=0) as file:
            file.write(data)


def import_folder(folder: Path, volume: Path) -> None:
    """Import a folder into a new volume."""
    with closing(FolderSource(folder, links="skip")) as source:
        size_bytes = volume_bytes(source.sample_count, source.sample_bytes)
        dlfs.format_volume(str(volume), size_bytes=size_bytes)
        with dlfs.open(str(volume)) as opened:
            import_dataset(opened, source, DATASET)


# ---- scenes --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Scene:
    """A data set laid out on the disk under test or on a namespace.

    Attributes:
        spec: parameters of the data set.
        source: the samples.
        folder: private folder of this scene on the disk under test.
        files: root folder of the plain files.
        file_indices: indices of the samples that are plain files, rising.
        volume: the volume: a file, or the URI of a namespace.
        data_offset: byte of the volume's file where the samples begin.
        data_bytes: bytes that the samples take there.
        base: difference between a sample's byte in the file and its address.
        seed: seed of data and orders.
        uris: URIs of the namespace, one for each initiator; empty for a file.
    """

    spec: DatasetSpec
    source: Source
    folder: Path
    files: Path
    file_indices: NDArray[np.int64]
    volume: Path | str
    data_offset: int
    data_bytes: int
    base: int
    seed: int
    uris: tuple[str, ...] = ()

    @property
    def sample_bytes(self) -> int:
        """Bytes of all samples."""
        return self.source.total_bytes()

    def __len__(self) -> int:
        return len(self.source)

    def memory_bytes(self, share: float) -> int:
        """Return a memory budget that is a share of the data."""
        return max(MIB, int(share * self.data_bytes))

    def file_order(self, round_number: int) -> NDArray[np.int64]:
        """Return the plain files' indices in a random order, another one in each round."""
        random = np.random.default_rng([self.seed, round_number, 7])
        return random.permutation(self.file_indices)

    def random_order(self, *seeds: int) -> NDArray[np.int64]:
        """Return all indices in a random order, given by the scene's seed and these."""
        return np.random.default_rng([self.seed, *seeds]).permutation(len(self))

    def locations(self, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return offset in the volume's file and length of samples, ``uint64[n, 2]``."""
        with dlfs.open(str(self.volume)) as volume, volume.dataset(DATASET) as dataset:
            offsets = dataset.directory.addresses(indices) + np.uint64(self.base)
        lengths = self.source.lengths[indices].astype(np.uint64)
        return np.ascontiguousarray(np.stack([offsets, lengths], axis=1))

    def describe(self) -> dict[str, Any]:
        """Return the scene's parameters and sizes as plain values."""
        return {
            **asdict(self.spec),
            "samples": len(self),
            "sample_bytes": self.sample_bytes,
            "stored_bytes": self.data_bytes,
            "files": len(self.file_indices),
            "seed": self.seed,
        }


def make_scene(
    spec: DatasetSpec,
    root: Path,
    *,
    total_bytes: int,
    files_max: int,
    seed: int,
    corpus: Path | None,
) -> Scene:
    """Lay a data set out below a folder, or reuse the same one from an earlier run.

    The corpus is a folder of real files, for the data set of that name; other arguments do not
    limit it.
    """
    wanted = {**asdict(spec), "total_bytes": total_bytes, "files_max": files_max, "seed": seed}
    wanted["corpus"] = str(corpus) if spec.key == "corpus" else None
    folder = root / f"scene-{spec.key}"
    volume, files, stamp = folder / "volume.img", folder / "files", folder / "stamp.json"
    is_made = stamp.exists() and json.loads(stamp.read_text()) == wanted
    if not is_made:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if spec.key == "corpus":
        assert corpus is not None
        if not is_made:
            import_folder(corpus, volume)
        with dlfs.open(str(volume)) as opened, opened.dataset(DATASET) as dataset:
            source: Source = FolderBytes(corpus, dataset.paths())
        files, indices = corpus, np.arange(len(source))
    else:
        source = SyntheticSource(spec, total_bytes, seed)
        indices = random_subset(len(source), files_max, seed)
        if not is_made:
            write_files(Subset(source, indices), files)
            make_volume(volume, source)
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return scene_of_volume(spec, source, folder, volume, indices, seed, files=files)


def state_scene(spec: DatasetSpec, root: Path, total_bytes: int, seed: int) -> Scene:
    """Return the scene of a training state, whose volume each run formats anew."""
    folder = root / f"scene-{spec.key}"
    folder.mkdir(parents=True, exist_ok=True)
    source = StateSource(total_bytes)
    size, every = source.total_bytes(), np.arange(STATE_TENSORS)
    return Scene(spec, source, folder, folder, every, folder / "volume.img", 0, size, 0, seed)


def scene_of_volume(
    spec: DatasetSpec,
    source: Source,
    folder: Path,
    volume: Path | str,
    indices: NDArray[np.int64],
    seed: int,
    *,
    files: Path | None = None,
) -> Scene:
    """Return the scene of a volume that holds the data set; arguments as in `Scene`."""
    with dlfs.open(str(volume)) as opened, opened.dataset(DATASET) as dataset:
        directory = dataset.directory
        ends = [int(index) for index in directory.order()[[0, -1]]]
        first, last = (dataset.stat(index) for index in ends)
        base = first.offset_bytes - int(directory.addresses(ends[:1])[0])
        if last.offset_bytes - int(directory.addresses(ends[1:])[0]) != base:
            raise dlfs.UsageError(f"measure {volume}: expected its data in one run of chunks")
        start = first.offset_bytes // (256 * KIB) * (256 * KIB)
        data_bytes = dataset.info.stored_bytes
    files = files or folder / "files"
    return Scene(spec, source, folder, files, indices, volume, start, data_bytes, base, seed)


def find_corpus(given: str, root: Path) -> Path:
    """Return the folder of ``--corpus``; for ``deb``, unpack Debian's archive below ``root``."""
    if given != "deb":
        folder = Path(given)
        if not folder.is_dir():
            raise BadArgumentError(f"--corpus {given}: there is no such folder")
        return folder.resolve()
    folder = root / "corpus"
    if (folder / "complete").exists():
        return folder / "tree"
    if not CORPUS_ARCHIVE.exists():
        raise BadArgumentError(
            f"--corpus deb: {CORPUS_ARCHIVE} is missing; please run:\n"
            f"    sudo apt-get install --no-install-recommends {CORPUS_PACKAGE}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tree").mkdir(parents=True)
    subprocess.run(["tar", "-xf", CORPUS_ARCHIVE, "-C", folder / "tree"], check=True)
    (folder / "complete").touch()
    return folder / "tree"
