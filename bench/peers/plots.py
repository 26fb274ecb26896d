"""The pictures of a race, drawn by matplotlib.

DLFS is drawn in blue with strong lines, limits of the machine as black dashes, peers in grey. Peers
differ by marks and by labels at the ends of their lines, so that no picture needs red and green.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.command import figure_class
from bench.peers.outcome import Outcome, Run
from bench.peers.verdicts import OURS, family
from dlfs.base.units import KIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, SKY, GREY, LIGHT, BLACK = "#0072B2", "#56B4E9", "#6b6b6b", "#b5b5b5", "#000000"
GRID = {"color": "#e6e6e6", "lw": 0.7}
MARKS = "osD^vP<X>*hp"
LABEL_GAP = 0.042
"""Least distance of two labels at the lines' ends, as a share of the axis."""


def draw(outcome: Outcome) -> dict[str, Figure]:
    """Draw the pictures that there are runs for, and return them by name."""
    Figure = figure_class()  # noqa: N806
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False})
    pictures: dict[str, Callable[[Any, Outcome], bool]] = {
        "throughput": _throughput,
        "cpu": _cpu,
        "processes": _processes,
        "depth": _depth,
    }
    drawn = {}
    for name, picture in pictures.items():
        figure = Figure()
        FigureCanvasAgg(figure)
        if picture(figure, outcome):
            drawn[name] = figure
    return drawn


def _is_dlfs(name: str) -> bool:
    return family(name) == "dlfs"


def _median(runs: Sequence[Run], value: Callable[[Run], float]) -> float | None:
    """Return the median of a value over runs; None without runs."""
    return median(map(value, runs)) if runs else None


def _global_single(outcome: Outcome) -> list[Run]:
    return [run for run in outcome.runs if run.processes == 1 and run.is_global]


def _sizes(outcome: Outcome) -> list[tuple[float, str]]:
    """Return mean sample size in bytes and key of each data set, rising."""
    return sorted((d["sample_bytes"] / d["samples"], key) for key, d in outcome.datasets.items())


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.peer for run in runs))


# ---- throughput by sample size -------------------------------------------------------------------


def _throughput(figure: Any, outcome: Outcome) -> bool:
    runs = _global_single(outcome)
    if not runs:
        return False
    figure.set_size_inches(14, 8)
    for panel, warm in enumerate((False, True)):
        axes = figure.add_subplot(1, 2, panel + 1)
        _throughput_panel(axes, outcome, [run for run in runs if run.warm == warm])
        axes.set_title("warm: everything in memory" if warm else "cold: caches dropped", loc="left")
        if not warm:
            axes.set_ylabel("MiB/s of samples")
    figure.suptitle("Throughput in global order, one process", x=0.12, ha="left", weight="bold")
    figure.subplots_adjust(wspace=0.62, top=0.9)
    return True


def _throughput_panel(axes: Any, outcome: Outcome, runs: list[Run]) -> None:
    sizes = _sizes(outcome)
    ends: list[tuple[float, str, str]] = []
    for number, name in enumerate(_names(runs)):
        mine = [run for run in runs if run.peer == name]
        by_size = [(size, [run for run in mine if run.dataset == key]) for size, key in sizes]
        points = [
            (size, median(r.bandwidth / MIB for r in found)) for size, found in by_size if found
        ]
        is_limit, is_dlfs = any(run.limit for run in mine), _is_dlfs(name)
        color = BLACK if is_limit else BLUE if name in OURS else SKY if is_dlfs else GREY
        if is_limit and len(points) == 1:  # a level line, for one data set
            axes.axhline(points[0][1], color=color, lw=1.2, ls="--", zorder=1)
        elif is_limit:
            axes.plot(*zip(*points, strict=True), color=color, lw=1.2, ls="--", zorder=1)
        else:
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                lw=2.8 if name in OURS else 1.0,
                marker=MARKS[number % len(MARKS)],
                ms=6 if is_dlfs else 4,
                zorder=3 if is_dlfs else 2,
            )
        if is_limit or points[-1][0] == sizes[-1][0]:
            ends.append((points[-1][1], name, color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    texts = [f"{s:.0f} B" if s < KIB else f"{s / KIB:.3g} KiB" for s, _ in sizes]
    axes.set_xticks([size for size, _ in sizes], texts)
    axes.minorticks_off()
    axes.set_xlabel("mean size of a sample")
    axes.grid(axis="y", **GRID)
    _label_ends(axes, ends, sizes[-1][0])


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], x: float) -> None:
    """Write names at the right without overlap, each with a thin line to the end of its own line.

    ``ends`` has value, name and color of each line at ``x``, where the lines end.
    """
    if not ends:
        return
    axes.figure.canvas.draw()
    to_share = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends)
    wanted = np.array([to_share.transform((x, value))[1] for value, _, _ in ends])
    ranks = LABEL_GAP * np.arange(len(ends))
    placed = np.maximum.accumulate(np.maximum(wanted, 0.0) - ranks) + ranks
    placed = np.minimum(placed, 1.0 - ranks[::-1])
    start = float(to_share.transform((x, ends[0][0]))[0])
    box = {"transform": axes.transAxes}
    for (_, name, color), share, label in zip(ends, wanted, placed, strict=True):
        line = ([start + 0.01, 1.08], [share, label])
        axes.plot(*line, color=LIGHT, lw=0.6, clip_on=False, **box)
        weight = "bold" if name in OURS else "normal"
        axes.text(1.09, label, name, color=color, weight=weight, va="center", **box)


