"""Mounts in the background: starts a server process and waits until the mount answers.

The server is a new interpreter (``python -m dlfs.mount.supervise.daemon``) rather than a fork,
because a process with threads, such as those of numpy, cannot be forked safely. The two processes
talk over pipes. The caller writes a ``MountRequest`` as a line of JSON to the server's standard
input. The server writes its status as a line of JSON to its standard output, after other messages,
which the caller adds to its error. The caller then answers ``KEEP``. A server whose input ends
without that answer unmounts and ends, so an interrupted or killed caller leaves neither a mount nor
a process behind. A server that replaces another one needs no answer: an interrupted caller leaves
one of the two.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from dlfs.base.json_records import parse_json, to_json, to_record
from dlfs.block import FileUri, parse_uri, split_members
from dlfs.errors import DlfsError, NativeError, restore_error
from dlfs.mount.mountpoint import unmount
from dlfs.mount.options import MountOptions

STATUS_PREFIX = "dlfs-server-status "
KEEP = "keep\n"
"""The caller's answer to a server that has mounted the volume."""
MOUNT_DAEMON = "dlfs.mount.supervise.daemon"
"""Module of the background server of a mount."""
REPLACE = "replace"
"""Argument of the background server that replaces another one."""

_Status = TypeVar("_Status")


@dataclass(frozen=True)
class Mounted:
    """A mount that answers.

    Attributes:
        mountpoint: absolute path of the mount point.
        pid: process ID of the server.
        log: the server's log: a file, or ``syslog``.
        transport: how the kernel sends requests to the server: ``io_uring`` or ``/dev/fuse``.
    """

    mountpoint: str
    pid: int
    log: str
    transport: str


@dataclass(frozen=True)
class MountRequest:
    """What a background server gets from its caller.

    Keepers send it to keepers of other versions, so fields are only added.

    Attributes:
        volume_uris: URIs of the volumes; several only if the mount is nested.
        directory: absolute path of the mount point.
        options: options of the mount.
        log: path of the log; None for syslog.
        fuse_fd: descriptor of ``/dev/fuse`` that the caller has mounted there, which the background
            server inherits; None if it is to mount.
    """

    volume_uris: list[str]
    directory: str
    options: MountOptions
    log: str | None
    fuse_fd: int | None = None


@dataclass(frozen=True)
class ReplaceRequest:
    """The mount, and the options to change, that a new background server gets from its caller."""

    directory: str
    cache_bytes: int | None
    busy_poll_us: int | None
    log: str | None


def mount_volume(
    volume_uri: str,
    directory: str | os.PathLike[str],
    options: MountOptions | None = None,
    *,
    more_volume_uris: Sequence[str] = (),
    log: str | os.PathLike[str] | None = None,
    fuse_fd: int | None = None,
) -> Mounted:
    """Mount a volume with a server that stays in the background.

    Args:
        volume_uri: URI or path of the volume, as for ``dlfs.open``; not ``mem:``, which another
            process cannot see.
        more_volume_uris: URIs of further volumes, if the options say that the mount is nested.
        directory: mount point: an empty directory, or the mount of a dead server.
        options: options of the mount.
        log: file to which the server appends its messages. The default is syslog; on a system
            without it, ``dlfs/mount.log`` in the user's state directory ($XDG_STATE_HOME or
            ~/.local/state).
        fuse_fd: descriptor of ``/dev/fuse`` that the caller has mounted on the directory, with the
            type ``fuse.dlfs``, and which nobody has read from. The caller may keep it open.

    Raises:
        UsageError: ``fuse_fd`` is no such descriptor, or the mount would have no keeper.
        DlfsError: as ``dlfs.mount.server.serve``.
        KeyboardInterrupt: the call was interrupted; the server unmounts and ends.

    Threads: any.
    """
    request = MountRequest(
        [absolute_uri(uri) for uri in (volume_uri, *more_volume_uris)],
        os.path.abspath(directory),
        options or MountOptions(),
        None if log is None else os.path.abspath(log),
        fuse_fd,
    )
    mounted: Mounted | None = None
    inherited = [] if fuse_fd is None else [fuse_fd]
    with started_server(MOUNT_DAEMON, request, inherited=inherited) as (requests, output):
        try:
            mounted = outcome(output, f"mount on {request.directory}", Mounted)
            keep(requests)  # unless it was unmounted already
            _close(requests)
        except BaseException:
            _close(requests)
            output.read()  # returns when the server has unmounted, or has got its answer
            if mounted is not None:
                with contextlib.suppress(DlfsError):
                    unmount(mounted.mountpoint, lazy=True)
            raise
    return mounted


