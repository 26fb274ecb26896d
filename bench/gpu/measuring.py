"""The measurements of one feed, in a child process of its own: see `Job` and `measure`.

For each size of samples the child writes the data unless it is there, then reads without a pause:
one epoch after the caches were dropped, then more epochs for some seconds, then the steps of a
small convnet. It keeps the first batch and compares it with the source in the end.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.datasets import INDEX_BYTES, DatasetSpec, Source, SyntheticSource
from bench.errors import BenchmarkError, Unavailable, WrongBytesError
from bench.gpu.device import check_device, describe_device, wait_for
from bench.gpu.feeds import Epochs, feed_of
from bench.machine import Machine
from bench.process import Parent, run_child, run_program
from bench.resources import tree_cpu_seconds
from dlfs.base.units import KIB, MIB

PROBE = "device"
"""Name of the job that describes the device."""

WARM_UP_STEPS = 3
"""Steps of the training before its clock starts: the first ones choose algorithms."""

FIRST_EPOCH_SECONDS = 15.0
"""Longest duration of the first epoch; a slower feed begins the next part before its end."""

CHECKED = 4
"""Samples of the first batch that are compared with the source."""


@dataclass(frozen=True, slots=True)
class Size:
    """Samples of one length.

    Attributes:
        key: name for ``--sizes``.
        length: length of a sample in bytes, height times width.
        height: rows of the sample as an image of one channel.
        width: columns of the image.
        total_bytes: bytes of all samples.
        batch: samples of a batch.
    """

    key: str
    length: int
    height: int
    width: int
    total_bytes: int
    batch: int


SIZES = (
    Size("4k", 4 * KIB, 64, 64, 128 * MIB, 1024),
    Size("110k", 110 * KIB, 352, 320, 256 * MIB, 128),
    Size("1m", MIB, 1024, 1024, 512 * MIB, 32),
)


def size_of(key: str) -> Size:
    """Return a size by its key."""
    return next(size for size in SIZES if size.key == key)


def source_of(size: Size, total_bytes: int, seed: int) -> Source:
    """Return the samples of a size."""
    spec = DatasetSpec(f"gpu-{size.key}", size.length, 0.0, 0, 0, size.batch, "")
    return SyntheticSource(spec, total_bytes, seed)


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one child.

    Attributes:
        feed: name of the feed, or ``PROBE``.
        folder: folder of the data, on the disk under test.
        device: the GPU, or ``cpu``.
        sizes: keys of the sizes.
        total_bytes: bytes of the samples of each size; 0 for that of the size.
        seconds: duration of each timed part.
        seed: seed of the samples.
        limit_seconds: time after which the child ends, whatever it does.
    """

    feed: str
    folder: str
    device: str
    sizes: tuple[str, ...]
    total_bytes: int
    seconds: float
    seed: int
    limit_seconds: int


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a feed at one size.

    Attributes:
        size: key of the size.
        batch: samples of a batch.
        samples_per_s: samples that reached the device in a second, in later epochs.
        cpu_us_per_sample: CPU time of all processes of the feed for each of them, in microseconds.
        first_samples_per_s: the same as the first, in an epoch after the caches were dropped, with
            the start of workers; None if they could not be dropped.
        steps: steps of the training that were timed.
        step_ms: time of a step of the convnet, without the waiting, in milliseconds.
        waited_share: share of the training's time in which a step waited for its batch, 0..1.
        notes: warnings of the feed.
    """

    size: str
    batch: int
    samples_per_s: float
    cpu_us_per_sample: float
    first_samples_per_s: float | None
    steps: int
    step_ms: float
    waited_share: float
    notes: tuple[str, ...] = ()


# ---- one size ------------------------------------------------------------------------------------


def _for_ever(epochs: Epochs) -> Iterator[Any]:
    while True:
        count = 0
        for batch in epochs():
            count += len(batch)
            yield batch
        if not count:
            raise BenchmarkError("an epoch had no batch")


def _take(batches: Iterator[Any], device: str, seconds: float, samples: float) -> tuple[int, float]:
    """Take batches for some seconds or samples; return the samples and the seconds they took."""
    count, begun = 0, time.perf_counter()
    while count < samples and time.perf_counter() - begun < seconds:
        count += len(next(batches))
    wait_for(device)
    return count, time.perf_counter() - begun


def _make_step(torch: Any, size: Size, device: str) -> Any:
    """Return a function that trains a small convnet with a batch and waits for its loss."""
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(1, 16, 7, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> float:
        images = batch.view(-1, 1, size.height, size.width).float().div(255)
        labels = batch[:, 0].long() % 10
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())  # waits for the device

    return step


def _train(torch: Any, batches: Iterator[Any], size: Size, job: Job) -> tuple[int, float, float]:
    """Train; return the timed steps, the seconds they computed, and the seconds they waited."""
    step = _make_step(torch, size, job.device)
    for _ in range(WARM_UP_STEPS):
        step(next(batches))
    steps, waited, worked = 0, 0.0, 0.0
    while waited + worked < job.seconds:
        asked = time.perf_counter()
        batch = next(batches)
        wait_for(job.device)
        given = time.perf_counter()
        step(batch)
        waited += given - asked
        worked += time.perf_counter() - given
        steps += 1
    return steps, worked, waited


def _check(source: Source, batch: Any) -> None:
    """Compare some samples of a batch with the source.

    Raises:
        WrongBytesError: they differ.
    """
    rows = batch.cpu().numpy()
    for row in rows[:: max(1, len(rows) // CHECKED)]:
        data = row.tobytes()
        index = int.from_bytes(data[:INDEX_BYTES], "little")
        if index >= len(source) or data != source.data(index):
            raise WrongBytesError(f"a sample on the device, index {index}")


def _measure_size(torch: Any, job: Job, size: Size) -> Result:
    feed = feed_of(job.feed)
    source = source_of(size, job.total_bytes or size.total_bytes, job.seed)
    folder = Path(job.folder) / size.key / feed.data
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        feed.prepare(source, folder)
        (folder / "complete").touch()
    batch = min(size.batch, len(source))
    with (
        warnings.catch_warnings(record=True) as warned,
        feed.open(folder, batch, job.device) as epochs,
    ):
        warnings.simplefilter("always")
        is_cold = Machine(folder).drop_caches()
        batches = _for_ever(epochs)
        begun = time.perf_counter()
        first = next(batches)
        count, _ = _take(batches, job.device, FIRST_EPOCH_SECONDS, len(source) - len(first))
        first_rate = (count + len(first)) / (time.perf_counter() - begun)
        cpu = tree_cpu_seconds()
        count, seconds = _take(batches, job.device, job.seconds, float("inf"))
        cpu = tree_cpu_seconds() - cpu
        steps, worked, waited = _train(torch, batches, size, job)
        _check(source, first)
        del batches
    return Result(
        size=size.key,
        batch=batch,
        samples_per_s=count / seconds,
        cpu_us_per_sample=1e6 * cpu / count,
        first_samples_per_s=first_rate if is_cold else None,
        steps=steps,
        step_ms=1e3 * worked / steps,
        waited_share=waited / (waited + worked),
        notes=tuple(sorted({str(one.message).splitlines()[0] for one in warned})),
    )


def measure(job: Job, parent: Parent) -> None:
    """Describe the device, or measure a feed at each size; answer after each.

    What the feed needs and the machine lacks ends it with the answer ``missing``.
    """
    signal.alarm(job.limit_seconds)  # a package may hang, also when it ends
    if job.feed == PROBE:
        parent.answer(facts=describe_device(job.device))
        return
    torch = check_device(job.device)
    for key in job.sizes:
        try:
            result = _measure_size(torch, job, size_of(key))
        except Unavailable as reason:
            parent.answer(missing=str(reason))
            return
        parent.answer(result=asdict(result))


if __name__ == "__main__":
    run_program(lambda: run_child(Job, measure))
