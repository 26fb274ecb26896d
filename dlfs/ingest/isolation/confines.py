"""What the process that reads a source may take, and the note of what it reads at a time.

Code that runs the libraries of a format calls ``note_location`` and ``allow_memory``. In a process
that is not isolated, both do nothing.
"""

from __future__ import annotations

import os
import resource
import struct
from typing import Final

from dlfs.base.units import GIB

NOTE_BYTES: Final = 4096
"""Size of the memory that both processes share for the note, in bytes."""

MEMORY_BYTES: Final = 2 * GIB
"""Private memory that the process may have, before ``allow_memory``, in bytes."""

_HEAD = struct.Struct("<QI")
"""Number of notes so far, which shows progress, and the length of the last one in bytes."""

_note: memoryview | None = None
_note_count = 0


def confine(note: memoryview) -> None:
    """Limit the memory of this process, and keep its notes in a shared memory.

    The limit counts private memory that can be written (RLIMIT_DATA), touched or not, and not the
    blocks of samples, which are shared.

    Args:
        note: memory of ``NOTE_BYTES`` that ``read_note`` reads in the other process.
    """
    global _note
    _note = note
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bound = machine_bytes if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_DATA, (min(MEMORY_BYTES, bound), bound))


def allow_memory(size_bytes: int) -> None:
    """Allow the process at least some memory more than ``MEMORY_BYTES``, up to the machine's.

    Args:
        size_bytes: memory that the file is known to need, in bytes.
    """
    if _note is not None:
        allowed, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = max(allowed, min(MEMORY_BYTES + size_bytes, most))
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def note_location(where: str) -> None:
    """Note what is read from now on: the file, and the part of it."""
    if _note is not None:
        global _note_count
        _note_count += 1
        text = where.encode("utf-8", "surrogateescape")[: NOTE_BYTES - _HEAD.size]
        _note[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(_note, 0, _note_count, len(text))


def read_note(note: memoryview) -> tuple[int, str]:
    """Return the number of notes so far, and the last one."""
    count, size = _HEAD.unpack_from(note)
    text = bytes(note[_HEAD.size : _HEAD.size + min(size, NOTE_BYTES - _HEAD.size)])
    return count, text.decode("utf-8", "surrogateescape")
