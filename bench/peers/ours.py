"""DLFS itself, in the ways that a trainer has: sample API, node service, mount.

Cold, it may keep a sixteenth of the data in memory, where the peers have the whole page cache;
``dlfs-epoch-all`` has as much: memory for all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dlfs
from bench.contestants.mounts import check_fuse
from bench.contestants.service import serve_volume
from bench.datasets import DATASET, volume_bytes
from bench.peers.files import FilesReader, write_listing
from bench.peers.peer import GLOBAL, IndexedSamples, Reader, Samples, Source
from dlfs.epoch_options import WINDOW_CHUNKS
from dlfs.extras import DISTRIBUTION
from dlfs.units import MIB

DEPTH = 128
COLD_SHARE = 1 / 16
WARM_SHARE = 1.25
"""Of the data: all of it, with room for batches under way."""

WRITE_BYTES = 16 * MIB
CHUNK_ORDER = f"chunks shuffled, then samples in windows of {WINDOW_CHUNKS} of them"


def _volume(folder: Path) -> str:
    return str(folder / "volume.img")


def _memory_bytes(folder: Path, share: float) -> int:
    return max(MIB, int(share * int((folder / "stored_bytes").read_text())))


def _write(source: Source, folder: Path) -> None:
    """Write the samples in pieces, as an importer of any format does."""
    count, total = len(source), int(source.lengths.sum())
    dlfs.format_volume(_volume(folder), size_bytes=volume_bytes(count, total))
    with dlfs.open(_volume(folder)) as volume:
        with volume.writer(DATASET, expected_bytes=total, expected_samples=count) as writer:
            paths: list[bytes] = []
            parts: list[bytes] = []
            held = 0
            for _, path, data in source:
                paths.append(path)
                parts.append(data)
                held += len(data)
                if held >= WRITE_BYTES:
                    _add(writer, paths, parts)
                    paths, parts, held = [], [], 0
            _add(writer, paths, parts)
        stored_bytes = volume.dataset(DATASET).info.stored_bytes
    (folder / "stored_bytes").write_text(str(stored_bytes))
    write_listing(source, folder)  # for the mount


def _add(writer: dlfs.DatasetWriter, paths: list[bytes], parts: list[bytes]) -> None:
    lengths = np.fromiter(map(len, parts), np.int64, count=len(parts))
    offsets = np.cumsum(lengths) - lengths
    if paths:
        writer.add_batch(paths, b"".join(parts), offsets, lengths)


class DlfsReader:
    """Batches by ``read``, and an epoch ahead of the trainer by ``batches``.

    Args:
        volume: that is open; the reader closes it.
        shuffle: of its epochs.
    """

    takes_arrays = True

    def __init__(self, volume: dlfs.Volume, shuffle: str) -> None:
        self._volume = volume
        self._dataset = volume.dataset(DATASET).open()
        self._shuffle = shuffle
        self._last: dlfs.Batch | None = None
        self.own_order = GLOBAL if shuffle == "global" else CHUNK_ORDER

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """A batch on demand."""
        self._release()
        self._last = self._dataset.read(indices)
        return self._last

    def epoch(self, seed: int, batch: int) -> Iterator[IndexedSamples]:
        """Read ahead."""
        with self._dataset.batches(batch, seed=seed, shuffle=self._shuffle) as epoch:
            for found in epoch:
                yield found
                found.release()

    def fill(self) -> None:
        """Bring all samples into memory."""
        with self._dataset.batches(1024, shuffle="chunk") as epoch:
            for batch in epoch:
                batch.release()

    def _release(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None

    def close(self) -> None:
        """Close the volume."""
        self._release()
        self._dataset.close()
        self._volume.close()


class Dlfs:
    """In the process itself.

    Args:
        name: of the way.
        shuffle: of its epochs.
        random: whether ``read`` is raced, too.
        share: of the data, that may be in memory when it is cold.
    """

    packages = (DISTRIBUTION,)

    def __init__(
        self, name: str, shuffle: str, *, random: bool, about: str, share: float = COLD_SHARE
    ) -> None:
        self.name, self.random, self.about = name, random, about
        self._shuffle, self._share = shuffle, share

    def prepare(self, source: Source, folder: Path) -> None:
        """Write a volume."""
        _write(source, folder)

    def open(self, folder: Path) -> Reader:
        """Nothing is in memory yet."""
        return self._open(folder, self._share)

    def open_warm(self, folder: Path) -> Reader:
        """Memory for all of it, and all of it there."""
        reader = self._open(folder, WARM_SHARE)
        reader.fill()
        return reader

    def _open(self, folder: Path, share: float) -> DlfsReader:
        memory_bytes = _memory_bytes(folder, share)
        volume = dlfs.open(_volume(folder), memory_bytes=memory_bytes, depth=DEPTH)
        return DlfsReader(volume, self._shuffle)


class OtherDlfs(Dlfs):
    """Another way over the same volume."""

    data_of = "dlfs"


class Service:
    """Through a node service, a process of its own, which all readers share."""

    name = "dlfs-service"
    about = "dlfs serve, dlfs.connect(...).read(indices); epochs in global order by batches()"
    packages = (DISTRIBUTION,)
    random = True
    data_of = "dlfs"

    def prepare(self, source: Source, folder: Path) -> None:
        """Write a volume."""
        _write(source, folder)

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Serve the volume."""
        memory_bytes = _memory_bytes(folder, WARM_SHARE if warm else COLD_SHARE)
        with serve_volume(_volume(folder), memory_bytes) as served:
            (folder / "service").write_text(served.uri)
            yield (served.pid,)

    def open(self, folder: Path) -> DlfsReader:
        """Connect."""
        return DlfsReader(dlfs.connect((folder / "service").read_text()), "global")

    def open_warm(self, folder: Path) -> DlfsReader:
        """Connect, and have the service read all of it."""
        reader = self.open(folder)
        reader.fill()
        return reader


class Mount:
    """Through the mount: files, as any program reads them."""

    name = "dlfs-mount"
    about = "dlfs mount; open, read, close of each file, one thread"
    packages = (DISTRIBUTION,)
    random = True
    data_of = "dlfs"

    def prepare(self, source: Source, folder: Path) -> None:
        """Write a volume."""
        _write(source, folder)

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Mount the volume."""
        del warm  # what is cached, the kernel caches
        check_fuse()
        from dlfs.mount.background import mount_volume
        from dlfs.mount.mountpoint import unmount

        point = folder / "mount"
        point.mkdir(exist_ok=True)
        mounted = mount_volume(_volume(folder), point, log=folder / "mount.log")
        try:
            yield (mounted.pid,)
        finally:
            unmount(point, lazy=True)

    def open(self, folder: Path) -> Reader:
        """Read the listing."""
        return FilesReader(folder, folder / "mount" / DATASET)


PEERS = (
    Dlfs(
        "dlfs",
        "chunk",
        random=True,
        about="dlfs.open(...)[dataset].read(indices), a batch on demand; own order: chunk shuffle",
    ),
    OtherDlfs(
        "dlfs-epoch",
        "global",
        random=False,
        about="dlfs.open(...)[dataset].batches(...): the epoch's global order, read ahead",
    ),
    OtherDlfs(
        "dlfs-epoch-all",
        "global",
        random=False,
        about="as dlfs-epoch, with memory for all of the data, as the page cache is for the peers",
        share=WARM_SHARE,
    ),
    Service(),
    Mount(),
)
