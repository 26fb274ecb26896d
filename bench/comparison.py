"""Comparisons: the ratio of one contender to another in each round, against a floor."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

COLUMNS = ("at least, times", "measured, times", "from - to", "")
"""Heads of the columns that `Comparison.cells` fills."""

MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The ratios of two contenders.

    Attributes:
        ratios: one ratio a round, each of two runs of that round; empty if one could not run.
        at_least: floor that the median must reach; 0: no floor.
    """

    ratios: tuple[float, ...]
    at_least: float = 0.0

    @property
    def measured(self) -> float:
        """Median of the ratios; there must be one."""
        return median(self.ratios)

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED`` or ``not measured``; empty without a floor."""
        if not self.at_least:
            return ""
        if not self.ratios:
            return NOT_MEASURED
        return MET if self.measured >= self.at_least else MISSED

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table's row, for `COLUMNS`."""
        floor = f"{self.at_least:.3g}" if self.at_least else ""
        if not self.ratios:
            return floor, "-", "", self.verdict
        low, high = min(self.ratios), max(self.ratios)
        return floor, f"{self.measured:.2f}", f"{low:.2f} - {high:.2f}", self.verdict
