"""The race as pictures: PNG by matplotlib.

DLFS is drawn strong and in blue, limits of the machine as black dashes, peers apart by grey tone,
mark and a label at their line's end, so that nothing depends on telling red from green.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import Unavailable
from bench.peers.outcome import Outcome, Run
from bench.peers.verdicts import OURS, family
from dlfs.units import MIB

BLUE, SKY, GREY, LIGHT, BLACK = "#0072B2", "#56B4E9", "#6b6b6b", "#b5b5b5", "#000000"
MARKS = "osD^vP<X>*hp"
LABEL_GAP = 0.042
"""Between two labels at the lines' ends, as a share of the axis."""


def draw(outcome: Outcome, folder: Path, stem: str) -> list[Path]:
    """Draw what there are runs for; the files.

    Raises:
        Unavailable: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("matplotlib is not installed: make bench installs it") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "figure.dpi": 110})
    pictures: dict[str, Callable[[Any, Outcome], bool]] = {
        "throughput": _throughput,
        "cpu": _cpu,
        "processes": _processes,
        "depth": _depth,
    }
    paths = []
    for name, picture in pictures.items():
        import matplotlib.pyplot as plt

        figure = plt.figure()
        if picture(figure, outcome):
            paths.append(folder / f"{stem}-{name}.png")
            figure.savefig(paths[-1], bbox_inches="tight")
        plt.close(figure)
    return paths


def _is_ours(name: str) -> bool:
    return family(name) == "dlfs"


def _strong(name: str) -> bool:
    return name in OURS


def _median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return median(value(run) for run in runs)


def _global_single(outcome: Outcome) -> list[Run]:
    return [run for run in outcome.runs if run.processes == 1 and run.is_global]


def _sizes(outcome: Outcome) -> list[tuple[float, str]]:
    """Mean bytes of a sample and the key of each data set, rising."""
    pairs = [(d["sample_bytes"] / d["samples"], key) for key, d in outcome.datasets.items()]
    return sorted(pairs)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.peer for run in runs))


# ---- throughput against the size of samples ------------------------------------------------------


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
        points = []
        for size, key in sizes:
            found = [run for run in runs if (run.peer, run.dataset) == (name, key)]
            if found:
                points.append((size, _median(found, lambda run: run.bytes / run.seconds / MIB)))
        if points and not _is_limit(runs, name):
            color = BLUE if _strong(name) else SKY if _is_ours(name) else GREY
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                lw=2.8 if _strong(name) else 1.0,
                marker=MARKS[number % len(MARKS)],
                ms=6 if _is_ours(name) else 4,
                zorder=3 if _is_ours(name) else 2,
            )
            if points[-1][0] == sizes[-1][0]:
                ends.append((points[-1][1], name, color))
        elif points:
            _limit_line(axes, points)
            ends.append((points[-1][1], name, BLACK))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([size for size, _ in sizes], [_size_text(size) for size, _ in sizes])
    axes.minorticks_off()
    axes.set_xlabel("mean size of a sample")
    axes.grid(axis="y", color="#e6e6e6", lw=0.7)
    _label_ends(axes, ends, sizes[-1][0])


def _is_limit(runs: Sequence[Run], name: str) -> bool:
    return any(run.limit for run in runs if run.peer == name)


def _limit_line(axes: Any, points: list[tuple[float, float]]) -> None:
    """What the machine can do: a dashed line, level where there is one size only."""
    if len(points) > 1:
        axes.plot(*zip(*points, strict=True), color=BLACK, lw=1.2, ls="--", zorder=1)
    else:
        axes.axhline(points[0][1], color=BLACK, lw=1.2, ls="--", zorder=1)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], x: float) -> None:
    """Names at the right, pushed apart, each with a thin line to its own end."""
    if not ends:
        return
    axes.figure.canvas.draw()
    to_share = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends)
    wanted = [float(to_share.transform((x, value))[1]) for value, _, _ in ends]
    placed: list[float] = []
    for share in wanted:
        placed.append(max(share, placed[-1] + LABEL_GAP) if placed else max(share, 0.0))
    over = max(0.0, placed[-1] - 1.0)
    for at in range(len(placed) - 1, -1, -1):
        ceiling = placed[at + 1] - LABEL_GAP if at + 1 < len(placed) else 1.0
        placed[at] = min(placed[at], ceiling) if over else placed[at]
    start = float(to_share.transform((x, ends[0][0]))[0])
    for (_, name, color), share, label in zip(ends, wanted, placed, strict=True):
        axes.plot(
            [start + 0.01, 1.08],
            [share, label],
            color=LIGHT,
            lw=0.6,
            transform=axes.transAxes,
            clip_on=False,
        )
        weight = "bold" if _strong(name) else "normal"
        axes.text(
            1.09, label, name, color=color, weight=weight, va="center", transform=axes.transAxes
        )


def _size_text(size: float) -> str:
    return f"{size:.0f} B" if size < 1024 else f"{size / 1024:.3g} KiB"


# ---- one row a peer ------------------------------------------------------------------------------


def _panels(
    figure: Any, outcome: Outcome, runs: Sequence[Run], rows: int, title: str
) -> list[tuple[str, Any]]:
    """A panel a data set that there are runs of, side by side, with the same rows."""
    there = {run.dataset for run in runs}
    keys = [key for _, key in _sizes(outcome) if key in there]
    figure.set_size_inches(max(9.5, 3.0 + 4.0 * len(keys)), 1.6 + 0.27 * rows)
    figure.suptitle(title, x=0.06, ha="left", weight="bold")
    panels = []
    first = None
    for number, key in enumerate(keys):
        axes = figure.add_subplot(1, len(keys), number + 1, sharey=first)
        first = first or axes
        axes.set_title(outcome.datasets[key]["about"], loc="left", fontsize=10)
        axes.set_xscale("log")
        axes.grid(axis="x", color="#e6e6e6", lw=0.7)
        panels.append((key, axes))
    figure.subplots_adjust(wspace=0.08)
    return panels


def _name_rows(panels: list[tuple[str, Any]], names: Sequence[str]) -> None:
    for number, (_, axes) in enumerate(panels):
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0, labelleft=number == 0)
    for text in panels[0][1].get_yticklabels():
        if _is_ours(text.get_text()):
            text.set(color=BLUE, weight="bold")


def _pairs(
    axes: Any,
    names: Sequence[str],
    left: Callable[[str], float | None],
    right: Callable[[str], float | None],
) -> None:
    """Two marks a row with a line between: hollow and full."""
    for row, name in enumerate(names):
        color = BLUE if _is_ours(name) else GREY
        values = [left(name), right(name)]
        if None not in values:
            axes.plot(values, [row, row], color=color, lw=1.2, alpha=0.6, zorder=1)
        for value, face in zip(values, ("white", color), strict=True):
            if value is not None:
                axes.plot([value], [row], "o", mfc=face, mec=color, mew=1.4, ms=7, zorder=2)


def _legend(figure: Any, hollow: str, full: str) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], ls="", marker="o", mfc=face, mec=GREY, mew=1.4, ms=7, label=label)
        for face, label in (("white", hollow), (GREY, full))
    ]
    figure.legend(handles=marks, loc="upper right", ncols=2, frameon=False)


def _value(runs: list[Run], of: Callable[[Run], float]) -> float | None:
    return _median(runs, of) if runs else None


def _cpu(figure: Any, outcome: Outcome) -> bool:
    runs = [run for run in _global_single(outcome) if run.cpu_seconds > 0]
    names = _names(runs)
    if not names:
        return False
    title = "CPU time of a sample, global order, one process"
    panels = _panels(figure, outcome, runs, len(names), title)
    for key, axes in panels:
        by_state = {
            warm: [run for run in runs if (run.dataset, run.warm) == (key, warm)]
            for warm in (False, True)
        }

        def cpu(name: str, warm: bool, by_state: dict[bool, list[Run]] = by_state) -> float | None:
            mine = [run for run in by_state[warm] if run.peer == name]
            return _value(mine, lambda run: 1e6 * run.cpu_seconds / run.samples)

        _pairs(axes, names, lambda name: cpu(name, True), lambda name: cpu(name, False))
        axes.set_xlabel("us, all processes")
    _name_rows(panels, names)
    _legend(figure, "warm", "cold")
    return True


def _processes(figure: Any, outcome: Outcome) -> bool:
    runs = [run for run in outcome.runs if run.is_global and not run.limit and not run.warm]
    twice = [run for run in runs if run.processes == 2]
    names = _names(twice)
    if not names:
        return False
    title = "One process and two at once, global order, cold"
    panels = _panels(figure, outcome, twice, len(names), title)
    for key, axes in panels:

        def rate(name: str, processes: int, key: str = key) -> float | None:
            wanted = (name, key, processes)
            mine = [run for run in runs if (run.peer, run.dataset, run.processes) == wanted]
            return _value(mine, lambda run: run.rate)

        _pairs(axes, names, lambda name: rate(name, 1), lambda name: rate(name, 2))
        axes.set_xlabel("samples/s, together")
    _name_rows(panels, names)
    _legend(figure, "one process", "two")
    return True


# ---- depth ---------------------------------------------------------------------------------------


def _depth(figure: Any, outcome: Outcome) -> bool:
    if not outcome.depths:
        return False
    figure.set_size_inches(9, 5.5)
    axes = figure.add_subplot()
    styles = {"DLFS": (BLUE, "-", "o", 2.6), "fio": (BLACK, "--", "s", 1.3)}
    ends = []
    depths = sorted({one.depth for one in outcome.depths})
    for who in dict.fromkeys(one.who for one in outcome.depths):
        color, line, mark, width = styles.get(who.split()[0], (GREY, "-.", "^", 1.3))
        points = []
        for depth in depths:
            rates = [one.rate for one in outcome.depths if (one.who, one.depth) == (who, depth)]
            if rates:
                points.append((depth, median(rates)))
        axes.plot(*zip(*points, strict=True), color=color, ls=line, marker=mark, lw=width)
        ends.append((points[-1][1], who, color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("reads in flight")
    axes.set_ylabel("samples/s")
    axes.grid(axis="y", color="#e6e6e6", lw=0.7)
    key = outcome.depths[0].dataset
    title = f"Random reads by depth, cold, one process: {outcome.datasets[key]['about']}"
    axes.set_title(title, loc="left", weight="bold")
    _label_ends(axes, ends, depths[-1])
    return True
