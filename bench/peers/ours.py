"""DLFS as a peer, in each way that a trainer can use it: sample API, node service, mount.

Cold, DLFS has memory for a sixteenth of the data, while peers have the whole page cache.
``dlfs-epoch-all`` has as much as they: memory for all of the data.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dlfs
from bench.contenders.samples import DEPTH, WHOLE, fill_memory
from bench.datasets import DATASET, Source, make_volume
from bench.peers.files import reader_of_files, write_listing
from bench.peers.peer import GLOBAL, Indices, Peer, Reader
from bench.serving import mount_dlfs, serve
from dlfs.base.extras import DISTRIBUTION
from dlfs.base.units import MIB
from dlfs.epoch.options import WINDOW_CHUNKS

COLD_SHARE = 1 / 16
"""Share of the data that DLFS has memory for when it is cold."""

FILL_BATCH = 1024
CHUNK_ORDER = f"chunks shuffled, then samples in windows of {WINDOW_CHUNKS} of them"


def _memory_bytes(folder: Path, share: float) -> int:
    return max(MIB, int(share * int((folder / "stored_bytes").read_text())))


def _reader_of(volume: dlfs.Volume, shuffle: str = "global", *, fill: bool = False) -> Reader:
    """Return a reader of batches on demand, and of epochs that are read ahead.

    The reader closes the volume. ``fill`` reads all samples into memory first.
    """
    dataset = volume.dataset(DATASET).open()
    if fill:
        fill_memory(dataset, FILL_BATCH)
    last: dlfs.Batch | None = None

    def read(indices: Any) -> dlfs.Batch:
        nonlocal last
        if last is not None:
            last.release()
        last = dataset.read(indices)
        return last

    def epoch(seed: int, batch: int) -> Generator[tuple[Indices, dlfs.Batch], None, None]:
        with dataset.batches(batch, seed=seed, shuffle=shuffle) as batches:
            for found in batches:
                with found:
                    yield found.indices, found

    def release() -> None:
        if last is not None:
            last.release()
        dataset.close()
        volume.close()

    order = GLOBAL if shuffle == "global" else CHUNK_ORDER
    return Reader(read, epoch, release, order, takes_arrays=True)


class Dlfs(Peer):
    """The sample API in the reading process itself.

    Args:
        name: as for every peer; so are `random` and `about`.
        shuffle: shuffle of its epochs.
        share: share of the data that may be in memory when it is cold.
    """

    packages = (DISTRIBUTION,)

    def __init__(
        self,
        name: str,
        shuffle: str = "global",
        *,
        random: bool = False,
        about: str,
        share: float = COLD_SHARE,
    ) -> None:
        self.name, self.random, self.about = name, random, about
        self.data_of = "dlfs"
        self._shuffle, self._share = shuffle, share

    def prepare(self, source: Source, folder: Path) -> None:
        stored_bytes = make_volume(folder / "volume.img", source)
        (folder / "stored_bytes").write_text(str(stored_bytes))
        write_listing(source, folder)  # for the mount

    def open(self, folder: Path) -> Reader:
        return self._open(folder, self._share)

    def open_warm(self, folder: Path) -> Reader:
        return self._open(folder, WHOLE, fill=True)

    def _open(self, folder: Path, share: float, *, fill: bool = False) -> Reader:
        memory_bytes = _memory_bytes(folder, share)
        volume = dlfs.open(str(folder / "volume.img"), memory_bytes=memory_bytes, depth=DEPTH)
        return _reader_of(volume, self._shuffle, fill=fill)


class Service(Peer):
    """The sample API through a node service, a process that all readers share."""

    name = "dlfs-service"
    about = "dlfs serve, dlfs.connect(...).read(indices); epochs in global order by batches()"
    packages = (DISTRIBUTION,)
    data_of = "dlfs"

    @contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        memory_bytes = _memory_bytes(folder, WHOLE if warm else COLD_SHARE)
        with serve(str(folder / "volume.img"), memory_bytes) as served:
            (folder / "service").write_text(served.uri)
            yield (served.pid,)

    def open(self, folder: Path) -> Reader:
        return _reader_of(dlfs.connect((folder / "service").read_text()))

    def open_warm(self, folder: Path) -> Reader:
        return _reader_of(dlfs.connect((folder / "service").read_text()), fill=True)


class Mount(Peer):
    """Files of the mount, as any program reads them."""

    name = "dlfs-mount"
    about = "dlfs mount; open, read, close of each file, one thread"
    packages = (DISTRIBUTION,)
    data_of = "dlfs"

    @contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        log = folder / "mount.log"
        with mount_dlfs(str(folder / "volume.img"), folder / "mount", log) as mounted:
            yield (mounted.pid,)

    def open(self, folder: Path) -> Reader:
        return reader_of_files(folder, folder / "mount" / DATASET)


PEERS = (
    Dlfs(
        "dlfs",
        "chunk",
        random=True,
        about="dlfs.open(...)[dataset].read(indices), a batch on demand; own order: chunk shuffle",
    ),
    Dlfs(
        "dlfs-epoch",
        about="dlfs.open(...)[dataset].batches(...): the epoch's global order, read ahead",
    ),
    Dlfs(
        "dlfs-epoch-all",
        about="as dlfs-epoch, with memory for all of the data, as the page cache is for the peers",
        share=WHOLE,
    ),
    Service(),
    Mount(),
)
