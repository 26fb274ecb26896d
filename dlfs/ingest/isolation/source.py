"""A source that a separate process reads.

``IsolatedSource`` starts the process, sends it the options and the paths, and then takes one block
of samples after the other. The data of blocks goes through two shared buffers, which the process
fills in turn, while the caller packs the other. Paths and attributes go through a socket.

If the process dies, or makes no progress for ``ANSWER_SECONDS``, the import ends with an error that
names the file, the part that was read, and the signal. The process is killed when the source is
closed, and ends by itself when the socket is closed, so it does not outlive its caller.

Memory: two shared buffers of the size of the largest block, and what ``confines`` allows.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Generator, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

import msgspec

from dlfs.base.arguments import Layout
from dlfs.base.closing import closed_on_error
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current
from dlfs.ingest.isolation.confines import read_note
from dlfs.ingest.isolation.messages import Block, End, Facts, Failure, decode
from dlfs.ingest.isolation.process import take_process
from dlfs.ingest.registry import FormatOptions
from dlfs.ingest.source import SampleBlock, Source

ANSWER_SECONDS = 300
"""Longest time without progress, in seconds. ADIOS2 waits forever for data that was cut off."""

_POLL_SECONDS = 1.0
_T = TypeVar("_T")


class IsolatedSource(Source):
    """The source that some options open, read in a separate process; see ``Source``.

    Args:
        options: options of the format.
        paths: paths of existing files.

    Raises:
        DlfsError: the source cannot be opened, or the process ended.
    """

    def __init__(self, options: FormatOptions, paths: Sequence[str]) -> None:
        self.name = paths[0]
        self._first: tuple[int, Cursor | None] = 0, None
        self.bad = current()
        self._reader = take_process()
        self._note, self._buffers = self._reader.note, self._reader.buffers
        self._connection, self._process = self._reader.connection, self._reader.process
        with closed_on_error(self):
            self._send(options, list(paths), self.bad.limit)
            self._receive(Facts).take(self)

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Have the process leave out the first samples; see ``Source.seek``."""
        self._first = count, cursor
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Take every block from the process; see ``Source.blocks``.

        Raises:
            DlfsError: the source raised it in the process, or the process ended.
        """
        self._send(layout, seed, self.buffer_bytes, *self._first)
        try:
            while isinstance(got := self._receive(Block, End), Block):
                got.new_bad.add_to(self.bad)
                yield self._block(got)
                self._send(got.buffer)
        except GeneratorExit:
            self._process.kill()  # nobody takes the blocks that it makes
            raise
        self._receive(Facts).take(self)

    def close(self) -> None:
        """End the process; closing the source again does nothing."""
        self._reader.end()

    def _block(self, got: Block) -> SampleBlock:
        """Return the block that a message describes."""
        try:
            data = self._buffers[got.buffer].array(got.size_bytes)
            offsets, lengths = got.offsets.array(), got.lengths.array()
            return SampleBlock(got.paths, data, offsets, lengths, got.columns(), got.position())
        except (ValueError, TypeError, IndexError, SyntaxError, RecursionError) as error:
            raise self._not_ours(error) from error

    def _send(self, *message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, *kinds: type[_T]) -> _T:
        """Return the next message of the process, or raise the error in it."""
        try:
            self._wait()
            message = decode(self._connection.recv_bytes())
        except msgspec.MsgspecError as error:
            raise self._not_ours(error) from error
        except (EOFError, OSError) as failure:
            if isinstance(failure, DlfsError):
                raise
            raise self._ended() from failure
        if isinstance(message, Failure):
            raise message.error()
        if not isinstance(message, kinds):
            raise self._not_ours(TypeError(type(message).__name__))
        return message

    def _not_ours(self, error: Exception) -> FormatError:
        """Return the error for a message that a sound process does not send."""
        self._process.kill()
        _, where = read_note(self._note.view())
        return FormatError(
            f"{where or f'import {self.name}'}: expected a readable file, got a process that reads "
            f"it and sends what it should not: {error}"
        )

    def _wait(self) -> None:
        """Wait for a message, as long as the process makes progress."""
        count, deadline = -1, 0.0
        stderr = self._reader.stderr
        while not self._connection.poll():
            others = [stderr.fileno()] if stderr.is_open else []
            wait([self._connection, *others], _POLL_SECONDS)
            stderr.take()
            found, where = read_note(self._note.view())
            if found != count:
                count, deadline = found, time.monotonic() + ANSWER_SECONDS
            elif time.monotonic() > deadline:
                self._process.kill()
                raise DeviceError(
                    f"{where or self.name}: no answer for {ANSWER_SECONDS} s from the process that "
                    "reads it: the file is damaged, or its device hangs",
                    errno.ETIMEDOUT,
                )

    def _ended(self) -> DlfsError:
        """Return the error for the end of the process."""
        self._process.kill()  # it has closed the socket, and may still be ending
        code = self._process.wait()
        _, where = read_note(self._note.view())
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        said = self._reader.stderr.last_line()
        return FormatError(
            f"{where or f'import {self.name}'}: expected a readable file, got the end of the "
            f"process that reads it, by {how}{f' ({said})' if said else ''}"
        )
