"""One mount's server: opens the volume, mounts, answers until it is unmounted or told to end.

Two servers know the same rules, SEMANTICS.md: the native loop (``native_mount``), for what is
sealed, at speed, and pyfuse3 (``pyfuse3_mount``), the reference, which alone serves ``incoming``.
Unless told otherwise the native one is taken where it was built and can do what is asked for.

SIGTERM and SIGINT unmount and end the server; so does an unmount from outside.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from dlfs._native.fuse import fuse_library, is_built
from dlfs.arguments import check_choice
from dlfs.errors import DlfsError, NativeError, NotFoundError, UsageError
from dlfs.extras import install_command
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.permissions import FILE_MODE_DEFAULT, Access
from dlfs.mount.view import ShownVolume
from dlfs.store.members import same_kind
from dlfs.units import MIB
from dlfs.volume import Volume
from dlfs.volume import open as open_volume

FILE_SYSTEM_NAME = "dlfs"
HELD_BYTES = 256 * MIB
READER_BYTES = 256 * MIB
"""Sample memory of each open dataset: one that fits is read in whole chunks, and only once."""

BUSY_POLL_US = 200
"""Longer than most disks take for a small read, and a program between two files."""
BUSY_POLL_US_MAX = 10_000

SERVERS = ("auto", "native", "pyfuse3")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MountOptions:
    """How a volume is mounted.

    Attributes:
        uid: owner of every file; this process's by default.
        gid: group of every file; this process's by default.
        file_mode: permission bits of files, none to write; directories get x where these have r.
        allow_other: let other users in; /etc/fuse.conf must allow it unless root mounts.
        held_bytes: memory for samples of open files.
        incoming: the spool of what programs write below ``incoming``; None for a mount that is
            read-only.
        fuse: which server: ``native``, ``pyfuse3``, or ``auto``: the native one where it can.
        busy_poll_us: with the native server, as long as one program asks: for how long a thread
            stays awake for a device's answer, or the next request; 0: it sleeps, as it does in any
            case after a time in which that came to nothing, and where several programs ask.
        handles: have the kernel open every file with the native server, as an old kernel does.
    """

    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    file_mode: int = FILE_MODE_DEFAULT
    allow_other: bool = False
    held_bytes: int = HELD_BYTES
    incoming: str | None = None
    fuse: str = "auto"
    busy_poll_us: int = BUSY_POLL_US
    handles: bool = False

    def __post_init__(self) -> None:
        if self.file_mode & ~0o555:
            raise UsageError(
                f"mount: expected a mode of read and execute bits (at most 555), "
                f"got {self.file_mode:o}"
            )
        if self.uid < 0 or self.gid < 0 or self.held_bytes < 0:
            raise UsageError(
                f"mount: expected uid, gid and memory of at least 0, "
                f"got {self.uid}, {self.gid} and {self.held_bytes}"
            )
        if not 0 <= self.busy_poll_us <= BUSY_POLL_US_MAX:
            raise UsageError(
                f"mount: expected busy polling of 0 to {BUSY_POLL_US_MAX} us, "
                f"got {self.busy_poll_us}"
            )
        check_choice(self.fuse, SERVERS, option="fuse", action="mount")
        if self.fuse == "native" and self.incoming is not None:
            raise UsageError(
                "mount: the native server is for what is sealed; with --incoming, leave --fuse out"
            )


def choose_server(options: MountOptions) -> str:
    """``native`` or ``pyfuse3``: which server these options ask for, on this machine.

    Raises:
        NativeError: the native one is demanded, and cannot be loaded.
        NotFoundError: none of those that would do is installed.
    """
    if options.fuse == "native":
        fuse_library()
        return "native"
    if options.fuse == "auto" and options.incoming is None and is_built():
        try:
            fuse_library()
        except NativeError as error:
            _log.warning("%s; mounting with pyfuse3", error)
        else:
            return "native"
    try:
        import pyfuse3  # noqa: F401
    except ImportError as error:
        raise NotFoundError(
            f"mount: pyfuse3 cannot be loaded ({error}); {install_command('pyfuse3')} (builds "
            "against libfuse3: apt install libfuse3-dev fuse3 pkg-config python3-dev gcc)"
        ) from error
    return "pyfuse3"


def serve(
    volume_uri: str,
    directory: str | os.PathLike[str],
    options: MountOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Mount a volume and serve it until it is unmounted.

    Args:
        volume_uri: what ``dlfs.open`` takes.
        directory: where; empty, or the mount of a dead server.
        options: how.
        on_ready: called with the absolute path when the mount answers.

    Raises:
        NotFoundError: no such directory, volume or member.
        UsageError: the directory cannot be mounted on.
        ExistsError: DLFS is mounted there already.
        LockedError: another server uses the spool.
        NativeError: there is no native server, and it was demanded.
        DeviceError: the system refused the mount; a device failed.
        FormatError: what is on the members is no volume.

    Threads: the main thread, for its signals; one mount in a process at a time.
    """
    path = mountpoints.prepare(directory)
    with open_volume(volume_uri, memory_bytes=READER_BYTES) as volume:
        try:
            trio.run(_serve, volume, path, options, on_ready)
        except ExceptionGroup as group:  # as a nursery wraps what its tasks raise
            raise first_error(group) from group


async def _serve(
    volume: Volume, path: str, options: MountOptions, on_ready: Callable[[str], None]
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_on_signal, nursery.cancel_scope)
        await serve_view(volume, volume, path, options, on_ready)
        nursery.cancel_scope.cancel()


async def serve_view(
    volume: Volume,
    shown: ShownVolume,
    path: str,
    options: MountOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Mount a volume, and answer until it is unmounted; cancelled, unmount it.

    Args:
        volume: borrowed.
        shown: the same, or what shares its datasets with others.
        path: that ``mountpoint.prepare`` gave.
        options: how.
        on_ready: called with the path when the mount answers.

    Raises:
        NativeError: there is no native server, and it was demanded.
        LockedError: another server uses the spool.
        DeviceError: the system refused the mount.
    """
    if options.incoming is not None:
        await trio.to_thread.run_sync(_check_sealing, volume)
    access = Access(options.uid, options.gid, options.file_mode)
    words = ["default_permissions", f"fsname={FILE_SYSTEM_NAME}", "subtype=dlfs"]
    words += ["ro"] if options.incoming is None else []
    words += ["allow_other"] if options.allow_other else []
    if choose_server(options) == "native":
        from dlfs.mount.native_server import NativeMount

        mount = NativeMount(
            volume,
            shown,
            path,
            access,
            held_bytes=options.held_bytes,
            words=words,
            busy_poll_us=options.busy_poll_us,
            handles=options.handles,
        )
        await mount.serve(on_ready)
        return
    from dlfs.mount.pyfuse3_server import serve_pyfuse3  # pyfuse3 is needed only here

    await serve_pyfuse3(
        volume,
        shown,
        path,
        access,
        on_ready,
        held_bytes=options.held_bytes,
        words=words,
        incoming=options.incoming,
    )


def _check_sealing(volume: Volume) -> None:
    """Refuse to take what could not be sealed.

    Raises:
        DlfsError: a writer cannot open the volume.
    """
    try:
        volume.check_writable()
    except DlfsError as error:
        raise same_kind(
            error, f"mount with --incoming, whose datasets are sealed into the volume: {error}"
        ) from error


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """One of the errors in a group."""
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, ExceptionGroup) else found


async def _end_on_signal(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            _log.info("%s: unmounting", signal.Signals(number).name)
            scope.cancel()
            return
