"""The report of the orders: tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import Report, Table
from bench.shuffle.measures import Quality
from bench.shuffle.orders import Size
from bench.shuffle.packing import WINDOWS, Packing

QUALITY_COLUMNS = {
    "Spearman": "spearman",
    "Kendall": "kendall",
    "neighbours: median distance": "neighbour_distance",
    "farthest from uniform": "neighbour_spread",
    "pairs of one chunk": "pairs_of_chunk",
    "class entropy, bits": "class_bits",
    "class variance": "class_variance",
    "stored shuffled": "class_variance_shuffled",
    "next epoch: Spearman": "epochs_spearman",
    "pairs met again": "pairs_again",
}
"""Heads of the table's columns, and the measure of each."""


@dataclass
class Findings:
    """The results of one run.

    Attributes:
        size: sizes of the measurements.
        quality: measures of each order, one for each seed.
        variances: class variance by batch size, then by window.
        curves: accuracy of each order after each epoch, float64[seeds, epochs].
        shares: bytes read over bytes of samples, by window.
        packings: measures of datasets that were imported class by class, by the import.
    """

    size: Size
    quality: dict[str, list[Quality]]
    variances: dict[int, dict[int, float]]
    curves: dict[str, NDArray[np.float64]]
    shares: dict[int, float]
    packings: dict[str, Packing]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return {
            "samples": self.size.chunks * self.size.per_chunk,
            "per_chunk": self.size.per_chunk,
            "batch": self.size.batch,
            "quality": {
                order: [asdict(one) for one in found] for order, found in self.quality.items()
            },
            "class_variance": self.variances,
            "accuracy": {order: curve.tolist() for order, curve in self.curves.items()},
            "packing": {name: asdict(found) for name, found in self.packings.items()},
            "bytes_read": {"budget_chunks": self.size.budget_chunks, "by_window": self.shares},
        }


# ---- tables --------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def quality_table(title: str, quality: Mapping[str, Sequence[Quality]]) -> Table:
    """Return the table of the orders' measures: means over the seeds."""
    rows = []
    for order, found in quality.items():
        means = (
            np.mean([getattr(one, name) for one in found]) for name in QUALITY_COLUMNS.values()
        )
        rows.append([order, *(_short(float(mean)) for mean in means)])
    return Table(title, ("order", *QUALITY_COLUMNS), rows)


def curve_table(title: str, curves: Mapping[str, NDArray[np.float64]]) -> Table:
    """Return the table of accuracies: mean and standard deviation after some epochs."""
    epochs = next(iter(curves.values())).shape[1]
    shown = sorted({1, 2, 4, 8, epochs} & set(range(1, epochs + 1)))
    rows = []
    for order, curve in curves.items():
        cells = (curve[:, epoch - 1] * 100 for epoch in shown)
        rows.append([order, *(f"{cell.mean():.1f} ± {cell.std():.1f}" for cell in cells)])
    return Table(title, ("order", *(f"epoch {epoch}" for epoch in shown)), rows)


def make_report(facts: Mapping[str, Any], findings: Findings) -> Report:
    """Return the report of all measures."""
    size = findings.size
    title = (
        f"Orders: {size.chunks * size.per_chunk:,} samples, {size.per_chunk} a chunk "
        f"({size.chunks:,} chunks), batches of {size.batch}"
    )
    variances = [
        [f"{window:,}", *(_short(found[window]) for found in findings.variances.values())]
        for window in next(iter(findings.variances.values()))
    ]
    shares = [(f"{window:,}", f"{share:.2f}") for window, share in findings.shares.items()]
    window = "window, chunks"
    packed = [
        [name, *(_short(value) for value in asdict(found).values())]
        for name, found in findings.packings.items()
    ]
    report = Report("shuffle", "Shuffle quality", facts, findings.to_dict())
    report.add(
        quality_table(title, findings.quality),
        Table(
            "Class variance, stored class by class",
            (window, *(f"batch of {batch:,}" for batch in findings.variances)),
            variances,
        ),
        curve_table("Accuracy, %: digits stored class by class", findings.curves),
        Table(
            f"Imported class by class, {WINDOWS} windows; chunk shuffle by a sixteenth of the data",
            (
                "shuffled",
                "class variance of a chunk",
                "of a batch",
                "variance of the windows in a batch",
                "pairs of neighbours in the source",
            ),
            packed,
        ),
        Table(
            f"Bytes read, memory for {size.budget_chunks} chunks",
            (window, "bytes read over bytes of samples"),
            shares,
        ),
    )
    return report
