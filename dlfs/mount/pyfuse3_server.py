"""The mount served by pyfuse3 on trio: the reference, and what serves ``incoming``.

One thread runs the FUSE loop; samples and the volume's metadata are read in others. The mount goes
away at once even when files on it are open: programs that still use them get ENOTCONN.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import pyfuse3
import trio

from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.open_file_cache import HeldSamples, ReadThreads
from dlfs.mount.operations import MountOperations
from dlfs.mount.permissions import Access
from dlfs.mount.view import ShownVolume, VolumeView
from dlfs.mount.writable_operations import WritableOperations
from dlfs.staging.incoming import open_incoming
from dlfs.volume import Volume


async def serve_pyfuse3(
    volume: Volume,
    shown: ShownVolume,
    path: str,
    access: Access,
    on_ready: Callable[[str], None],
    *,
    held_bytes: int,
    words: Sequence[str],
    incoming: str | None,
) -> None:
    """Mount a volume, and answer until it is unmounted; cancelled, unmount it.

    Args:
        volume: borrowed.
        shown: the same, or what shares its datasets with others.
        path: that ``mountpoint.prepare`` gave.
        access: whom the files belong to.
        on_ready: called with the path when the mount answers.
        held_bytes: memory for samples of open files.
        words: options of the mount.
        incoming: the spool of what programs write, if they may.

    Raises:
        LockedError: another server uses the spool.
        DeviceError: the system refused the mount.
    """
    view = VolumeView(shown)
    threads = ReadThreads(trio.lowlevel.current_trio_token())
    tasks: list[Callable[[], Awaitable[None]]] = []
    try:
        held = HeldSamples(threads, budget_bytes=held_bytes)
        with ExitStack() as stack:
            if incoming is None:
                operations = MountOperations(volume, view, held, access)
            else:
                tree = stack.enter_context(open_incoming(volume, incoming))
                operations = WritableOperations(volume, view, held, access, tree)
                tasks = [tree.sealer.run]
            _mount(operations, path, words)
            device = mountpoints.device_of(path)
            try:
                await _answer(path, on_ready, tasks)
            finally:
                pyfuse3.close(unmount=mountpoints.device_of(path) == device)
    finally:
        threads.close()
        view.close()


def _mount(operations: MountOperations, path: str, words: Sequence[str]) -> None:
    try:
        pyfuse3.init(operations, path, set(words))
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


async def _tell_when_ready(path: str, on_ready: Callable[[str], None]) -> None:
    await trio.to_thread.run_sync(os.stat, path, abandon_on_cancel=True)
    on_ready(path)
