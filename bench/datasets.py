"""The data that is raced over: where its bytes come from, its plain files, its volume.

A synthetic sample is a stretch of a fixed pool of random bytes with its own index in front, so that
any sample can be made again at any time, in any order, as fast as memory is copied, and nothing in
it compresses. Index ``i`` is the ``i``-th path in path order.

Plain files are a uniform random subset of the samples when there are more samples than files are
allowed: making millions of files takes longer than measuring.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import dlfs
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import import_dataset
from dlfs.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from bench.targets import Targets

DATASET = "samples"
POOL_BYTES = 64 * MIB
INDEX_BYTES = 8
DIRECTORY_SAMPLES = 1000
WRITE_BYTES = 16 * MIB
CORPUS_PACKAGE = "linux-source-6.1"
CORPUS_ARCHIVE = Path("/usr/src/linux-source-6.1.tar.xz")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """A data set to be made.

    Attributes:
        key: its name in cases.
        mean_bytes: of a sample.
        spread: sigma of the lognormal distribution of lengths; 0: all are of one length.
        total_bytes: of all samples, unless ``--size`` says otherwise.
        quick_bytes: the same with ``--quick``; a sixteenth is still memory to work with.
        batch: samples of one batch.
        about: what it stands for.
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
    # In batches of 8 and 32 MiB. Each begins and ends with a queue that is not full, and costs
    # Python some 0.1 ms; spdk_nvme_perf, which they race, never stops.
    DatasetSpec("nvme-4k", 4 * KIB, 0.0, 512 * MIB, 256 * MIB, 2048, "4 KiB samples on --target"),
    DatasetSpec(
        "nvme-128k", 128 * KIB, 0.0, 1024 * MIB, 256 * MIB, 256, "128 KiB samples on --target"
    ),
)
TARGET_KEYS = ("nvme-4k", "nvme-128k")
"""Those that lie on a namespace, without plain files beside them."""

LENGTH_MIN, LENGTH_MAX = 1 * KIB, 1 * MIB


class Source(Protocol):
    """Gives the bytes of any sample."""

    lengths: NDArray[np.int64]

    def path(self, index: int) -> bytes:
        """Of a sample."""
        ...

    def data(self, index: int) -> bytes:
        """Of a sample."""
        ...


class SyntheticSource:
    """Samples made of random bytes, the same for the same spec, size and seed."""

    def __init__(self, spec: DatasetSpec, total_bytes: int, seed: int) -> None:
        random = np.random.default_rng([seed, spec.mean_bytes])
        count = max(64, total_bytes // spec.mean_bytes)
        if spec.spread:
            mu = np.log(spec.mean_bytes) - spec.spread**2 / 2
            drawn = random.lognormal(mu, spec.spread, count)
            self.lengths = np.clip(drawn, LENGTH_MIN, LENGTH_MAX).astype(np.int64)
        else:
            self.lengths = np.full(count, spec.mean_bytes, np.int64)
        self._pool = _pool(seed)
        self._starts = random.integers(0, POOL_BYTES - LENGTH_MAX, count)

    def path(self, index: int) -> bytes:
        """A thousand samples in a directory; path order is index order."""
        return b"c%05d/%08d.bin" % (index // DIRECTORY_SAMPLES, index)

    def data(self, index: int) -> bytes:
        """The index, then random bytes."""
        start, length = int(self._starts[index]), int(self.lengths[index])
        head = index.to_bytes(INDEX_BYTES, "little")
        return head + self._pool[start : start + length - INDEX_BYTES].tobytes()

    def fill(self, first: int, last: int) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
        """Samples first..last-1 in one buffer, with their offsets and lengths."""
        lengths = self.lengths[first:last]
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
        return b"".join(map(self.data, range(first, last))), offsets, lengths


@functools.cache
def _pool(seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(POOL_BYTES), np.uint8)


class FolderBytes:
    """Samples that are files: what they are is what is on disk, read before anything is timed."""

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
        """Below the folder."""
        return self._paths[index]

    def data(self, index: int) -> bytes:
        """Of the file."""
        with open(self._folder + b"/" + self._paths[index], "rb") as file:
            return file.read()


@dataclass(eq=False)
class Scene:
    """A data set laid out for a race: source, plain files, volume.

    Attributes:
        spec: what it is.
        source: of its bytes.
        folder: this scene's own, on the disk under test.
        files: the root of the plain files.
        file_indices: of the samples that are plain files, rising.
        volume: its only member, a file; or the URI of a namespace.
        data_offset: byte of the volume's file where the samples begin.
        data_bytes: that the samples take there.
        base: add it to a sample's address for its byte in the file.
        seed: of everything.
        targets: where the volume is a namespace: how initiators reach it.
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
    targets: Targets | None = None

    @property
    def sample_bytes(self) -> int:
        """Of all samples."""
        return int(self.source.lengths.sum())

    def __len__(self) -> int:
        return len(self.source.lengths)

    def memory_bytes(self, share: float) -> int:
        """A memory budget that is a share of the data."""
        return max(MIB, int(share * self.data_bytes))

    def file_order(self, round_number: int) -> NDArray[np.int64]:
        """The plain files' samples in a random order, another in each round."""
        random = np.random.default_rng([self.seed, round_number, 7])
        return random.permutation(self.file_indices)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Byte offset in the volume's file and length of samples, ``uint64[n, 2]``."""
        with dlfs.open(str(self.volume)) as volume, volume.dataset(DATASET) as dataset:
            offsets = dataset.directory.addresses(indices) + np.uint64(self.base)
        lengths = self.source.lengths[indices].astype(np.uint64)
        return np.ascontiguousarray(np.stack([offsets, lengths], axis=1))

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self.spec),
            "samples": len(self),
            "sample_bytes": self.sample_bytes,
            "stored_bytes": self.data_bytes,
            "files": len(self.file_indices),
            "seed": self.seed,
        }