def replace_server(
    directory: str | os.PathLike[str],
    *,
    cache_bytes: int | None = None,
    busy_poll_us: int | None = None,
    log: str | os.PathLike[str] | None = None,
) -> Mounted:
    """Replace the server and the keeper of a mount by new processes of this version of dlfs.

    The new server opens the volume while the present one answers. Programs that use the mount wait
    between the two. If the new server fails, the present one goes on.

    Args:
        directory: the mount point, of a mount in the background that has a keeper.
        cache_bytes: as of ``MountOptions``; None keeps it.
        busy_poll_us: busy polling, in microseconds; None keeps it.
        log: file to which the new server appends its messages; None keeps it.

    Raises:
        UsageError: DLFS is not mounted there, or another user has mounted it.
        NotFoundError: the mount has no keeper, or this dlfs has no native server.
        DlfsError: the new server failed: as ``dlfs.mount.server.serve``.

    Threads: any.
    """
    request = ReplaceRequest(
        os.path.abspath(directory),
        cache_bytes,
        busy_poll_us,
        None if log is None else os.path.abspath(log),
    )
    with started_server(MOUNT_DAEMON, request, REPLACE) as (requests, output):
        try:
            return outcome(output, f"replace the server of {request.directory}", Mounted)
        finally:
            _close(requests)


@contextlib.contextmanager
def started_server(
    module: str, request: object, *arguments: str, inherited: Sequence[int] = ()
) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start a background server and send it a request; yield its standard input and output.

    Args:
        module: its main module, which reads the request as a line of JSON.
        request: a record.
        arguments: arguments of the module.
        inherited: descriptors that it inherits.
    """
    package = str(Path(__file__).parents[3])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=inherited,
        # numpy's pool of threads is of no use there, and the keeper of a mount forks.
        env={**os.environ, "PYTHONPATH": search, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:  # closes the pipes and waits for the process, which forks the server
        with contextlib.suppress(BrokenPipeError):  # the server ended; its output has the reason
            process.stdin.write(to_json(request).decode() + "\n")
            process.stdin.flush()
        yield process.stdin, process.stdout


def keep(requests: IO[str]) -> None:
    """Answer a background server that it shall stay; do nothing if it has ended."""
    with contextlib.suppress(BrokenPipeError):
        requests.write(KEEP)
        requests.flush()


def _close(stream: IO[str]) -> None:
    """Close a pipe whose reader may be gone while the buffer still has text."""
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def _output(stream: IO[str]) -> str:
    """Return the server's output up to its status line, or up to its end."""
    lines = []
    for line in stream:
        lines.append(line)
        if STATUS_PREFIX in line:
            break
    return "".join(lines)


def absolute_uri(volume_uri: str) -> str:
    """Return a volume URI that does not depend on the working directory."""
    members = [parse_uri(member) for member in split_members(volume_uri)]
    return ",".join(
        str(FileUri(os.path.abspath(member.path))) if isinstance(member, FileUri) else str(member)
        for member in members
    )


def outcome(stream: IO[str], action: str, kind: type[_Status]) -> _Status:
    """Return the status that a background server reports, or raise the error that it reports."""
    output = _output(stream)
    messages, prefix, status = output.rpartition(STATUS_PREFIX)
    if not prefix:
        raise NativeError(f"{action}: the server ended early: {output.strip()}")
    found = parse_json(status)
    if "error" not in found:
        return to_record(found, kind)
    detail = f"; {messages.strip()}" if messages.strip() else ""
    raise restore_error(found["error"], found["message"] + detail, found["code"])
