"""Feeds: ways to bring samples of one length into the memory of a GPU, batch after batch.

Each is the documented manner of its project for PyTorch: workers of a ``DataLoader`` that pins
memory, and a copy that does not block. DLFS reads in the training process, and copies ahead itself.
Every process that a feed starts is a descendant of the process that opened it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dlfs
from bench.datasets import DATASET, Source, make_volume
from bench.peers import mds, webdataset
from bench.peers.files import FileReader, Files
from bench.peers.packages import DATA, needed, workers
from dlfs.base.units import MIB

WORKERS_MAX = 8
"""Most worker processes of a feed."""

SHARDS_A_WORKER = 2

VOLUME = "volume.img"

Epochs = Callable[[], Iterator[Any]]
"""Begins the next epoch: an iterator over its batches, ``uint8[n, length]`` on the device."""


@dataclass(frozen=True)
class Feed:
    """A way to bring samples to a device.

    Attributes:
        name: name in tables.
        about: description for the report.
        data: folder of its data, which feeds may share.
        prepare: writes the samples of a source into a folder.
        open: context that gives the epochs of a folder, for a batch size and a device.
    """

    name: str
    about: str
    data: str
    prepare: Callable[[Source, Path], None]
    open: Callable[[Path, int, str], Any]


def worker_count() -> int:
    """Return the number of worker processes of a feed: one a core, up to ``WORKERS_MAX``."""
    return min(WORKERS_MAX, workers())


def _in_shards(write: Callable[[Source, Path, int], None]) -> Callable[[Source, Path], None]:
    """Return a function that writes shards of a size of which each worker has some."""

    def prepare(source: Source, folder: Path) -> None:
        shards = SHARDS_A_WORKER * worker_count()
        write(source, folder, max(MIB, source.total_bytes() // shards))

    return prepare


def _moved(loader: Any, device: str, *, first: bool = False) -> Epochs:
    """Return the epochs of a loader, whose batches are tensors or begin with one (``first``)."""

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield (batch[0] if first else batch).to(device, non_blocking=True)

    return epoch


def _options(device: str) -> dict[str, Any]:
    """Return the options of a ``DataLoader``, or a loader like it, for a device."""
    return {
        "num_workers": worker_count(),
        "pin_memory": device != "cpu",
        "persistent_workers": True,
    }


# ---- DLFS ----------------------------------------------------------------------------------------


def _prepare_dlfs(source: Source, folder: Path) -> None:
    stored_bytes = make_volume(folder / VOLUME, source)
    (folder / "stored_bytes").write_text(f"{stored_bytes} {int(source.lengths[0])}")


@contextmanager
def _open_dlfs(folder: Path, batch: int, device: str, *, lock: bool) -> Iterator[Epochs]:
    needed("torch")
    from dlfs.adapters.torch import Loader

    stored_bytes, length = map(int, (folder / "stored_bytes").read_text().split())
    memory_bytes = stored_bytes + stored_bytes // 8 + 64 * MIB
    with (
        dlfs.open(str(folder / VOLUME), memory_bytes=memory_bytes) as volume,
        volume.dataset(DATASET) as dataset,
    ):
        loader = Loader(
            dataset,
            batch,
            seed=1,
            dtype="uint8",
            shape=(length,),
            device=device,
            pin_memory=lock and device != "cpu",
        )
        try:
            yield lambda: (batch.samples for batch in loader)
        finally:
            loader.close()


# ---- peers ---------------------------------------------------------------------------------------


class _Files(FileReader):
    """The files as a map-style data set of tensors."""

    def __getitem__(self, index: int) -> Any:
        return _as_tensor(super().__getitem__(index))


def _as_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _stack(samples: list[dict[str, Any]]) -> Any:
    import torch

    return torch.stack([_as_tensor(sample[DATA]) for sample in samples])


@contextmanager
def _open_files(folder: Path, batch: int, device: str) -> Iterator[Epochs]:
    torch = needed("torch")
    samples = _Files(folder, folder / "tree")
    loader = torch.utils.data.DataLoader(
        samples, batch_size=batch, shuffle=True, **_options(device)
    )
    yield _moved(loader, device)


@contextmanager
def _open_webdataset(folder: Path, batch: int, device: str) -> Iterator[Epochs]:
    torch, package = needed("torch"), needed("webdataset")
    shards = sorted(map(str, folder.glob("*.tar")))
    pipeline = (
        package.WebDataset(shards, shardshuffle=len(shards), seed=1)
        .shuffle(1000, seed=1)
        .to_tuple("bin")
        .map_tuple(_as_tensor)
        .batched(batch, collation_fn=torch.utils.data.default_collate)
    )
    options = _options(device)
    options["num_workers"] = min(options["num_workers"], len(shards))
    loader = package.WebLoader(pipeline, batch_size=None, **options)
    yield _moved(loader, device, first=True)


@contextmanager
def _open_mds(folder: Path, batch: int, device: str) -> Iterator[Epochs]:
    package, torch = mds.streaming(), needed("torch")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    samples = package.StreamingDataset(
        local=str(folder), batch_size=batch, shuffle=True, shuffle_seed=1
    )
    loader = torch.utils.data.DataLoader(
        samples, batch_size=batch, collate_fn=_stack, **_options(device)
    )
    yield _moved(loader, device)


FEEDS = (
    Feed(
        "dlfs-locked",
        "Loader(device=..., pin_memory=True): from the page-locked sample memory, num_workers=0",
        "dlfs",
        _prepare_dlfs,
        partial(_open_dlfs, lock=True),
    ),
    Feed(
        "dlfs-staged",
        "Loader(device=...): the processor copies each batch to page-locked memory, num_workers=0",
        "dlfs",
        _prepare_dlfs,
        partial(_open_dlfs, lock=False),
    ),
    Feed(
        "dataloader",
        "DataLoader(shuffle=True, pin_memory=True, workers) over plain files",
        "files",
        Files().prepare,
        _open_files,
    ),
    Feed(
        "webdataset",
        "WebDataset(shards).shuffle(1000).batched in a WebLoader (pin_memory=True, workers)",
        "webdataset",
        _in_shards(webdataset.write_shards),
        _open_webdataset,
    ),
    Feed(
        "mds",
        "MosaicML StreamingDataset(shuffle=True) in a DataLoader (pin_memory=True, workers)",
        "mds",
        _in_shards(mds.write_shards),
        _open_mds,
    ),
)


def feed_of(name: str) -> Feed:
    """Return a feed by its name."""
    return next(feed for feed in FEEDS if feed.name == name)
