"""The server of one mount: opens the volume, mounts it, and answers until it is unmounted.

Two servers follow the same rules (SEMANTICS.md). The native server (``native_server``) is fast and
serves sealed datasets only. The pyfuse3 server (``pyfuse3_server``) is the plain reference and also
serves ``incoming``. By default the native server is used if it was built and supports the options.

SIGTERM and SIGINT unmount and end the server; so does an unmount by another program.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from dlfs._native.fuse import fuse_library, is_built
from dlfs.arguments import check_choice
from dlfs.errors import DlfsError, NativeError, NotFoundError, UsageError
from dlfs.extras import install_command
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.permissions import FILE_MODE_DEFAULT, Ownership
from dlfs.mount.signals import run_until_signal
from dlfs.mount.view import ShownVolume
from dlfs.store.members import same_kind
from dlfs.units import MIB
from dlfs.volume import Volume
from dlfs.volume import open as open_volume

FILE_SYSTEM_NAME = "dlfs"
CACHE_BYTES = 256 * MIB
"""Default memory of the open-file cache, in bytes."""
READER_BYTES = 256 * MIB
"""Sample memory of each open dataset, in bytes; a dataset that fits is read only once."""

BUSY_POLL_US = 200
"""Default busy polling, in microseconds: longer than a small read of most disks takes, and longer
than a program pauses between two files."""
BUSY_POLL_US_MAX = 10_000

SERVERS = ("auto", "native", "pyfuse3")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MountOptions:
    """Options of a mount.

    Attributes:
        uid: owner of every file; this process's user by default.
        gid: group of every file; this process's group by default.
        file_mode: permission bits of files, without write; directories get x where these have r.
        allow_other: admit other users; /etc/fuse.conf must permit it unless root mounts.
        cache_bytes: memory of the open-file cache.
        incoming: directory of the staging area for files written below ``incoming``; None makes
            the mount read-only.
        fuse: the server: ``native``, ``pyfuse3``, or ``auto`` (native if possible).
        busy_poll_us: longest busy polling of the native server for a device's answer or the next
            request, before a thread sleeps; 0: none. It polls only while one program uses the
            mount, and pauses polling while the polls find nothing.
        open_requests: have the kernel send OPEN requests to the native server, as old kernels do.
    """

    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    file_mode: int = FILE_MODE_DEFAULT
    allow_other: bool = False
    cache_bytes: int = CACHE_BYTES
    incoming: str | None = None
    fuse: str = "auto"
    busy_poll_us: int = BUSY_POLL_US
    open_requests: bool = False

    def __post_init__(self) -> None:
        if self.file_mode & ~0o555:
            raise UsageError(
                f"mount: expected a mode of read and execute bits (at most 555), "
                f"got {self.file_mode:o}"
            )
        if self.uid < 0 or self.gid < 0 or self.cache_bytes < 0:
            raise UsageError(
                f"mount: expected uid, gid and memory of at least 0, "
                f"got {self.uid}, {self.gid} and {self.cache_bytes}"
            )
        if not 0 <= self.busy_poll_us <= BUSY_POLL_US_MAX:
            raise UsageError(
                f"mount: expected busy polling of 0 to {BUSY_POLL_US_MAX} us, "
                f"got {self.busy_poll_us}"
            )
        check_choice(self.fuse, SERVERS, option="fuse", action="mount")
        if self.fuse == "native" and self.incoming is not None:
            raise UsageError(
                "mount: the native server does not support --incoming; leave --fuse out"
            )


def choose_server(options: MountOptions) -> str:
    """Choose the server for these options on this machine: ``native`` or ``pyfuse3``.

    Raises:
        NativeError: the options demand the native server, and it cannot be loaded.
        NotFoundError: no server that supports the options is installed.
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
        volume_uri: URI or path of the volume, as for ``dlfs.open``.
        directory: mount point: an empty directory, or the mount of a dead server.
        options: options of the mount.
        on_ready: called with the absolute path of the mount point when the mount answers.

    Raises:
        NotFoundError: the directory, the volume or a member does not exist.
        UsageError: the directory cannot be mounted on.
        ExistsError: DLFS is mounted there already.
        LockedError: another server uses the staging area.
        NativeError: the options demand the native server, and it is not available.
        DeviceError: the system refused the mount; a device failed.
        FormatError: the members do not contain a volume.

    Threads: the main thread, which receives signals; one mount per process at a time.
    """
    path = mountpoints.prepare(directory)
    with open_volume(volume_uri, memory_bytes=READER_BYTES) as volume:
        run_until_signal(serve_view, volume, volume, path, options, on_ready)


async def serve_view(
    volume: Volume,
    shown: ShownVolume,
    path: str,
    options: MountOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Mount an open volume and answer until it is unmounted; unmount it when cancelled.

    Args:
        volume: the volume; must outlive the call.
        shown: the same volume, or one that shares its open datasets with a node service.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        on_ready: called with the path when the mount answers.

    Raises:
        NativeError: the options demand the native server, and it is not available.
        LockedError: another server uses the staging area.
        DeviceError: the system refused the mount.
    """
    if options.incoming is not None:
        await trio.to_thread.run_sync(_check_sealing, volume)
    ownership = Ownership(options.uid, options.gid, options.file_mode)
    mount_options = ["default_permissions", f"fsname={FILE_SYSTEM_NAME}", "subtype=dlfs"]
    mount_options += ["ro"] if options.incoming is None else []
    mount_options += ["allow_other"] if options.allow_other else []
    if choose_server(options) == "native":
        from dlfs.mount.native_server import NativeMount

        mount = NativeMount(
            volume,
            shown,
            path,
            ownership,
            cache_bytes=options.cache_bytes,
            mount_options=mount_options,
            busy_poll_us=options.busy_poll_us,
            open_requests=options.open_requests,
        )
        await mount.serve(on_ready)
        return
    # Imported here, because only this server needs pyfuse3.
    from dlfs.mount.pyfuse3_server import serve_pyfuse3

    await serve_pyfuse3(
        volume,
        shown,
        path,
        ownership,
        on_ready,
        cache_bytes=options.cache_bytes,
        mount_options=mount_options,
        incoming=options.incoming,
    )


def _check_sealing(volume: Volume) -> None:
    """Check that datasets can be sealed into the volume.

    Raises:
        DlfsError: the volume cannot be opened for writing.
    """
    try:
        volume.check_writable()
    except DlfsError as error:
        raise same_kind(
            error, f"mount with --incoming, whose datasets are sealed into the volume: {error}"
        ) from error
