"""Lays out several tables so that they fit the height of a terminal.

``Screen`` shows all rows if there is room. On a lower terminal it leaves out the blank lines
between tables and then the least important rows, so that a whole table may be missing. Its last
line counts the missing rows. No row is cut in the middle.

Threads: one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from dlfs.base.units import format_count
from dlfs.cli.output import Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


@dataclass(frozen=True)
class Section:
    """A table of a screen.

    Attributes:
        nouns: singular and plural name of a row, such as ``("dataset", "datasets")``.
        table: the table.
        weights: importance of each row; a low terminal shows the rows of the largest weights.
        title: line above the table; no line if it is empty.
        rank: rank in the order in which kinds of tables are given room, 0 first.
    """

    nouns: tuple[str, str]
    table: Table
    weights: Sequence[float]
    title: str = ""
    rank: int = 0


@dataclass
class _Block:
    """The lines of one section, and the numbers of the rows that are shown."""

    section: Section
    heading: list[Text]
    rows: list[list[Text]]
    shown: set[int] = field(default_factory=set)

    @property
    def height(self) -> int:
        """Number of lines of the whole section."""
        return len(self.heading) + sum(map(len, self.rows))

    def take(self, room: int, *, count_max: int) -> int:
        """Show more rows, the most important first; return the lines of room that are left."""
        order = sorted(range(len(self.rows)), key=self.section.weights.__getitem__, reverse=True)
        for number in [row for row in order if row not in self.shown][:count_max]:
            needed = len(self.rows[number]) + (0 if self.shown else len(self.heading))
            if needed > room:
                break
            self.shown.add(number)
            room -= needed
        return room

    def lines(self) -> Iterator[Text]:
        """Yield the lines that are shown; rows keep their own order."""
        if self.shown:
            yield from self.heading
        for number in sorted(self.shown):
            yield from self.rows[number]


class Screen:
    """Tables below a first line; a renderable of rich.

    Args:
        head: first line, which is folded if it is too long.
        sections: the tables, in the order in which they are shown.
        rows: height of the terminal, in lines; None shows everything.
    """

    def __init__(self, head: str, sections: Sequence[Section], *, rows: int | None) -> None:
        self._head = Text(head)
        self._sections = sections
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines to rich."""
        width = options.max_width
        head = list(self._head.wrap(console, width, overflow="fold"))
        blocks = [self._block(section, console, width) for section in self._sections]
        whole = len(head) + sum(1 + block.height for block in blocks)
        if self._rows is None or whole <= self._rows:
            yield from head
            for block in blocks:
                yield Text()
                yield from block.heading
                for row in block.rows:
                    yield from row
            return
        foot = self._fit(blocks, self._rows - len(head), console, width)
        yield from head
        for block in blocks:
            yield from block.lines()
        yield from foot

    def _block(self, section: Section, console: Console, width: int) -> _Block:
        heading, rows = section.table.lay_out(console, width)
        if section.title:
            heading = [*Text(section.title).wrap(console, width, overflow="fold"), *heading]
        return _Block(section, heading, rows)

    def _fit(self, blocks: list[_Block], room: int, console: Console, width: int) -> list[Text]:
        """Choose the rows to show; return the lines that count the others.

        Room for these lines is set aside first: they are longest when no row is shown.
        """
        room -= len(self._missing(blocks, console, width))
        by_rank = sorted(blocks, key=lambda block: block.section.rank)
        first = {block.section.rank: block for block in reversed(by_rank)}
        for rank in sorted(first):  # a row of each kind before two of any
            room = first[rank].take(room, count_max=1)
        for block in by_rank:
            room = block.take(room, count_max=len(block.rows))
        return self._missing(blocks, console, width)

    def _missing(self, blocks: list[_Block], console: Console, width: int) -> list[Text]:
        counts: Counter[tuple[str, str]] = Counter()
        for block in blocks:
            counts[block.section.nouns] += len(block.rows) - len(block.shown)
        words = ", ".join(format_count(count, *nouns) for nouns, count in counts.items() if count)
        line = Text(f"no room for {words}" if words else "", "dim")
        return list(line.wrap(console, width, overflow="fold"))
