"""The server of one mount: opens the volumes, mounts it, and answers until it is unmounted.

Two servers of sealed datasets follow the same rules (SEMANTICS.md). The native server
(``native_server``) is fast. The pyfuse3 server (``pyfuse3_server``) is the plain reference. By
default the native server is used if it was built. With either, ``incoming`` is a symbolic link to
the staging area, whose requests this process takes, too (``dlfs.staging.server``).

SIGTERM and SIGINT unmount and end the server; so does an unmount by another program.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence

import trio

from dlfs._native.fuse import fuse_library, is_built
from dlfs.base.extras import install_command
from dlfs.base.memory_limit import describe_memory
from dlfs.errors import DlfsError, NativeError, NotFoundError, UsageError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import MountOptions, OnReady
from dlfs.mount.signals import first_error, run_until_signal
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.staging.server import SealServer
from dlfs.volume.volume import Volume
from dlfs.volume.volume import open as open_volume

_Serve = Callable[[OnReady], Awaitable[None]]
"""Answers until the mount is unmounted; unmounts it when cancelled."""

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
    inherited: InheritedMount | None = None,
) -> None:
    """Mount volumes and serve them until the mount is unmounted.

    Args:
        volume_uris: URI or path of each volume, as for ``dlfs.open``; several only if nested.
        directory: mount point: an empty directory, or the mount of a dead server.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.
        inherited: the mount, if a keeper makes it.

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
    path = mountpoints.prepare(directory) if inherited is None else inherited.path
    with _opened(volume_uris, options.cache_bytes) as volumes:
        numbers = None if inherited is None else inherited.numbers
        view = MountView(volumes, nested=options.nested, numbers=numbers)
        incoming = options.incoming
        sealing = None if incoming is None else SealServer(volumes[0], incoming)
        run_until_signal(serve_view, view, path, options, on_ready, sealing, inherited)


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
    path: str,
    options: MountOptions,
    on_ready: OnReady,
    sealing: SealServer | None = None,
    inherited: InheritedMount | None = None,
) -> None:
    """Mount what a view shows and answer until it is unmounted; unmount it when cancelled.

    Args:
        view: the volumes, which must outlive the call or their place in the view.
        path: the mount point, as ``mountpoint.prepare`` returned it.
        options: options of the mount.
        on_ready: called with the path and the transport when the mount answers.
        sealing: the server of the staging area, if the options have one.
        inherited: the mount, if a keeper makes it; only for the native server.

    Raises:
        NativeError: the options demand the native server, and it is not available.
        LockedError: another server uses the staging area.
        DeviceError: the system refused the mount.
    """
    serve: _Serve
    if choose_server(options) == "native":
        from dlfs.mount.native_server import NativeMount

        serve = NativeMount(view, path, options, inherited).serve
    else:  # imported here, because only this server needs pyfuse3
        from dlfs.mount.pyfuse3_server import serve_by_pyfuse3

        serve = functools.partial(serve_by_pyfuse3, view, path, options)
    if sealing is None:
        await serve(on_ready)
        return
    sealing.on_sealed = view.expire
    resumed = inherited is not None and inherited.resumed
    try:
        await _serve_both(serve, sealing, path, on_ready, resumed=resumed)
    except ExceptionGroup as group:
        raise first_error(group) from group


async def _serve_both(
    serve: _Serve,
    sealing: SealServer,
    path: str,
    on_ready: OnReady,
    *,
    resumed: bool,
) -> None:
    """Serve the mount and the staging area.

    With ``resumed``, programs use the mount already. The server before this one may have the
    staging area until it ends, and the mount goes on without sealing if the area cannot be opened.
    """

    async def resume(transport: str) -> None:
        try:
            await nursery.start(sealing.run)
        except (DlfsError, OSError) as error:
            _log.error("%s: nothing can be sealed: %s", path, error)
        on_ready(path, transport)

    def start_resuming(_: str, transport: str) -> None:
        nursery.start_soon(resume, transport)

    async with trio.open_nursery() as nursery:
        if not resumed:
            await nursery.start(sealing.run)
        await serve(start_resuming if resumed else on_ready)
        nursery.cancel_scope.cancel()
