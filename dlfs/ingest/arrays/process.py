"""Reads an ``ArrayFile`` in a separate process, because damaged files crash some libraries.

``ProcessFile`` starts the process, which opens the file, sends its list of arrays, and answers one
request after the other over a socket; rows are sent as bytes. If the process dies, or does not
answer within ``ANSWER_SECONDS``, the import ends with an error about the file. The process ends
when the socket is closed, so it never outlives the process that started it.
"""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, Opener

ANSWER_SECONDS = 300
"""Longest wait for a window of rows, in seconds. ADIOS2 waits forever for data that was cut off."""

_END_SECONDS = 10
"""Time for the process to end by itself before it is killed, in seconds."""


class ProcessFile(ArrayFile):
    """One file that a separate process has open; see ``ArrayFile``.

    Args:
        opener: class that opens the file in that process, as ``module:class``.
        path: path of the file.

    Raises:
        ValueError: the file cannot be opened, or the process ended.
    """

    def __init__(self, opener: str, path: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, opener, path, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self.arrays: Mapping[str, ArrayInfo] = {}
        self.skipped: Mapping[str, int] = {}
        try:
            self.arrays, self.skipped = self._receive()
        except BaseException:
            self.close()
            raise

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        self._ask("read", array, first, len(out))
        self._receive()
        self._connection.recv_bytes_into(out.reshape(-1).view(np.uint8))

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        self._ask("read_values", array, first, count)
        values: Sequence[object] = self._receive()
        return values

    def close(self) -> None:
        """End the process; see ``ArrayFile``."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, *request: object) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> Any:
        """Return the answer of the process, or raise the error that it reports."""
        try:
            if not self._connection.poll(ANSWER_SECONDS):
                self._process.kill()
                raise ValueError(f"no answer from the process that read it in {ANSWER_SECONDS} s")
            error, answer = self._connection.recv()
        except (EOFError, OSError) as failure:
            raise self._ended() from failure
        if error is not None:
            raise ValueError(error)
        return answer

    def _ended(self) -> ValueError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return ValueError(f"the end of the process that read it, by {how}")


def serve(opener: Opener, path: str, connection: Connection) -> None:
    """Open a file and answer requests until the other process closes the socket."""
    try:
        file = opener(path)
    except Exception as error:  # noqa: BLE001
        connection.send((_error_text(error), None))
        return
    with closing(file):
        connection.send((None, (dict(file.arrays), dict(file.skipped))))
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            _answer(file, connection, *request)


def _answer(
    file: ArrayFile, connection: Connection, verb: str, array: ArrayInfo, first: int, count: int
) -> None:
    try:
        if verb == "read_values":
            connection.send((None, file.read_values(array, first, count)))
            return
        out = np.empty((count, *array.row_shape), array.dtype)
        file.read(array, first, out)
    except Exception as error:  # noqa: BLE001
        connection.send((_error_text(error), None))
    else:
        connection.send((None, None))
        connection.send_bytes(out.reshape(-1).view(np.uint8).data)


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # adios2 would load it, for seconds
    opener, path, descriptor = sys.argv[1:]
    module, _, name = opener.partition(":")
    with Connection(int(descriptor)) as connection:
        serve(getattr(importlib.import_module(module), name), path, connection)


if __name__ == "__main__":
    _main()
