"""The lock record: a block of a member that names its writer, for the error message of the next.

On files and disks the lock itself is the kernel's (``flock``) and ends with its process; the record
only names the holder. The record is one 4096-byte block at 128 KiB: a line ``DLFS-LOCK 1``, a line
of JSON (holder, host, pid, command, since), and zeros. An unlocked member has zeros there. A record
without a kernel lock was left by a crash and has no effect. A malformed record counts as none.

On shared namespaces the record itself is the lock. Its JSON begins with a ``LeaseMark``, which the
holder changes every few seconds (``dlfs.block.lease``). The mark lies within the first 512 bytes,
which every device writes atomically. The fields after it are for error messages only.

The JSON is read by hand rather than by ``base.json_records``: a record of another release, with
missing or unknown fields, must still name its holder.
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

from dlfs.base.units import KIB

RECORD_OFFSET_BYTES = 128 * KIB
"""Offset of the record on a member, in bytes."""

RECORD_BYTES = 4096

EXPIRY_MS_MAX = 600_000
"""Largest expiry that a record may demand, in milliseconds."""

COUNTER_MAX = (1 << 63) - 1

_MAGIC = b"DLFS-LOCK 1\n"
_MARK = re.compile(
    _MAGIC + rb'\{"lease": "([0-9a-f]{32})", "counter": ([0-9]{1,19}), "expiry_ms": ([0-9]{1,6}), '
)
_TEXT_MAX = 256  # characters of one field: escaped, all fields together stay under RECORD_BYTES


def _clean(value: object) -> str:
    """Return a field as printable ASCII of bounded length: it comes from media and is printed."""
    text = str(value)[:_TEXT_MAX]
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class LeaseMark:
    """The part of a record that makes it a lease: the holder is alive as long as it changes."""

    nonce: str
    """32 hexadecimal digits, random for every claim."""
    counter: int
    """Number of renewals since the claim."""
    expiry_ms: int
    """Time for which the mark must stay unchanged until the holder counts as dead."""

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Decode a mark; None if there is none.

        Args:
            content: bytes at ``RECORD_OFFSET_BYTES``, at least the first 512.
        """
        found = _MARK.match(content)
        if found is None:
            return None
        counter, expiry_ms = int(found[2]), int(found[3])
        return cls(found[1].decode(), min(counter, COUNTER_MAX), min(expiry_ms, EXPIRY_MS_MAX))


@dataclass(frozen=True)
class HolderRecord:
    """The holder of a lock."""

    holder: str
    host: str
    pid: int
    command: str
    since: str
    """Time when the lock was taken, UTC, ISO 8601."""
    lease: LeaseMark | None = None

    def __str__(self) -> str:
        process = f"pid {self.pid} ({self.command})"
        return f"{self.holder} on host {self.host}, {process}, since {self.since}"

    @classmethod
    def of_this_process(cls, holder: str) -> Self:
        """Create the record of the calling process.

        Args:
            holder: what the process is doing, for error messages.
        """
        # The program's name only: its arguments may be confidential.
        command = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(_clean(holder), _clean(socket.gethostname()), os.getpid(), _clean(command), now)

    def encode(self) -> bytes:
        """Encode the record for the device, ``RECORD_BYTES`` long."""
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
        """Decode a record; None if there is none or it is malformed.

        Args:
            content: bytes at ``RECORD_OFFSET_BYTES``. Any bytes are safe.
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
    """Return True if the bytes are the record of a writer, alive or dead."""
    return HolderRecord.decode(content) is not None
