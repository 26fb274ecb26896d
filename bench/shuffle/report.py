"""The report of the orders: tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.command import figure_class
from bench.report import Report, Table
from bench.shuffle.measures import Quality, class_variance_of_window
from bench.shuffle.orders import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        positions: one epoch of the orders that are drawn, int64[n].
    """

    size: Size
    quality: dict[str, list[Quality]]
    variances: dict[int, dict[int, float]]
    curves: dict[str, NDArray[np.float64]]
    shares: dict[int, float]
    positions: dict[str, NDArray[np.int64]]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain values, without the epochs that are drawn."""
        return {
            "samples": self.size.chunks * self.size.per_chunk,
            "per_chunk": self.size.per_chunk,
            "batch": self.size.batch,
            "quality": {
                order: [asdict(one) for one in found] for order, found in self.quality.items()
            },
            "class_variance": self.variances,
            "accuracy": {order: curve.tolist() for order, curve in self.curves.items()},
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
            f"Bytes read, memory for {size.budget_chunks} chunks",
            (window, "bytes read over bytes of samples"),
            shares,
        ),
    )
    return report


# ---- pictures ----------------------------------------------------------------------------------


def _draw_order(whole: Axes, start: Axes, order: str, positions: NDArray[np.int64]) -> None:
    """Draw a whole epoch, and its first 64th, which shows the composition of a batch."""
    for axes, part, what in (
        (whole, positions, "epoch"),
        (start, positions[: max(2, len(positions) // 64)], "first 64th of the epoch"),
    ):
        chosen = np.linspace(0, len(part) - 1, min(len(part), 4000)).astype(int)
        axes.plot(chosen, part[chosen], ",", color="black")
        axes.set(xticks=[], yticks=[], xlabel=what, ylabel="storage", ylim=(0, len(positions)))
    whole.set_title(order.replace(", ", ",\n"), fontsize=9)


def _plain_windows(axes: Axes, windows: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(windows, [f"{window:,}" for window in windows])
    axes.set_xticks([], minor=True)


def _draw_variances(axes: Axes, findings: Findings) -> None:
    for batch, found in findings.variances.items():
        windows = list(found)
        (line,) = axes.loglog(windows, list(found.values()), "o", label=f"batch of {batch:,}")
        per_chunk = findings.size.per_chunk
        wide = [window for window in windows if window * per_chunk >= batch]
        near = [
            class_variance_of_window(window_chunks=window, per_chunk=per_chunk, batch=batch)
            for window in wide
        ]
        axes.loglog(wide, near, "-", color=line.get_color(), linewidth=0.8)
    _plain_windows(axes, windows)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        title="Class variance of a batch, stored class by class\n(lines: 1 + (batch - 1) / window)",
        xlabel="window, chunks",
        ylabel="times that of a uniform order",
    )
    axes.legend()


def _draw_shares(axes: Axes, findings: Findings) -> None:
    axes.plot(list(findings.shares), list(findings.shares.values()), "o-")
    _plain_windows(axes, list(findings.shares))
    axes.axvline(findings.size.budget_chunks, color="grey", linewidth=0.8)
    axes.set(
        title=f"Bytes read, memory for {findings.size.budget_chunks} chunks (grey)",
        xlabel="window, chunks",
        ylabel="times the bytes of the samples",
        ylim=(0, None),
    )


def _draw_curves(axes: Axes, findings: Findings) -> None:
    for order, curve in findings.curves.items():
        epochs = np.arange(1, curve.shape[1] + 1)
        mean, spread = curve.mean(axis=0) * 100, curve.std(axis=0) * 100
        (line,) = axes.plot(epochs, mean, ".-", label=order)
        axes.fill_between(epochs, mean - spread, mean + spread, alpha=0.15, color=line.get_color())
    seeds = len(next(iter(findings.curves.values())))
    axes.set(
        title=f"Digits stored class by class: accuracy, mean of {seeds} seeds ± their deviation",
        xlabel="epoch",
        ylabel="held-out digits right, %",
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw(findings: Findings) -> dict[str, Figure]:
    """Draw the pictures, and return them by name."""
    Figure = figure_class()  # noqa: N806
    columns = len(findings.positions)
    orders, windows, accuracy = Figure((2.6 * columns, 5)), Figure((12, 4.5)), Figure((11, 5.5))
    grid = orders.subplots(2, columns)
    for column, (order, positions) in enumerate(findings.positions.items()):
        _draw_order(grid[0][column], grid[1][column], order, positions)
    left, right = windows.subplots(1, 2)
    _draw_variances(left, findings)
    _draw_shares(right, findings)
    _draw_curves(accuracy.subplots(), findings)
    for figure in (orders, windows, accuracy):
        figure.set_layout_engine("tight")
    return {"orders": orders, "windows": windows, "accuracy": accuracy}
