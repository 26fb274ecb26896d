"""The record that a writer leaves on a member, so that the next one can be told who holds the lock.

On files and disks the lock itself is the kernel's (``flock``) and ends with its process; the record
only names the holder. It is one 4096-byte block at 128 KiB: a line ``DLFS-LOCK 1``, a line of JSON
(holder, host, pid, command, since), zeros. A record without a lock is what a crash left behind and
means nothing; a malformed one is no record. An unlocked member has zeros there.

On shared namespaces the record itself is the lock: its JSON begins with a ``LeaseMark``, which the
holder changes again and again (``dlfs.block.lease``). The mark lies within the first 512 bytes, for
no device tears those; what follows is for people.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dlfs.units import KIB

RECORD_OFFSET_BYTES = 128 * KIB
"""Where the record lies on a member."""

RECORD_BYTES = 4096

EXPIRY_MS_MAX = 600_000
"""No holder may ask to be waited for longer."""

COUNTER_MAX = (1 << 63) - 1

_MAGIC = b"DLFS-LOCK 1\n"
_MARK = re.compile(
    _MAGIC + rb'\{"lease": "([0-9a-f]{32})", "counter": ([0-9]{1,19}), "expiry_ms": ([0-9]{1,6}), '
)
_TEXT_MAX = 256  # characters of one field: escaped, all fields together stay under RECORD_BYTES


def _clean(value: object) -> str:
    """A field as printable ASCII of bounded length: it comes from media, and goes to a terminal."""
    text = str(value)[:_TEXT_MAX]
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class LeaseMark:
    """What makes a record a lease: it is alive as long as this changes."""

    nonce: str
    """32 hexadecimal digits, drawn anew for every claim."""
    counter: int
    """Changed by every renewal."""
    expiry_ms: int
    """The lease is dead once others have seen it unchanged for so long."""

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Read a mark; None when there is none.

        Args:
            content: what lies at ``RECORD_OFFSET_BYTES``, at least the first 512 bytes.
        """
        found = _MARK.match(content)
        if found is None:
            return None
        counter, expiry_ms = int(found[2]), int(found[3])
        return cls(found[1].decode(), min(counter, COUNTER_MAX), min(expiry_ms, EXPIRY_MS_MAX))


@dataclass(frozen=True)
class HolderRecord:
    """Who holds a lock."""

    holder: str
    host: str
    pid: int
    command: str
    since: str
    """UTC, ISO 8601."""
    lease: LeaseMark | None = None

    def __str__(self) -> str:
        process = f"pid {self.pid} ({self.command})"
        return f"{self.holder} on host {self.host}, {process}, since {self.since}"

    @classmethod
    def of_this_process(cls, holder: str) -> Self:
        """The record of the calling process.

        Args:
            holder: what it is doing, for people.
        """
        # The program's name alone: its arguments may be nobody else's business.
        command = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(_clean(holder), _clean(socket.gethostname()), os.getpid(), _clean(command), now)

    def encode(self) -> bytes:
        """The record as it lies on media, ``RECORD_BYTES`` long."""
        mark: dict[str, str | int] = {}
        if self.lease is not None:
            mark = {
                "lease": self.lease.nonce,
                "counter": self.lease.counter,
                "expiry_ms": self.lease.expiry_ms,
            }
        text = json.dumps(
            {
                **mark,
                "holder": self.holder,
                "host": self.host,
                "pid": self.pid,
                "command": self.command,
                "since": self.since,
            }
        )
        return (_MAGIC + text.encode("ascii") + b"\n").ljust(RECORD_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Read a record; None when there is none, or nothing that could be one.

        Args:
            content: what lies at ``RECORD_OFFSET_BYTES``; hostile bytes are fine.
        """
        line, newline, _ = content[:RECORD_BYTES].removeprefix(_MAGIC).partition(b"\n")
        if not content.startswith(_MAGIC) or not newline:
            return None
        try:
            fields = json.loads(line.decode("ascii"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or not isinstance(fields.get("pid"), int):
            return None
        text = {
            name: _clean(fields.get(name, "?")) for name in ("holder", "host", "command", "since")
        }
        pid = min(max(fields["pid"], 0), 1 << 32)
        return cls(pid=pid, **text, lease=LeaseMark.decode(content))


def is_lock_record(content: bytes) -> bool:
    """Whether this is what a writer left, alive or not."""
    return HolderRecord.decode(content) is not None
