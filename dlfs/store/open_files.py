"""Finds the processes of this machine that have a file or a disk open.

Readers of a volume take no lock, so ``format`` asks the kernel: /proc lists the open files of every
process that the caller may inspect; root may inspect all. Other machines, processes of other users
and processes outside of the caller's container are not seen.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from dlfs.base.wording import join_words
from dlfs.errors import LockedError

_COMMAND_MAX = 60
_SHOWN_MAX = 3


def refuse_open(path: Path, action: str) -> None:
    """Refuse to overwrite a file or a disk that a process has open, this process included.

    Args:
        path: path of the file or disk.
        action: action and device for the error message.

    Raises:
        LockedError: a process has it open; the message names it.
    """
    openers = list(_find_openers(path.stat()))
    if not openers:
        return
    shown = [_describe(pid) for pid in openers[:_SHOWN_MAX]]
    if len(openers) > _SHOWN_MAX:
        shown.append(f"{len(openers) - _SHOWN_MAX} more")
    verb = "has" if len(openers) == 1 else "have"
    users = f"{join_words(shown, 'and')} {verb} it open"
    raise LockedError(f"{action}: {users}; end that first, a mount with 'dlfs umount'")


def _find_openers(wanted: os.stat_result) -> Iterator[int]:
    """Yield the IDs of processes that have a file or disk open."""
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        # Suppressed: the process has ended, or belongs to another user.
        with contextlib.suppress(OSError), os.scandir(process / "fd") as entries:
            if any(_is_open(entry, wanted) for entry in entries):
                yield int(process.name)


def _is_open(entry: os.DirEntry[str], wanted: os.stat_result) -> bool:
    try:
        found = entry.stat()
    except OSError:  # it was closed
        return False
    if stat.S_ISBLK(wanted.st_mode):
        return stat.S_ISBLK(found.st_mode) and found.st_rdev == wanted.st_rdev
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _describe(pid: int) -> str:
    """Return the ID and command line of a process for a message."""
    if pid == os.getpid():
        return "this process"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        return f"process {pid}"
    text = " ".join(filter(None, [Path(words[0]).name, *words[1:]]))
    text = "".join(c if c.isprintable() else "?" for c in text)
    return f"process {pid} ({shorten(text, _COMMAND_MAX, placeholder='...')})"
