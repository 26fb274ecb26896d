"""Draws where the time of an epoch goes, for ``dlfs stall --plot``.

The picture has two bars, the time of the consumer and of the reading threads, and below them the
rate over time. matplotlib draws it; the extra ``plot`` brings it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlfs.base.extras import load_package
from dlfs.base.units import MIB
from dlfs.base.wording import join_words, quote
from dlfs.errors import UsageError, write_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dlfs.diagnosis.consuming import Moment

SUFFIXES = (".png", ".svg", ".pdf")
"""Endings of the files that can be written."""
EPOCHS_MAX = 20
"""Most beginnings of epochs that are drawn."""
LABEL_SHARE_MIN = 0.08
"""Smallest share of a bar in which its percentage is written."""

# Okabe and Ito's colours, which the colour-blind can tell apart; grey is time that costs nothing.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CFCFCF")
"""Colours of the reading threads' activities, in their order."""
WAIT_COLOUR, WORK_COLOUR = "#D55E00", "#CFCFCF"


@dataclass(frozen=True)
class Picture:
    """The content of the picture.

    Attributes:
        title: the dataset, and what was read.
        verdict: the sentence that names the limit.
        consumer: share of each activity in the consumer's time; the first is waiting.
        reading: share of each activity in the reading threads' time, the last is waiting.
        history: the run's moments, in order.
    """

    title: str
    verdict: str
    consumer: Mapping[str, float]
    reading: Mapping[str, float]
    history: Sequence[Moment]


def check_plot(path: Path) -> None:
    """Check that a picture can be written, before time is spent on measuring.

    Raises:
        UsageError: the file's ending is no known one, its folder does not exist, or matplotlib is
            not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"plot {quote(str(path))}: expected a file that ends in {join_words(SUFFIXES, 'or')}"
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"plot {quote(str(path))}: expected a folder that exists")
    load_package("matplotlib", extra="plot", what="plot")


def draw(picture: Picture, path: Path) -> None:
    """Draw the picture and write it to a file.

    Raises:
        SpaceError: there is no space for the file.
        DeviceError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: dict[Any, Any] = {"font.size": 10, "svg.fonttype": "none", "text.parse_math": False}
    with matplotlib.rc_context(style):
        figure = Figure(
            figsize=(9, 5.6), layout=ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.97, 0.98))
        )
        figure.suptitle(f"{picture.title}\n{picture.verdict}", x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(3, 1, height_ratios=(0.7, 0.7, 2.4))
        _bar(axes[0], "consumer", picture.consumer, (WAIT_COLOUR, WORK_COLOUR))
        _bar(axes[1], "reading", picture.reading, COLOURS)
        _rate(axes[2], picture.history)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise write_error(
                f"write {path}: {error.strerror or error}", error.errno or 0
            ) from error


def _bar(axes: Axes, name: str, shares: Mapping[str, float], colours: Sequence[str]) -> None:
    """Draw shares of time as one bar from 0 to 100%, with a legend below it."""
    left = 0.0
    for (activity, share), colour in zip(shares.items(), colours, strict=False):
        axes.barh(0, share, left=left, color=colour, label=f"{activity} {share:.0%}")
        if share >= LABEL_SHARE_MIN:
            dark = colour in ("#0072B2", "#D55E00", "#009E73")
            style: dict[str, Any] = {"color": "white" if dark else "black", "ha": "center"}
            axes.text(left + share / 2, 0, f"{share:.0%}", va="center", **style)
        left += share
    axes.set_xlim(0, 1)
    axes.set_yticks([0], [name])
    axes.set_xticks([])
    axes.tick_params(left=False)
    for side in axes.spines.values():
        side.set_visible(False)
    if shares:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, 0.05),
            ncols=2,
            frameon=False,
            fontsize=9,
            handlelength=0.9,
            handletextpad=0.4,
            columnspacing=1.2,
            borderpad=0,
        )


def _rate(axes: Axes, history: Sequence[Moment]) -> None:
    """Draw the rate between the moments, and a line where each epoch begins."""
    times = [moment.seconds for moment in history]
    rates = [
        (now.sample_bytes - before.sample_bytes) / MIB / max(now.seconds - before.seconds, 1e-9)
        for before, now in pairwise(history)
    ]
    if rates:
        axes.stairs(rates, times, baseline=None, color=COLOURS[0], linewidth=1.5)
    starts = [now.seconds for before, now in pairwise(history) if now.epoch != before.epoch]
    show_epochs = 0 < len(starts) <= EPOCHS_MAX
    for start in starts if show_epochs else ():
        axes.axvline(start, color="#8C8C8C", linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, times[-1] if times and times[-1] > 0 else 1)
    axes.set_xlabel("seconds; dotted: the next epoch begins" if show_epochs else "seconds")
    axes.set_ylabel("MiB/s of samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
