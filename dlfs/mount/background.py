"""Mounting in the background: starts a server of its own and waits until the mount answers.

The server is a new interpreter (``python -m dlfs.mount.daemon``), not a fork: a process with
threads, and numpy has some, cannot be forked safely. Its standard input gives it its order, one
line of JSON. Its standard output says how it went, another one, behind what libfuse and fusermount3
print, so that their reasons reach the caller's error. The caller then answers ``KEEP``. A server
whose input ends without that answer unmounts and ends: so an interrupted or killed caller leaves
neither of them behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from dlfs import errors
from dlfs.block import FileUri, parse_uri, split_members
from dlfs.errors import DlfsError, NativeError
from dlfs.mount.server import MountOptions

STATUS_PREFIX = "dlfs-mount-status "
KEEP = "keep\n"
"""The caller's answer to a server that has mounted."""


@dataclass(frozen=True)
class Mounted:
    """A mount that answers.

    Attributes:
        mountpoint: its absolute path.
        pid: of its server.
        log: where the server writes what goes wrong.
    """

    mountpoint: str
    pid: int
    log: str


@dataclass(frozen=True)
class ServerOrder:
    """What the background server is told."""

    volume_uri: str
    directory: str
    options: MountOptions
    log: str | None

    def to_json(self) -> str:
        """As a line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerOrder:
        """From the text that ``to_json`` gave."""
        found = json.loads(text)
        options = MountOptions(**found.pop("options"))
        return cls(options=options, **found)


def mount_volume(
    volume_uri: str,
    directory: str | os.PathLike[str],
    options: MountOptions | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
) -> Mounted:
    """Mount a volume, with a server that stays in the background.

    Args:
        volume_uri: what ``dlfs.open`` takes; not memory, which another process cannot see.
        directory: where; empty, or the mount of a dead server.
        options: how.
        log: file that the server's messages are added to; by default syslog, where there is none
            ``dlfs/mount.log`` in the user's state directory ($XDG_STATE_HOME or ~/.local/state).

    Raises:
        DlfsError: as ``dlfs.mount.server.serve``.
        KeyboardInterrupt: it was interrupted; the server unmounts what it has mounted, and ends.

    Threads: any.
    """
    order = ServerOrder(
        absolute_uri(volume_uri),
        os.path.abspath(directory),
        options or MountOptions(),
        None if log is None else os.path.abspath(log),
    )
    package = str(Path(__file__).parents[2])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "dlfs.mount.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": search},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:  # closes the pipes and waits for the first process, whose fork is the server
        try:
            with contextlib.suppress(BrokenPipeError):  # what it printed says why it ended
                process.stdin.write(order.to_json() + "\n")
                process.stdin.flush()
            mounted = _outcome(_output(process.stdout), order)
            with contextlib.suppress(BrokenPipeError):  # unmounted already: it ended in order
                process.stdin.write(KEEP)
                process.stdin.flush()
        except BaseException:
            _close(process.stdin)
            process.stdout.read()  # until the server has unmounted, or a second interrupt
            raise
        _close(process.stdin)
    return mounted


def _close(stream: IO[str]) -> None:
    """Close a pipe, although what is left in its buffer may have no reader any more."""
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def _output(stream: IO[str]) -> str:
    """What a server prints, up to its status or its end."""
    lines = []
    for line in stream:
        lines.append(line)
        if STATUS_PREFIX in line:
            break
    return "".join(lines)


def absolute_uri(volume_uri: str) -> str:
    """The same volume, whatever the working directory."""
    members = [parse_uri(member) for member in split_members(volume_uri)]
    return ",".join(
        str(FileUri(os.path.abspath(member.path))) if isinstance(member, FileUri) else str(member)
        for member in members
    )


def _outcome(output: str, order: ServerOrder) -> Mounted:
    """What the server said, as a value or an error."""
    said, prefix, status = output.rpartition(STATUS_PREFIX)
    if not prefix:
        raise NativeError(f"mount on {order.directory}: the server ended early: {output.strip()}")
    found = json.loads(status)
    if "error" not in found:
        return Mounted(**found)
    kind = getattr(errors, found["error"], NativeError)
    assert issubclass(kind, DlfsError)
    detail = f"; {said.strip()}" if said.strip() else ""
    raise kind(found["message"] + detail)
