"""``python -m bench.shuffle``: measure the orders, train by them, write tables and pictures.

Nothing is timed: the results depend on the orders, the seeds and the code, not on the machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.command import Session, command_line
from bench.process import run_program
from bench.progress import Stretch
from bench.shuffle import cost, training
from bench.shuffle.measures import Quality, batches_of, class_variance, measure, sorted_labels
from bench.shuffle.orders import TINY, Buffered, Order, Shuffled, Size, Stored
from bench.shuffle.packing import packings
from bench.shuffle.report import Findings, make_report
from dlfs.epoch.options import WINDOW_CHUNKS


def orders_of(size: Size) -> list[Order]:
    """Return the orders that are compared.

    These are DLFS's orders, and a shuffle buffer as large as the default window (16 MiB in chunks
    of 256 KiB), with and without shards of the same size.
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
    """Return the orders that digits are trained by, where a window has fewer samples."""
    windows = [Shuffled("chunk", window) for window in size.digits_windows]
    buffer = Buffered(16 * training.PER_CHUNK)
    return [Shuffled("global"), *reversed(windows), buffer, Shuffled(None)]


def variances_of(stored: Stored, size: Size) -> dict[int, dict[int, float]]:
    """Return the class variance by size of batch, then by window."""
    labels = sorted_labels(stored.count, size.classes)
    epochs = {
        window: Shuffled("chunk", window).positions(stored, seed=1, epoch=0)
        for window in size.windows
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
    """Return an order's measures, one for each seed."""
    found = []
    for seed in range(1, size.seeds + 1):
        epoch, following = (order.positions(stored, seed=seed, epoch=number) for number in (0, 1))
        found.append(
            measure(
                epoch, following, per_chunk=size.per_chunk, batch=size.batch, classes=size.classes
            )
        )
    return found


def trained(size: Size) -> dict[str, NDArray[np.float64]]:
    """Return the learning curve of each order.

    One curve is of chunk shuffle with a window of one chunk on digits that are stored shuffled.
    """
    by_class, mixed = training.Digits.load(), training.Digits.load(by_class=False)
    runs = [(order.label, by_class, order) for order in trained_orders(size)]
    least = Shuffled("chunk", 1)
    runs.insert(1, (f"{least.label}, stored shuffled", mixed, least))
    return {
        label: training.curves(digits, order, epochs=size.epochs, seeds=size.digits_seeds)
        for label, digits, order in runs
    }


def find(size: Size, folder: Path) -> Findings:
    """Measure everything; ``folder`` is for a temporary volume."""
    stored, orders = Stored.lay(size.chunks * size.per_chunk, size.per_chunk), orders_of(size)
    budget = size.budget_chunks
    with cost.volume_of(folder, 8 * budget) as volume:
        windows = [budget * eighths // 8 for eighths in (2, 4, 8, 12, 16, 32, 64)]
        shares = cost.read_shares(volume, budget, windows)
    packed = packings(folder, size)
    return Findings(
        size,
        quality={order.label: measured(stored, order, size) for order in orders},
        variances=variances_of(stored, size),
        curves=trained(size),
        shares=shares,
        packings=packed,
    )


def main(words: list[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = command_line("bench.shuffle", __doc__, "results")
    parser.add_argument("--tiny", action="store_true", help="a few samples, for a try")
    arguments = parser.parse_args(words)
    found: list[Findings] = []
    with tempfile.TemporaryDirectory() as folder:
        session = Session("shuffle", Path(folder))

        def measure(whole: Stretch) -> None:
            whole.show("measuring the orders")
            found.append(find(TINY if arguments.tiny else Size(), Path(folder)))

        code = session.measure(measure)
    if found:
        report = make_report(session.facts, found[0])
        session.console.print(report.markdown(), markup=False)
        session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
