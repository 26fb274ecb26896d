"""One mount's server: opens the volume, mounts, answers until it is unmounted or told to end.

One thread runs the FUSE loop (pyfuse3 on trio); samples and the volume's metadata are read in
others. SIGTERM and SIGINT unmount and end it; so does an unmount from outside. The mount goes away
at once even when files on it are open: programs that still use them get ENOTCONN.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pyfuse3
import trio

from dlfs.errors import DeviceError, UsageError
from dlfs.service import mountpoint as mountpoints
from dlfs.service.held import HeldSamples, ReadThreads
from dlfs.service.incoming import open_incoming
from dlfs.service.operations import FILE_MODE_DEFAULT, Access, MountOperations
from dlfs.service.view import ShownVolume, VolumeView
from dlfs.service.writable import WritableOperations
from dlfs.units import MIB
from dlfs.volume import Volume
from dlfs.volume import open as open_volume

FILE_SYSTEM_NAME = "dlfs"
HELD_BYTES = 256 * MIB
READER_BYTES = 256 * MIB
"""Sample memory of each open dataset: one that fits is read in whole chunks, and only once."""

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
    """

    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    file_mode: int = FILE_MODE_DEFAULT
    allow_other: bool = False
    held_bytes: int = HELD_BYTES
    incoming: str | None = None

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
        DeviceError: the system refused the mount; a device failed.
        FormatError: what is on the members is no volume.

    Threads: the main thread, for its signals; one mount in a process at a time.
    """
    path = mountpoints.prepare(directory)
    with open_volume(volume_uri, memory_bytes=READER_BYTES) as volume:
        trio.run(serve_view, volume, volume, path, options, on_ready, [_end_on_signal])


async def serve_view(
    volume: Volume,
    shown: ShownVolume,
    path: str,
    options: MountOptions,
    on_ready: Callable[[str], None],
    beside: Sequence[Callable[[], Awaitable[None]]] = (),
) -> None:
    """Mount a volume, and answer until it is unmounted; cancelled, unmount it.

    Args:
        volume: borrowed.
        shown: the same, or what shares its datasets with others.
        path: that ``mountpoint.prepare`` gave.
        options: how.
        on_ready: called with the path when the mount answers.
        beside: tasks to run meanwhile.

    Raises:
        DeviceError: the system refused the mount.
    """
    view = VolumeView(shown)
    threads = ReadThreads(trio.lowlevel.current_trio_token())
    try:
        held = HeldSamples(threads, budget_bytes=options.held_bytes)
        access = Access(options.uid, options.gid, options.file_mode)
        with ExitStack() as stack:
            if options.incoming is None:
                operations, tasks = MountOperations(volume, view, held, access), []
            else:
                incoming = stack.enter_context(open_incoming(volume, options.incoming))
                operations = WritableOperations(volume, view, held, access, incoming)
                tasks = [incoming.sealer.run]
            _mount(operations, path, options)
            try:
                await _answer(path, on_ready, [*beside, *tasks])
            finally:
                pyfuse3.close(unmount=True)
    finally:
        threads.close()
        view.close()


def _mount(operations: MountOperations, path: str, options: MountOptions) -> None:
    words = {"default_permissions", f"fsname={FILE_SYSTEM_NAME}", "subtype=dlfs"}
    words |= {"ro"} if options.incoming is None else set()
    words |= {"allow_other"} if options.allow_other else set()
    try:
        pyfuse3.init(operations, path, words)
    except RuntimeError as error:
        raise DeviceError(
            f"mount on {path}: the system refused (is /dev/fuse there, fusermount3 installed, and "
            "allow_other permitted?)"
        ) from error


async def _answer(
    path: str,
    on_ready: Callable[[str], None],
    tasks: Sequence[Callable[[], Awaitable[None]]],
) -> None:
    """Answer the kernel until the mount is gone; run tasks meanwhile."""
    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(task)
        nursery.start_soon(_tell_when_ready, path, on_ready)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _end_on_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            _log.info("%s: unmounting", signal.Signals(number).name)
            pyfuse3.terminate()
            return


async def _tell_when_ready(path: str, on_ready: Callable[[str], None]) -> None:
    await trio.to_thread.run_sync(os.stat, path, abandon_on_cancel=True)
    on_ready(path)
