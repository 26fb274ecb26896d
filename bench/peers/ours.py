"""DLFS as a peer, in each way that a trainer can use it: sample API, node service, mount.

Cold, DLFS has memory for a sixteenth of the data, while peers have the whole page cache.
``dlfs-epoch-all`` has as much as they: memory for all of the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dlfs
from bench.contenders.samples import DEPTH, WHOLE, fill_memory
from bench.datasets import DATASET, Source, make_volume
from bench.peers.files import FilesReader, write_listing
from bench.peers.peer import GLOBAL, IndexedSamples, Peer, Reader, Samples
from bench.serving import mount_dlfs, serve
from dlfs.epoch_options import WINDOW_CHUNKS
from dlfs.extras import DISTRIBUTION
from dlfs.units import MIB

COLD_SHARE = 1 / 16
"""Share of the data that DLFS has memory for when it is cold."""

FILL_BATCH = 1024
CHUNK_ORDER = f"chunks shuffled, then samples in windows of {WINDOW_CHUNKS} of them"


def _memory_bytes(folder: Path, share: float) -> int:
    return max(MIB, int(share * int((folder / "stored_bytes").read_text())))


class DlfsReader(Reader):
    """Reads batches on demand, and epochs ahead of the trainer.

    Args:
        volume: open volume; the reader closes it.
        shuffle: shuffle of its epochs.
    """

    takes_arrays = True

    def __init__(self, volume: dlfs.Volume, shuffle: str) -> None:
        self._volume = volume
        self._dataset = volume.dataset(DATASET).open()
        self._shuffle = shuffle
        self._last: dlfs.Batch | None = None
        self.own_order = GLOBAL if shuffle == "global" else CHUNK_ORDER

    def read(self, indices: Any) -> Samples:
        self._release()
        self._last = self._dataset.read(indices)
        return self._last

    def epoch(self, seed: int, batch: int) -> Iterator[IndexedSamples]:
        with self._dataset.batches(batch, seed=seed, shuffle=self._shuffle) as epoch:
            for found in epoch:
                yield found
                found.release()

    def filled(self) -> DlfsReader:
        """Read all samples into memory; return this reader."""
        fill_memory(self._dataset, FILL_BATCH)
        return self

    def _release(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None

    def close(self) -> None:
        self._release()
        self._dataset.close()
        self._volume.close()


class Dlfs(Peer):
    """The sample API in the reading process itself.

    Args:
        name: name of the way.
        shuffle: shuffle of its epochs.
        random: True if batches on demand are measured, too.
        about: as for every peer.
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
        return self._open(folder, WHOLE).filled()

    def _open(self, folder: Path, share: float) -> DlfsReader:
        memory_bytes = _memory_bytes(folder, share)
        volume = dlfs.open(str(folder / "volume.img"), memory_bytes=memory_bytes, depth=DEPTH)
        return DlfsReader(volume, self._shuffle)


class Service(Peer):
    """The sample API through a node service, a process that all readers share."""

    name = "dlfs-service"
    about = "dlfs serve, dlfs.connect(...).read(indices); epochs in global order by batches()"
    packages = (DISTRIBUTION,)
    data_of = "dlfs"

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        memory_bytes = _memory_bytes(folder, WHOLE if warm else COLD_SHARE)
        with serve(str(folder / "volume.img"), memory_bytes) as served:
            (folder / "service").write_text(served.uri)
            yield (served.pid,)

    def open(self, folder: Path) -> DlfsReader:
        return DlfsReader(dlfs.connect((folder / "service").read_text()), "global")

    def open_warm(self, folder: Path) -> DlfsReader:
        return self.open(folder).filled()


class Mount(Peer):
    """Files of the mount, as any program reads them."""

    name = "dlfs-mount"
    about = "dlfs mount; open, read, close of each file, one thread"
    packages = (DISTRIBUTION,)
    data_of = "dlfs"

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        del warm  # the kernel caches
        log = folder / "mount.log"
        with mount_dlfs(str(folder / "volume.img"), folder / "mount", log) as mounted:
            yield (mounted.pid,)

    def open(self, folder: Path) -> Reader:
        return FilesReader(folder, folder / "mount" / DATASET)


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
