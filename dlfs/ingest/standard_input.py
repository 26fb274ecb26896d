"""Standard input as the source of an import, named ``-``: an archive or a list of files.

It is read once, from its start to its end, whether it is a pipe or a file. The thread that reads it
may wait for the writer of a pipe for any time; ``cancel`` ends that wait when the import has ended.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlfs.base.units import MIB
from dlfs.errors import UsageError
from dlfs.ingest.registry import STDIN
from dlfs.ingest.source import STDIN_SHOWN

if TYPE_CHECKING:
    from typing_extensions import Buffer

SKIP_BYTES = MIB
"""Most bytes that are read at once to be skipped."""


class StandardInput(io.RawIOBase):
    """Standard input as a file that can only be read forward.

    Raises:
        UsageError: it is a terminal, or closed.

    Threads: one reads; any may call ``cancel``. Owns: a pipe that wakes the reading thread.
    """

    def __init__(self) -> None:
        super().__init__()
        if sys.stdin is None or sys.stdin.isatty():
            what = "none" if sys.stdin is None else "a terminal"
            raise UsageError(f"import {STDIN_SHOWN}: expected a pipe or a file, got {what}")
        self._file = sys.stdin.fileno()
        self._position = 0
        self._wake, self._waker = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: ``seek`` goes forward."""
        return True

    def tell(self) -> int:
        """Return the number of bytes read so far."""
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Read some bytes, when there are any; return their number, 0 at the end.

        Raises:
            OSError: it cannot be read, or ``cancel`` was called (ECANCELED).
        """
        ready = [file for file, _ in self._poll.poll()]
        if self._wake in ready:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        count = os.readv(self._file, [buffer])
        self._position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Skip bytes up to an offset, or to the end if there are fewer.

        Raises:
            OSError: the offset lies behind (ESPIPE); or as ``readinto``.
        """
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target < self._position or whence == io.SEEK_END:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
        scratch = bytearray(min(SKIP_BYTES, target - self._position))
        while self._position < target:
            if not self.readinto(memoryview(scratch)[: target - self._position]):
                break
        return self._position

    def cancel(self) -> None:
        """End the wait of a thread that reads, and let further reads fail."""
        if not self.closed:
            os.write(self._waker, b"\0")

    def close(self) -> None:
        """Free the pipe; closing it again does nothing. Standard input stays open."""
        if not self.closed:
            super().close()
            os.close(self._wake)
            os.close(self._waker)


def open_standard_input(paths: Sequence[str]) -> StandardInput | None:
    """Return standard input if it is one of the paths of a source, else None.

    Raises:
        UsageError: it is there twice, is a terminal, or closed.
    """
    if paths.count(STDIN) > 1:
        raise UsageError(
            f"import {STDIN_SHOWN}: expected it once, got it {paths.count(STDIN)} times"
        )
    return StandardInput() if STDIN in paths else None
