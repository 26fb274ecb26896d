"""Prepares the standard streams of the process, whatever they are when it starts.

- A closed descriptor 0, 1 or 2 is opened before anything else, so that no device gets its number:
  what a library prints would go to the device. Writing to a closed stdout fails, as it does for
  other commands; a closed stderr swallows what it gets.
- A report on stderr that cannot be written is dropped: it must not end an operation.
- An error of stdout is an ``OutputError``, which tells it from errors of devices.
- A process whose locale has another encoding than UTF-8 starts itself again in Python's UTF-8
  mode, since paths on a volume are bytes, and texts are UTF-8.

Imports only modules that are loaded when Python starts: see ``dlfs.cli``.
"""

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STDIN, STDOUT, STDERR = 0, 1, 2
UTF8_MODE = "PYTHONUTF8"
"""Environment variable that makes Python use UTF-8, also in the processes that this one starts."""


class OutputError(OSError):
    """Stdout cannot be written: it is closed, full, or its reader has gone."""


class ReaderGoneError(OutputError, BrokenPipeError):
    """Stdout is a pipe whose reader has closed it."""


class _Output(io.BufferedWriter):
    """Descriptor 1; its errors are OutputErrors.

    A buffer and no raw file: an interrupt on the return of a raw write would repeat the bytes.
    """

    def write(self, data: "Any") -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _output_error(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _output_error(error) from None


class _Reports(io.BufferedWriter):
    """Descriptor 2; drops what it cannot write."""

    def write(self, data: "Any") -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)

    def flush(self) -> None:
        try:  # noqa: SIM105  (contextlib is slow to load)
            super().flush()
        except OSError:
            pass


def _output_error(error: OSError) -> OutputError:
    kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputError
    return kind(error.errno, error.strerror)


def use_utf8() -> None:
    """Start the process again in UTF-8 mode, unless its file names are UTF-8 already."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(UTF8_MODE) == "1":
        return
    os.environ[UTF8_MODE] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_streams() -> None:
    """Make stdout and stderr streams that can be written, or whose errors are known."""
    _open_closed(STDIN, os.O_WRONLY)
    _open_closed(STDOUT, os.O_RDONLY)
    _open_closed(STDERR, os.O_WRONLY)
    unbuffered = isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase)
    # PYTHONUNBUFFERED: a raw write to a pipe may take only a part, and Python drops the rest.
    sys.stdout = _text(_Output(io.FileIO(STDOUT, "w", closefd=False)), lines=unbuffered)
    sys.stderr = _text(_Reports(io.FileIO(STDERR, "w", closefd=False)), lines=True)


def _text(buffer: io.BufferedWriter, *, lines: bool) -> io.TextIOWrapper:
    """Return a stream of UTF-8; bytes that are not UTF-8 pass unchanged."""
    return io.TextIOWrapper(
        buffer,
        encoding="utf-8",
        errors="surrogateescape",
        line_buffering=lines or buffer.isatty(),
    )


def _open_closed(descriptor: int, flags: int) -> None:
    """Open /dev/null as a descriptor if that is closed."""
    try:
        os.fstat(descriptor)
    except OSError:  # the lowest free number: the descriptors below are open by now
        os.open(os.devnull, flags)


def discard_stdout() -> None:
    """Let the interpreter, at its end, flush stdout without an error."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, STDOUT)
    os.close(devnull)
