"""The pyfuse3 server of a mount: the plain reference.

One thread runs the FUSE loop (trio) and every handler; worker threads of trio read samples and the
metadata of volumes. The server sends the kernel no notification: what may change expires in the
kernel's cache. A mount that ends goes away at once, even if files on it are open: programs that
still use them get ENOTCONN.
"""

from __future__ import annotations

import os

import pyfuse3
import trio

from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.mount_view import MountView
from dlfs.mount.operations import MountOperations
from dlfs.mount.options import DEVICE_TRANSPORT, MountOptions, OnReady


async def serve_by_pyfuse3(
    view: MountView, path: str, options: MountOptions, on_ready: OnReady
) -> None:
    """Mount, and answer until the mount is unmounted; unmount it when cancelled.

    Args:
        view: what the mount shows; closed at the end.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.

    Raises:
        DeviceError: the system refused the mount.

    Threads: the trio loop; one mount in a process.
    """

    async def report_ready() -> None:
        await trio.to_thread.run_sync(os.stat, path, abandon_on_cancel=True)
        on_ready(path, DEVICE_TRANSPORT)

    try:
        await view.restore()
        try:
            pyfuse3.init(MountOperations(view, options), path, set(options.for_kernel()))
        except RuntimeError as error:
            raise DeviceError(
                f"mount on {path}: the system refused (is /dev/fuse there, fusermount3 installed, "
                "and allow_other permitted?)"
            ) from error
        record = mountpoints.record_of(path)
        try:
            async with trio.open_nursery() as view.nursery:
                view.nursery.start_soon(report_ready)
                view.nursery.start_soon(view.keep_current)
                await pyfuse3.main()
                view.nursery.cancel_scope.cancel()
        finally:
            here = mountpoints.device_of(path) == (record and record.device)
            if not here and record is not None:
                mountpoints.detach_moved(record)
            pyfuse3.close(unmount=here)
    finally:
        view.nursery = None
        view.close()
