"""The contenders: each runs in a process of its own, and trains two epochs from the bucket.

The training step does nothing, so an epoch takes what the loader needs. Every sample is compared
with its number, which its first bytes have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlfs
from bench.errors import Unavailable, WrongBytesError
from bench.peers.packages import needed
from dlfs.base.units import MIB
from dlfs.ingest.importer import import_dataset, open_source

BATCH = 64
"""Samples of a batch."""
WINDOW_BYTES = 32 * MIB
"""Size of a window of the first epoch of DLFS, and of a step of the import."""
SPOOL_BYTES = 64 * MIB
"""Most bytes of local copies of what DLFS imports: less than all, so that samples come at once."""
HEAD_BYTES = 8
"""Bytes at the begin of a sample that have its number in decimal."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender is to do.

    Attributes:
        part: name of the contender.
        folder: folder for its files, which is empty.
        files: URL of the folder of the bucket that has the samples as objects.
        shards: URLs of tar archives of the same samples in the bucket.
        samples: number of the samples.
        sample_bytes: size of each.
    """

    part: str
    folder: str
    files: str
    shards: list[str]
    samples: int
    sample_bytes: int


Batches = Callable[[int], Iterable[list[Any]]]
"""Returns the batches of an epoch, each a list of the bytes of its samples."""


def train(job: Job, batches: Batches) -> dict[str, float]:
    """Take two epochs; return the time of the first batch and the rates of both.

    Raises:
        WrongBytesError: an epoch does not have each sample once.
    """
    begin = time.monotonic()
    found: dict[str, float] = {}
    for epoch, name in enumerate(("first", "second")):
        start, seen = time.monotonic(), set()
        for batch in batches(epoch):
            if not seen and not epoch:
                found["first batch s"] = time.monotonic() - begin
            for data in batch:
                if len(data) != job.sample_bytes:
                    raise WrongBytesError(f"{job.part}: a sample of {len(data)} bytes")
                seen.add(int(bytes(data[:HEAD_BYTES])))
        if len(seen) != job.samples:
            raise WrongBytesError(f"{job.part}: {len(seen)} samples in the {name} epoch")
        found[f"{name} epoch samples/s"] = job.samples / (time.monotonic() - start)
    return found


def _volume(job: Job) -> Path:
    path = Path(job.folder, "volume.img")
    dlfs.format_volume(path, size_bytes=4 * job.samples * job.sample_bytes + 256 * MIB)
    return path


def _import(job: Job, source: str | list[str]) -> dict[str, float]:
    """Import without training."""
    path = _volume(job)
    begin = time.monotonic()
    opening = open_source(source, spool=job.folder, spool_bytes=SPOOL_BYTES)
    with dlfs.open(path) as volume, closing(opening) as opened:
        import_dataset(volume, opened, "d", step_bytes=WINDOW_BYTES, one_pass=True)
    return {"import samples/s": job.samples / (time.monotonic() - begin)}


def _importing(job: Job, source: str | list[str]) -> dict[str, float]:
    """Train while DLFS imports."""
    needed("torch")
    torch = needed("dlfs.adapters.torch")
    with dlfs.open(_volume(job)) as volume:
        loader = torch.ImportingLoader(
            source,
            volume,
            "d",
            BATCH,
            window_bytes=WINDOW_BYTES,
            import_options=["--spool", job.folder, "--spool-bytes", str(SPOOL_BYTES)],
        )

        def batches(_epoch: int) -> Iterator[list[Any]]:
            for batch in loader:
                yield list(map(memoryview, (tensor.numpy() for tensor in batch.samples)))

        try:
            return train(job, batches)
        finally:
            loader.close()


def _litdata(job: Job) -> dict[str, float]:
    """Stream objects by LitData's raw dataset, with its cache of the bucket's listing."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    litdata, torch = needed("litdata"), needed("torch")
    downloader = needed("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # there is no option for it
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    try:
        dataset = litdata.StreamingRawDataset(
            job.files, cache_dir=job.folder, storage_options=options, cache_files=True
        )
    except ModuleNotFoundError as error:  # packages that it asks for when it is used
        raise Unavailable(f"litdata: {error}") from error
    random = torch.Generator()

    def batches(epoch: int) -> Iterable[list[Any]]:
        random.manual_seed(epoch)
        loader = torch.utils.data.DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            generator=random,
            collate_fn=list,
            num_workers=len(os.sched_getaffinity(0)),
        )
        return iter(loader)

    return train(job, batches)


def _huggingface(job: Job) -> dict[str, float]:
    """Stream tar archives by Hugging Face's datasets over HTTP, shuffled in a buffer.

    Its S3 needs versions of s3fs that differ from those of the other contenders.
    """
    os.environ["HF_HOME"] = job.folder
    datasets = needed("datasets")
    address = os.environ["AWS_ENDPOINT_URL"]
    urls = [f"{address}/{url.removeprefix('s3://')}" for url in job.shards]
    dataset = datasets.load_dataset(
        "webdataset", data_files={"train": urls}, split="train", streaming=True
    )
    buffer = max(1, WINDOW_BYTES // job.sample_bytes)

    def batches(epoch: int) -> Iterator[list[Any]]:
        shuffled = dataset.shuffle(seed=epoch, buffer_size=buffer)
        for batch in shuffled.iter(batch_size=BATCH):
            yield batch["bin"]

    return train(job, batches)


PARTS: dict[str, Callable[[Job], dict[str, float]]] = {
    "DLFS: import of objects alone": lambda job: _import(job, job.files),
    "DLFS: training while objects are imported": lambda job: _importing(job, job.files),
    "DLFS: import of archives alone": lambda job: _import(job, job.shards),
    "DLFS: training while archives are imported": lambda job: _importing(job, job.shards),
    "LitData: StreamingRawDataset of objects": _litdata,
    "Hugging Face: streaming of archives": _huggingface,
}
"""The contenders by name."""


def run(job: Job) -> dict[str, float]:
    """Run a contender.

    Raises:
        Unavailable: a package is missing.
        WrongBytesError: it has given other samples.
    """
    if job.part not in PARTS:
        raise Unavailable(f"there is no part {job.part}")
    return PARTS[job.part](job)
