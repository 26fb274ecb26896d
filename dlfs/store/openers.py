"""Which processes of this machine have a file or a disk open.

Readers of a volume take no lock, so ``format`` asks the kernel for them: /proc lists the open files
of every process that the caller may look at, which is every one for root. It does not see other
machines, the processes of other users, and those outside of the caller's container.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from dlfs.errors import LockedError
from dlfs.wording import join_words

_COMMAND_MAX = 60
_SHOWN_MAX = 3


def refuse_open(path: Path, action: str) -> None:
    """Refuse to overwrite a file or a disk that a process has open, this one included.

    Args:
        path: of the file or the disk.
        action: what for, in errors, with the name of the device.

    Raises:
        LockedError: a process has it open; the message says which.
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
    """The IDs of processes that have a file or disk open."""
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        # Suppressed: it has ended, or belongs to another user.
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
    """A process by its ID and command line, for people."""
    if pid == os.getpid():
        return "this process"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        return f"process {pid}"
    text = " ".join(filter(None, [Path(words[0]).name, *words[1:]]))
    text = "".join(c if c.isprintable() else "?" for c in text)
    return f"process {pid} ({shorten(text, _COMMAND_MAX, placeholder='...')})"
