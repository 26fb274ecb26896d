"""An ``ArrayFile`` in a process of its own, for libraries that damaged files can crash.

The process opens the file, says what is in it, and answers one request after the other over a
socket; rows come as their bytes. When it dies, or gives no answer in ``ANSWER_SECONDS``, that is an
error about the file, and no more. It ends when the socket is closed, and so with the process that
started it, however that ends.
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
"""For one window of rows: ADIOS2 waits for ever for what a file that was cut short lacks."""

_END_SECONDS = 10
"""What the process is given to end by itself."""


class ProcessFile(ArrayFile):
    """One file, open in another process; see ``ArrayFile``.

    Args:
        opener: the class that opens it there: ``module:class``.
        path: of the file.

    Raises:
        ValueError: it cannot be opened, or the process ended.
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
        """See ``ArrayFile``."""
        self._ask("read", array, first, len(out))
        self._receive()
        self._connection.recv_bytes_into(out.reshape(-1).view(np.uint8))

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """See ``ArrayFile``."""
        self._ask("read_values", array, first, count)
        values: Sequence[object] = self._receive()
        return values

    def close(self) -> None:
        """See ``ArrayFile``; again is fine."""
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
        """What the process answers; raises what it raised."""
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
    """Open a file and answer requests until the other side hangs up."""
    try:
        file = opener(path)
    except Exception as error:  # noqa: BLE001
        connection.send((_told(error), None))
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
        connection.send((_told(error), None))
    else:
        connection.send((None, None))
        connection.send_bytes(out.reshape(-1).view(np.uint8).data)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # adios2 would load it, for seconds
    opener, path, descriptor = sys.argv[1:]
    module, _, name = opener.partition(":")
    with Connection(int(descriptor)) as connection:
        serve(getattr(importlib.import_module(module), name), path, connection)


if __name__ == "__main__":
    _main()
