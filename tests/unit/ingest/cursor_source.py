"""A source that goes on at its last cursor, and notes which blocks it reads."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlfs.format.journal import Cursor
from dlfs.ingest.source import SampleBlock, Source

BLOCKS = 40
ROWS = 5
LENGTH = 3000
EVERY = 3
"""Blocks from one cursor to the next."""


@dataclass(frozen=True)
class CursorOptions:
    """Options of the source, which an isolated process opens too."""

    too_long: bool = False

    def open(self, paths: Sequence[str]) -> Source:
        return CursorSource(paths[0], too_long=self.too_long)


class CursorSource(Source):
    """A source of blocks of some samples, of which each leaves out one record.

    Args:
        path: file to which a line is added for each block that is read.
        too_long: True for cursors that have no room in a journal.
    """

    def __init__(self, path: str, *, too_long: bool = False) -> None:
        self.name = self.fingerprint = path
        self._first = 0
        self._text = "x" * 5000 if too_long else "ä"

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        if cursor is None:
            return 0
        assert cursor.count <= count
        self._first = cursor.value["block"]
        self.skipped = {"left out": cursor.value["skipped"]}
        return cursor.count

    def blocks(self, *, layout: str, seed: int) -> Generator[SampleBlock, None, None]:
        lengths = np.full(ROWS, LENGTH)
        for number in range(self._first, BLOCKS):
            with Path(self.name).open("a") as file:
                file.write(f"{number}\n")
            self.skipped = {"left out": self.skipped.get("left out", 0) + 1}
            yield SampleBlock(
                [b"%d/%d" % (number, row) for row in range(ROWS)],
                np.full(ROWS * LENGTH, number, np.uint8),
                np.arange(ROWS) * LENGTH,
                lengths,
                {"number": np.arange(ROWS) + ROWS * number},
                {"block": number + 1, "text": self._text, "skipped": self.skipped["left out"]}
                if number % EVERY == 0
                else None,
            )
