"""The messages of the process that reads a source: pickles of plain values and numpy arrays.

A message is a tuple that begins with ``facts``, ``block`` or ``error``. The libraries in that
process read strangers' files, so the other process trusts no message: ``load`` refuses a pickle
that names anything but what makes arrays, and so runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import dlfs.errors
from dlfs.errors import DeviceError, DlfsError, FormatError
from dlfs.ingest.source import Source

FACTS = (
    "name", "sample_count", "sample_bytes", "gives_shuffled", "skipped", "left_out",
    "empty_directories", "buffer_bytes",
)  # fmt: skip
"""Attributes of a source that are sent when it was opened, and when all of it was read."""

_ARRAY_MAKERS = frozenset(["_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype"])
"""Functions and types that pickles of numpy's arrays and scalars name."""


class _Loader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in _ARRAY_MAKERS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"expected plain values and arrays, got {module}.{name}")


def load(data: bytes) -> Any:
    """Return the values in a message.

    Raises:
        Exception: the bytes are no pickle, or one of other values; pickle raises what it likes.
    """
    return _Loader(io.BytesIO(data)).load()


def facts_of(source: Source) -> tuple[str, dict[str, Any]]:
    """Return the message of the attributes of a source."""
    facts = {name: getattr(source, name) for name in FACTS}
    return "facts", facts | {"skipped": dict(source.skipped)}


def failure_of(error: Exception, where: str) -> tuple[Any, ...]:
    """Return the message of an error; any that is not ours is an error of the file."""
    if not isinstance(error, DlfsError):
        kind = type(error).__name__
        text = f"{where}: expected a readable file, got {kind}: {' '.join(str(error).split())}"
        error = FormatError(text)
    code = (error.errno,) if isinstance(error, DeviceError) else ()
    return "error", type(error).__name__, (str(error), *code), getattr(error, "__notes__", [])


def error_of(kind: str, arguments: tuple[Any, ...], notes: list[str]) -> DlfsError:
    """Return the error of the parts of a message: its class, arguments and notes."""
    found: Any = getattr(dlfs.errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, DlfsError)):
        found, arguments = FormatError, arguments[:1]
    error: DlfsError = found(*arguments)
    for note in notes:
        error.add_note(note)
    return error
