"""``python -m bench.shuffle``: measure the orders, train by them, write tables and plots.

Nothing here is timed: the figures depend on the orders, the seeds and the code, not on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench.ending import run_program
from bench.machine import Unavailable, describe
from bench.shuffle import cost, report, training
from bench.shuffle.measures import Quality, batches_of, class_variance, measure, sorted_labels
from bench.shuffle.orders import Buffered, Order, Shuffled, Stored
from bench.shuffle.report import Findings
from dlfs.epoch_options import WINDOW_CHUNKS

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        chunks: of the measured dataset.
        per_chunk: samples in each.
        batch: samples in a batch.
        batches: further sizes of batches, for the variance of classes.
        classes: in the measured dataset.
        windows: of chunk shuffle, in chunks.
        seeds: of orders.
        digits_windows: of chunk shuffle of the digits.
        digits_seeds: of weights and orders.
        epochs: of a training.
        budget_chunks: memory to read with; windows up to eight times as large are tried.
    """

    chunks: int = 4096
    per_chunk: int = 64
    batch: int = 256
    batches: tuple[int, ...] = (32, 256, 1024)
    classes: int = 100
    windows: tuple[int, ...] = (1, 4, 16, WINDOW_CHUNKS, 256, 1024)
    seeds: int = 5
    digits_windows: tuple[int, ...] = (1, 4, 16, 32)
    digits_seeds: int = 10
    epochs: int = 12
    budget_chunks: int = 64


TINY = Size(
    chunks=64,
    per_chunk=8,
    batch=16,
    batches=(16, 32),
    classes=8,
    windows=(1, 8),
    seeds=2,
    digits_windows=(1,),
    digits_seeds=2,
    epochs=2,
    budget_chunks=4,
)
"""For tests."""


DRAWN_NOT = (Shuffled("chunk", 4), Shuffled("chunk", 16), Shuffled("chunk", 256))
"""They look as their neighbours do."""


def orders_of(size: Size) -> list[Order]:
    """What is compared: ours, and a buffer as large as the default window, with and without shards.

    The shards are as large as that window too: 16 MiB of chunks of 256 KiB.
    """
    buffered = min(WINDOW_CHUNKS, size.chunks // 8) * size.per_chunk
    return [
        Shuffled("global"),
        *(Shuffled("chunk", window) for window in size.windows),
        Buffered(buffered, buffered),
        Buffered(buffered),
        Shuffled(None),
    ]


def trained_orders(size: Size) -> list[Order]:
    """The same for digits, where a window has fewer samples."""
    windows = [Shuffled("chunk", window) for window in size.digits_windows]
    buffer = Buffered(16 * training.PER_CHUNK)
    return [Shuffled("global"), *reversed(windows), buffer, Shuffled(None)]


def variances_of(stored: Stored, size: Size) -> dict[int, dict[int, float]]:
    """Class variance by size of batch, then by window."""
    labels = sorted_labels(stored.count, size.classes)
    epochs = {
        window: Shuffled("chunk", window).places(stored, seed=1, epoch=0) for window in size.windows
    }
    sizes = np.bincount(labels)
    return {
        batch: {
            window: class_variance(labels[batches_of(epoch, batch)], sizes)
            for window, epoch in epochs.items()
        }
        for batch in size.batches
    }


def measured(stored: Stored, order: Order, size: Size) -> list[Quality]:
    """An order's measures, one a seed."""
    found = []
    for seed in range(1, size.seeds + 1):
        epoch, following = (order.places(stored, seed=seed, epoch=number) for number in (0, 1))
        found.append(
            measure(
                epoch, following, per_chunk=size.per_chunk, batch=size.batch, classes=size.classes
            )
        )
    return found


def trained(size: Size) -> dict[str, NDArray[np.float64]]:
    """The curves of the orders, and of the least chunk shuffle where storage is shuffled."""
    by_class, mixed = training.Digits.load(), training.Digits.load(by_class=False)
    runs = [(order.label, by_class, order) for order in trained_orders(size)]
    least = Shuffled("chunk", 1)
    runs.insert(1, (f"{least.label}, stored shuffled", mixed, least))
    return {
        label: training.curves(digits, order, epochs=size.epochs, seeds=size.digits_seeds)
        for label, digits, order in runs
    }


def find(size: Size, folder: Path) -> Findings:
    """Measure everything; ``folder`` takes a volume for a while."""
    stored, orders = Stored.lay(size.chunks * size.per_chunk, size.per_chunk), orders_of(size)
    budget = size.budget_chunks
    with cost.volume_of(folder, 8 * budget) as volume:
        windows = [budget * eighths // 8 for eighths in (2, 4, 8, 12, 16, 32, 64)]
        shares = cost.read_shares(volume, budget, windows)
    return Findings(
        facts=describe(folder),
        samples=stored.count,
        per_chunk=size.per_chunk,
        batch=size.batch,
        quality={order.label: measured(stored, order, size) for order in orders},
        variances=variances_of(stored, size),
        curves=trained(size),
        shares=shares,
        budget_chunks=budget,
        places={
            order.label: order.places(stored, seed=1, epoch=0)
            for order in orders
            if order not in DRAWN_NOT
        },
    )


def main(words: list[str] | None = None) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m bench.shuffle", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few samples, for a try")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    arguments = parser.parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as folder:
        findings = find(TINY if arguments.tiny else Size(), Path(folder))
    path = report.write(findings, arguments.results)
    console.print(path.with_suffix(".md").read_text(encoding="utf-8"), markup=False)
    try:
        drawn = report.plot(findings, path.with_suffix(""))
    except Unavailable as reason:
        console.print(str(reason), markup=False)
        drawn = []
    for written in (path, path.with_suffix(".md"), *drawn):
        console.print(str(written), markup=False)
    return 0


if __name__ == "__main__":
    run_program(main)
