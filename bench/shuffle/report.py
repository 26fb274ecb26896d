"""What was measured, as JSON, as Markdown tables and as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench import page
from bench.machine import Unavailable
from bench.shuffle.measures import Quality, class_variance_of_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUALITY_COLUMNS = {
    "order": "",
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
"""Heads of the table, and the measure below each."""


@dataclass
class Findings:
    """All that one run found.

    Attributes:
        facts: of the machine and the run, as plain values.
        samples: of the measured dataset.
        per_chunk: samples in a chunk.
        batch: samples in a batch.
        quality: of each order, one a seed.
        variances: class variance by batch size, then by window.
        curves: accuracy after each epoch, float64[seeds, epochs], of each order.
        shares: bytes read over bytes of samples, by window.
        budget_chunks: the memory budget that the shares were read with.
        places: one epoch of a few orders, int64[n], to be drawn.
    """

    facts: dict[str, Any]
    samples: int
    per_chunk: int
    batch: int
    quality: dict[str, list[Quality]]
    variances: dict[int, dict[int, float]]
    curves: dict[str, NDArray[np.float64]]
    shares: dict[int, float]
    budget_chunks: int
    places: dict[str, NDArray[np.int64]]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, without the facts and the places."""
        return {
            "samples": self.samples,
            "per_chunk": self.per_chunk,
            "batch": self.batch,
            "quality": {
                order: [one.to_dict() for one in found] for order, found in self.quality.items()
            },
            "class_variance": self.variances,
            "accuracy": {order: curve.tolist() for order, curve in self.curves.items()},
            "bytes_read": {"budget_chunks": self.budget_chunks, "by_window": self.shares},
        }


# ---- tables --------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def quality_rows(quality: Mapping[str, Sequence[Quality]]) -> list[list[str]]:
    """A head, and a row an order: means over the seeds."""
    rows = [list(QUALITY_COLUMNS)]
    for order, found in quality.items():
        values = [one.to_dict() for one in found]
        means = [
            _short(float(np.mean([value[name] for value in values])))
            for name in QUALITY_COLUMNS.values()
            if name
        ]
        rows.append([order, *means])
    return rows


def curve_rows(curves: Mapping[str, NDArray[np.float64]]) -> list[list[str]]:
    """A head, and a row an order: mean and standard deviation after some epochs."""
    epochs = next(iter(curves.values())).shape[1]
    shown = sorted({1, 2, 4, 8, epochs} & set(range(1, epochs + 1)))
    rows = [["order", *(f"epoch {epoch}" for epoch in shown)]]
    for order, curve in curves.items():
        cells = (curve[:, epoch - 1] * 100 for epoch in shown)
        rows.append([order, *(f"{cell.mean():.1f} ± {cell.std():.1f}" for cell in cells)])
    return rows


def markdown(findings: Findings) -> str:
    """All tables, under the facts they depend on."""
    chunks = -(-findings.samples // findings.per_chunk)
    variances = [
        ["window, chunks", *(f"batch of {batch:,}" for batch in findings.variances)],
        *(
            [f"{window:,}", *(_short(found[window]) for found in findings.variances.values())]
            for window in next(iter(findings.variances.values()))
        ),
    ]
    shares = [
        ["window, chunks", "bytes read over bytes of samples"],
        *([f"{window:,}", f"{share:.2f}"] for window, share in findings.shares.items()),
    ]
    title = (
        f"{findings.samples:,} samples, {findings.per_chunk} a chunk ({chunks:,} chunks), "
        f"batches of {findings.batch}"
    )
    lines = ["# Shuffle quality", "", *page.head(findings.facts)]
    lines += ["", f"## Orders: {title}", "", *page.headed_table(quality_rows(findings.quality))]
    lines += ["", "## Class variance, stored class by class", "", *page.headed_table(variances)]
    lines += ["", "## Accuracy, %: digits stored class by class", ""]
    lines += page.headed_table(curve_rows(findings.curves))
    lines += ["", f"## Bytes read, memory for {findings.budget_chunks} chunks", ""]
    return "\n".join([*lines, *page.headed_table(shares), ""])


# ---- plots ---------------------------------------------------------------------------------------


def _draw_places(whole: Axes, start: Axes, order: str, places: NDArray[np.int64]) -> None:
    """A whole epoch, and its first 64th: there one sees what a batch is made of."""
    for axes, part, what in (
        (whole, places, "epoch"),
        (start, places[: max(2, len(places) // 64)], "first 64th of the epoch"),
    ):
        chosen = np.linspace(0, len(part) - 1, min(len(part), 4000)).astype(int)
        axes.plot(chosen, part[chosen], ",", color="black")
        axes.set(xticks=[], yticks=[], xlabel=what, ylabel="storage", ylim=(0, len(places)))
    whole.set_title(order.replace(", ", ",\n"), fontsize=9)


def _plain_windows(axes: Axes, windows: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(windows, [f"{window:,}" for window in windows])
    axes.set_xticks([], minor=True)


def _draw_variances(axes: Axes, findings: Findings) -> None:
    for batch, found in findings.variances.items():
        windows = list(found)
        (line,) = axes.loglog(windows, list(found.values()), "o", label=f"batch of {batch:,}")
        wide = [window for window in windows if window * findings.per_chunk >= batch]
        near = [
            class_variance_of_window(
                window_chunks=window, per_chunk=findings.per_chunk, batch=batch
            )
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
    axes.axvline(findings.budget_chunks, color="grey", linewidth=0.8)
    axes.set(
        title=f"Bytes read, memory for {findings.budget_chunks} chunks (grey)",
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


def plot(findings: Findings, stem: Path) -> list[Path]:
    """Draw everything; where the pictures are.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable("plots: matplotlib is not installed: make bench installs it") from error
    columns = len(findings.places)
    orders, windows, accuracy = Figure((2.6 * columns, 5)), Figure((12, 4.5)), Figure((11, 5.5))
    grid = orders.subplots(2, columns)
    for column, (order, places) in enumerate(findings.places.items()):
        _draw_places(grid[0][column], grid[1][column], order, places)
    left, right = windows.subplots(1, 2)
    _draw_variances(left, findings)
    _draw_shares(right, findings)
    _draw_curves(accuracy.subplots(), findings)
    figures = {"orders": orders, "windows": windows, "accuracy": accuracy}
    paths = []
    for name, figure in figures.items():
        figure.set_layout_engine("tight")
        paths.append(stem.with_name(f"{stem.name}-{name}.png"))
        figure.savefig(paths[-1], dpi=110)
    return paths


def write(findings: Findings, folder: Path) -> Path:
    """Write JSON and Markdown; returns the JSON's path."""
    return page.write(folder, "shuffle", findings.facts, markdown(findings), findings.to_dict())
