"""The server of one mount: opens the volumes, mounts it, and answers until it is unmounted.

Two servers of sealed datasets follow the same rules (SEMANTICS.md). The native server
(``native_server``) is fast. The pyfuse3 server (``pyfuse3_server``) is the plain reference. By
default the native server is used if it was built. With either, the staging area is a second file
system (``incoming_server``), which is mounted once the first one answers.

SIGTERM and SIGINT unmount and end the server; so does an unmount by another program.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import trio

from dlfs._native.fuse import fuse_library, is_built
from dlfs.errors import DlfsError, NativeError, NotFoundError, UsageError
from dlfs.extras import install_command
from dlfs.memory_limit import describe_memory
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.incoming_server import detach_link, serve_incoming
from dlfs.mount.kept import KeptMount
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import MountOptions, OnReady
from dlfs.mount.signals import first_error, run_until_signal
from dlfs.store.members import same_kind
from dlfs.volume import Volume
from dlfs.volume import open as open_volume


class SealedMount(Protocol):
    """A server of sealed datasets."""

    async def serve(self, on_ready: OnReady) -> None:
        """Answer until the mount is unmounted; unmount it when cancelled."""

    def expire_root(self) -> None:
        """Have the next request for the root read the list of datasets again."""


_log = logging.getLogger(__name__)


def choose_server(options: MountOptions) -> str:
    """Choose the server for these options on this machine: ``native`` or ``pyfuse3``.

    Raises:
        NativeError: the options demand the native server, and it cannot be loaded.
        NotFoundError: no server is installed.
    """
    if options.fuse == "native":
        fuse_library()
        return "native"
    if options.fuse == "auto" and is_built():
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
    volume_uris: Sequence[str],
    directory: str | os.PathLike[str],
    options: MountOptions,
    on_ready: OnReady,
) -> None:
    """Mount volumes and serve them until the mount is unmounted.

    Args:
        volume_uris: URI or path of each volume, as for ``dlfs.open``; several only if nested.
        directory: mount point: an empty directory, or the mount of a dead server.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.

    Raises:
        NotFoundError: the directory, the volume or a member does not exist.
        UsageError: the directory cannot be mounted on, or a volume is given twice.
        ExistsError: DLFS is mounted there already.
        LockedError: another server uses the staging area.
        NativeError: the options demand the native server, and it is not available.
        DeviceError: the system refused the mount; a device failed.
        FormatError: the members do not contain a volume.

    Threads: the main thread, which receives signals; one mount per process at a time.
    """
    path = mountpoints.prepare(directory)
    with _opened(volume_uris, options.cache_bytes) as volumes:
        view = MountView(volumes, nested=options.nested)
        run_until_signal(serve_view, view, volumes[0], path, options, on_ready)


def serve_kept(
    volume_uris: Sequence[str],
    path: str,
    options: MountOptions,
    kept: KeptMount,
    on_ready: OnReady,
) -> None:
    """Serve volumes on a mount that a keeper makes, until it is unmounted.

    Args:
        volume_uris: URI or path of each volume, as for ``dlfs.open``; several only if nested.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        kept: the mount.
        on_ready: called with the path and the transport when the mount answers.

    Raises:
        DlfsError: as ``serve``.

    Threads: the main thread, which receives signals; one mount per process at a time.
    """
    with _opened(volume_uris, options.cache_bytes) as volumes:
        view = MountView(volumes, nested=options.nested, numbers=kept.numbers)
        run_until_signal(serve_view, view, volumes[0], path, options, on_ready, kept)


@contextlib.contextmanager
def _opened(volume_uris: Sequence[str], memory_bytes: int) -> Iterator[list[Volume]]:
    """Open volumes, none of them twice, which have equal parts of the memory."""
    with contextlib.ExitStack() as stack:
        volumes = [
            stack.enter_context(open_volume(uri, memory_bytes=memory_bytes // len(volume_uris)))
            for uri in volume_uris
        ]
        if len({volume.uuid for volume in volumes}) < len(volumes):
            raise UsageError(f"mount {', '.join(volume_uris)}: a volume is given twice")
        _log.info("memory for samples: %s", describe_memory(memory_bytes))
        yield volumes


async def serve_view(
    view: MountView,
    volume: Volume,
    path: str,
    options: MountOptions,
    on_ready: OnReady,
    kept: KeptMount | None = None,
) -> None:
    """Mount what a view shows and answer until it is unmounted; unmount it when cancelled.

    Args:
        view: the volumes, which must outlive the call or their place in the view.
        volume: the volume into which datasets are sealed, if the options have a staging area.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.
        kept: the mount, if a keeper makes it; only for the native server.

    Raises:
        NativeError: the options demand the native server, and it is not available.
        LockedError: another server uses the staging area.
        DeviceError: the system refused the mount.
    """
    if options.incoming is not None:
        await trio.to_thread.run_sync(_check_sealing, volume)
    sealed: SealedMount
    if choose_server(options) == "native":
        from dlfs.mount.native_server import NativeMount

        sealed = NativeMount(view, path, options, kept)
    else:  # imported here, because only this server needs pyfuse3
        from dlfs.mount.pyfuse3_server import Pyfuse3Mount

        sealed = Pyfuse3Mount(view, path, options)
    if options.incoming is None:
        await sealed.serve(on_ready)
        return
    resumed = kept is not None and kept.resumed
    try:
        await _serve_both(sealed, volume, path, options, on_ready, resumed=resumed)
    except ExceptionGroup as group:
        raise first_error(group) from group


async def _serve_both(
    sealed: SealedMount,
    volume: Volume,
    path: str,
    options: MountOptions,
    on_ready: OnReady,
    *,
    resumed: bool,
) -> None:
    """Serve sealed datasets and, once these are mounted, the staging area.

    With ``resumed``, programs use the mount already, so it goes on without the staging area if that
    cannot be mounted.
    """

    async def serve_staging(transport: str) -> None:
        ready = False

        def on_staging_ready() -> None:
            nonlocal ready
            ready = True
            on_ready(path, transport)

        try:
            await serve_incoming(volume, path, options, on_staging_ready, sealed.expire_root)
        except (DlfsError, OSError) as error:
            if ready or not resumed:
                raise
            _log.error("%s: only sealed datasets are served: %s", path, error)
            on_ready(path, transport)
        else:
            _log.info("%s: the staging area was unmounted", path)

    async with trio.open_nursery() as nursery:
        await sealed.serve(lambda _, transport: nursery.start_soon(serve_staging, transport))
        # A lazy unmount of the tree took both; the staging area is served until it is not used.
        await trio.to_thread.run_sync(detach_link, options)


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