# ---- making --------------------------------------------------------------------------------------


def make_scene(
    spec: DatasetSpec,
    root: Path,
    *,
    total_bytes: int,
    files_max: int,
    seed: int,
    corpus: Path | None,
) -> Scene:
    """Lay a data set out, unless the same one is there from an earlier run."""
    wanted = {**asdict(spec), "total_bytes": total_bytes, "files_max": files_max, "seed": seed}
    wanted["corpus"] = str(corpus) if spec.key == "corpus" else None
    folder = root / f"scene-{spec.key}"
    if _stamp(folder) != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if spec.key == "corpus":
        assert corpus is not None
        return _corpus_scene(spec, folder, corpus, seed, wanted)
    source = SyntheticSource(spec, total_bytes, seed)
    indices = np.arange(len(source.lengths))
    if len(indices) > files_max:
        chosen = np.random.default_rng([seed, 3]).choice(len(indices), files_max, replace=False)
        indices = np.sort(chosen)
    volume = folder / "volume.img"
    if _stamp(folder) is None:
        _write_files(folder / "files", source, indices)
        count, total = len(source.lengths), int(source.lengths.sum())
        dlfs.format_volume(str(volume), size_bytes=volume_bytes(count, total))
        write_volume(str(volume), source)
        (folder / "stamp.json").write_text(json.dumps(wanted), encoding="utf-8")
    return scene_of_volume(spec, source, folder, volume, indices, seed)


def _stamp(folder: Path) -> dict[str, Any] | None:
    path = folder / "stamp.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


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
    """The scene of a volume that holds the data set."""
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


def _corpus_scene(
    spec: DatasetSpec, folder: Path, corpus: Path, seed: int, wanted: dict[str, Any]
) -> Scene:
    volume = folder / "volume.img"
    if _stamp(folder) is None:
        import_folder(corpus, volume)
        (folder / "stamp.json").write_text(json.dumps(wanted), encoding="utf-8")
    with dlfs.open(str(volume)) as opened, opened.dataset(DATASET) as dataset:
        source = FolderBytes(corpus, dataset.paths())
    indices = np.arange(len(source.lengths))
    return scene_of_volume(spec, source, folder, volume, indices, seed, files=corpus)


def import_folder(folder: Path, volume: Path) -> int:
    """Import a folder into a new volume; how many samples there were."""
    source = FolderSource(folder, links="skip")
    try:
        dlfs.format_volume(
            str(volume), size_bytes=volume_bytes(source.sample_count, source.sample_bytes)
        )
        with dlfs.open(str(volume)) as opened:
            return import_dataset(opened, source, DATASET).sample_count
    finally:
        source.close()


def volume_bytes(count: int, sample_bytes: int) -> int:
    """A size of volume that a data set fits in, with its directory.

    Samples that are not small against a chunk leave ends of chunks unused: up to half of all.
    """
    padded = sample_bytes * 2 if sample_bytes > 16 * KIB * count else sample_bytes * 9 // 8
    return (padded + count * 256 + 64 * MIB) // MIB * MIB


def _write_files(root: Path, source: Source, indices: NDArray[np.int64]) -> None:
    """Write plain files in path order, as unpacking an archive would."""
    made: set[bytes] = set()
    for index in indices.tolist():
        path = os.fsencode(root) + b"/" + source.path(index)
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        with open(path, "wb", buffering=0) as file:
            file.write(source.data(index))


def write_volume(volume: str, source: SyntheticSource) -> None:
    """Write a data set into a new volume."""
    count, total = len(source.lengths), int(source.lengths.sum())
    with (
        dlfs.open(volume) as opened,
        opened.writer(DATASET, expected_bytes=total, expected_samples=count) as writer,
    ):
        for first, last in _pieces(source.lengths):
            data, offsets, lengths = source.fill(first, last)
            paths = [source.path(index) for index in range(first, last)]
            writer.add_batch(paths, data, offsets, lengths)


def _pieces(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of samples of about ``WRITE_BYTES``."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + WRITE_BYTES, side="right"))
        last = max(first + 1, last)
        yield first, last
        first = last


# ---- the corpus ----------------------------------------------------------------------------------


def find_corpus(given: str, root: Path) -> Path:
    """The folder that ``--corpus`` means; unpacks Debian's archive for ``deb``.

    Raises:
        FileNotFoundError: it is not there; says how to get it.
    """
    if given != "deb":
        folder = Path(given)
        if not folder.is_dir():
            raise FileNotFoundError(f"--corpus {given}: there is no such folder")
        return folder.resolve()
    folder = root / "corpus"
    if (folder / "complete").exists():
        return folder / "tree"
    if not CORPUS_ARCHIVE.exists():
        raise FileNotFoundError(
            f"--corpus deb: {CORPUS_ARCHIVE} is missing; please run:\n"
            f"    sudo apt-get install --no-install-recommends {CORPUS_PACKAGE}"
        )
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tree").mkdir(parents=True)
    subprocess.run(["tar", "-xf", CORPUS_ARCHIVE, "-C", folder / "tree"], check=True)
    (folder / "complete").touch()
    return folder / "tree"
