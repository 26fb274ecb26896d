"""Options whose source fails in a chosen way, after its first block."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dlfs.errors import DeviceError
from dlfs.ingest.isolation.confines import allow_memory, note_location
from dlfs.ingest.source import SampleBlock, Source

ROWS = 3
BLOCKS = 5


@dataclass(frozen=True)
class FailingOptions:
    """Options of a source that fails: ``crash``, ``hang``, ``error``, ``odd``, ``memory``."""

    how: str
    when: str = "blocks"

    def open(self, paths: Sequence[str]) -> Source:
        return FailingSource(paths, self)


class FailingSource(Source):
    """A source of a few blocks that fails before the second, or when it is opened."""

    def __init__(self, paths: Sequence[str], options: FailingOptions) -> None:
        self.name, self._how = paths[0], options.how
        self.sample_count = ROWS * BLOCKS
        self.skipped = {"thing": 0}
        note_location(f"import {self.name}: the header")
        if options.when == "open":
            self._fail()

    def blocks(self, *, layout: str, seed: int) -> Generator[SampleBlock, None, None]:
        for number in range(BLOCKS):
            note_location(f"import {self.name}: x, rows {number * ROWS}..{number * ROWS + 2}")
            if number == 1:
                self._fail()
            self.skipped = {"thing": number}
            yield block(number, f"{layout}{seed}")

    def _fail(self) -> None:
        if self._how == "crash":
            ctypes.string_at(0)
        elif self._how == "hang":
            time.sleep(3600)
        elif self._how == "error":
            error = DeviceError(f"import {self.name}: it failed", 5)
            error.add_note("a note")
            raise error
        elif self._how == "odd":
            raise KeyError("a library's own")
        elif self._how in ("exit", "chatty"):
            for number in range(200 if self._how == "chatty" else 1):
                os.write(2, b"%d" % number * 10_000 + b"\n")
            os.write(2, b"library: last words\n")
            os._exit(7)
        elif self._how == "pickle":
            for peer in gc.get_objects():
                if isinstance(peer, Connection):
                    peer.send(("ok", {}))
            time.sleep(3600)
        elif self._how == "memory":
            np.empty(5 << 30, np.uint8)
        elif self._how == "allowed":
            allow_memory(3 << 30)
            np.empty(3 << 30, np.uint8)


def block(number: int, text: str) -> SampleBlock:
    """Return a block whose samples do not begin at the start of its data, the second one empty."""
    size = 1000 * (BLOCKS - number)
    data = np.random.default_rng(number).integers(0, 256, 3 * size, np.uint8)
    attributes: dict[str, Any] = {
        "label": np.arange(ROWS, dtype=np.int16) + number,
        "text": np.array([text] * ROWS, object),
    }
    return SampleBlock(
        [b"%d/%d" % (number, row) for row in range(ROWS)],
        data,
        np.array([size, 0, 2 * size], np.int64),
        np.array([size, 0, size], np.int64),
        attributes,
    )