# ---- two values of each peer ---------------------------------------------------------------------


def _pairs(
    figure: Any,
    outcome: Outcome,
    hollow: Sequence[Run],
    full: Sequence[Run],
    names: Sequence[str],
    value: Callable[[Run], float],
    texts: tuple[str, str, str, str],
) -> bool:
    """Draw a panel for each data set, with a row a peer: a hollow and a full mark with a line.

    ``texts`` has the title of the picture, the label of the axis, and the legend of both marks.
    """
    from matplotlib.lines import Line2D

    title, label, *legend = texts
    there = {run.dataset for run in (*hollow, *full) if run.peer in names}
    keys = [key for _, key in _sizes(outcome) if key in there]
    if not names or not keys:
        return False
    figure.set_size_inches(max(9.5, 3.0 + 4.0 * len(keys)), 1.6 + 0.27 * len(names))
    figure.suptitle(title, x=0.06, ha="left", weight="bold")
    for number, key in enumerate(keys):
        axes = figure.add_subplot(1, len(keys), number + 1)
        axes.set_title(outcome.datasets[key]["about"], loc="left", fontsize=10)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(axis="x", **GRID)
        for row, name in enumerate(names):
            color = BLUE if _is_dlfs(name) else GREY
            values = [
                _median([run for run in runs if (run.peer, run.dataset) == (name, key)], value)
                for runs in (hollow, full)
            ]
            if None not in values:
                axes.plot(values, [row, row], color=color, lw=1.2, alpha=0.6, zorder=1)
            for x, face in zip(values, ("white", color), strict=True):
                if x is not None:
                    axes.plot([x], [row], "o", mfc=face, mec=color, mew=1.4, ms=7, zorder=2)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0, labelleft=number == 0)
    for text in figure.axes[0].get_yticklabels():
        if _is_dlfs(text.get_text()):
            text.set(color=BLUE, weight="bold")
    figure.subplots_adjust(wspace=0.08)
    marks = [
        Line2D([], [], ls="", marker="o", mfc=face, mec=GREY, mew=1.4, ms=7, label=text)
        for face, text in zip(("white", GREY), legend, strict=True)
    ]
    figure.legend(handles=marks, loc="upper right", ncols=2, frameon=False)
    return True


def _cpu(figure: Any, outcome: Outcome) -> bool:
    runs = [run for run in _global_single(outcome) if run.cpu_seconds > 0]
    warm, cold = ([run for run in runs if run.warm == state] for state in (True, False))
    title = "CPU time of a sample, global order, one process"
    texts = (title, "us, all processes", "warm", "cold")
    return _pairs(figure, outcome, warm, cold, _names(runs), lambda run: run.cpu_us, texts)


def _processes(figure: Any, outcome: Outcome) -> bool:
    runs = [run for run in outcome.runs if run.is_global and not run.limit and not run.warm]
    one, two = ([run for run in runs if run.processes == count] for count in (1, 2))
    title = "One process and two at once, global order, cold"
    texts = (title, "samples/s, together", "one process", "two")
    keys = {run.dataset for run in two}
    one = [run for run in one if run.dataset in keys]
    return _pairs(figure, outcome, one, two, _names(two), lambda run: run.rate, texts)


# ---- rate by depth -------------------------------------------------------------------------------


def _depth(figure: Any, outcome: Outcome) -> bool:
    if not outcome.depths:
        return False
    figure.set_size_inches(9, 5.5)
    axes = figure.add_subplot()
    styles = {"DLFS": (BLUE, "-", "o", 2.6), "fio": (BLACK, "--", "s", 1.3)}
    ends = []
    depths = sorted({one.depth for one in outcome.depths})
    for name in dict.fromkeys(one.who for one in outcome.depths):
        color, line, mark, width = styles.get(name.split()[0], (GREY, "-.", "^", 1.3))
        rates = {
            depth: [one.rate for one in outcome.depths if (one.who, one.depth) == (name, depth)]
            for depth in depths
        }
        points = [(depth, median(found)) for depth, found in rates.items() if found]
        axes.plot(*zip(*points, strict=True), color=color, ls=line, marker=mark, lw=width)
        ends.append((points[-1][1], name, color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("reads in flight")
    axes.set_ylabel("samples/s")
    axes.grid(axis="y", **GRID)
    about = outcome.datasets[outcome.depths[0].dataset]["about"]
    title = f"Random reads by depth, cold, one process: {about}"
    axes.set_title(title, loc="left", weight="bold")
    _label_ends(axes, ends, depths[-1])
    return True
