"""The pyfuse3 server of a mount: the plain reference, and the only server with ``incoming``.

One thread runs the FUSE loop (trio) and every handler; samples and metadata of the volume are read
in worker threads. A mount that ends goes away at once, even if files on it are open: programs that
still use them get ENOTCONN.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pyfuse3
import trio

from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.open_file_cache import OpenFileCache
from dlfs.mount.operations import MountOperations
from dlfs.mount.options import DEVICE_TRANSPORT, MountOptions, OnReady
from dlfs.mount.view import ShownVolume, VolumeView
from dlfs.mount.writable_operations import WritableOperations
from dlfs.staging.incoming import IncomingTree, open_incoming
from dlfs.volume import Volume


async def serve_pyfuse3(
    volume: Volume,
    shown: ShownVolume,
    path: str,
    options: MountOptions,
    on_ready: OnReady,
) -> None:
    """Mount a volume and answer until it is unmounted; unmount it when cancelled.

    Args:
        volume: the volume; must outlive the call.
        shown: the same volume, or one that shares its open datasets with a node service.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.

    Raises:
        LockedError: another server uses the staging area.
        DeviceError: the system refused the mount.
    """
    view = VolumeView(shown)
    cache = OpenFileCache(budget_bytes=options.cache_bytes)
    tree = None
    try:
        with ExitStack() as stack:
            if options.incoming is None:
                operations = MountOperations(volume, view, cache, options)
            else:
                tree = stack.enter_context(open_incoming(volume, options.incoming))
                operations = WritableOperations(volume, view, cache, options, tree)
            _mount(operations, path, options.for_kernel())
            device = mountpoints.device_of(path)
            try:
                await _answer(path, on_ready, tree)
            finally:
                pyfuse3.close(unmount=mountpoints.device_of(path) == device)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(cache.close)
        view.close()


def _mount(operations: MountOperations, path: str, mount_options: list[str]) -> None:
    try:
        pyfuse3.init(operations, path, set(mount_options))
    except RuntimeError as error:
        raise DeviceError(
            f"mount on {path}: the system refused (is /dev/fuse there, fusermount3 installed, and "
            "allow_other permitted?)"
        ) from error


async def _answer(path: str, on_ready: OnReady, tree: IncomingTree | None) -> None:
    """Answer the kernel until the mount is gone, and seal datasets meanwhile."""
    async with trio.open_nursery() as nursery:
        if tree is not None:
            nursery.start_soon(tree.sealer.run)
        nursery.start_soon(_report_ready, path, on_ready)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _report_ready(path: str, on_ready: OnReady) -> None:
    await trio.to_thread.run_sync(os.stat, path, abandon_on_cancel=True)
    on_ready(path, DEVICE_TRANSPORT)
