"""The background server of one mount: ``python -m dlfs.mount.supervise.daemon``.

``background.mount_volume`` starts it. It becomes the leader of a new session, reads the mount
request from standard input, mounts, reports the result on standard output, and serves. A thread
waits for the caller's answer, unmounts if none comes, and closes the standard streams.

With the argument ``replace``, it is the new keeper of a mount that exists (``replacement``), and
``background.replace_server`` starts it. It waits for no answer: it has either replaced the server
or changed nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from dlfs.base.json_records import from_json
from dlfs.base.threads import start_thread
from dlfs.errors import DlfsError, NotFoundError, UsageError
from dlfs.mount.mountpoint import FILE_SYSTEM_TYPE, find_dlfs, prepare, unmount
from dlfs.mount.options import OnReady
from dlfs.mount.server import serve
from dlfs.mount.supervise.background import (
    KEEP,
    REPLACE,
    MountRequest,
    ReplaceRequest,
)
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.supervise.keeper import Keeper, can_keep
from dlfs.mount.supervise.processes import leave_streams
from dlfs.mount.supervise.replacement import Predecessor, dlfs_version
from dlfs.mount.supervise.reporting import become_daemon, report, reported_errors, start_log

LOG_NAME = "mount.log"
"""Name of the log in the user's state directory."""
GIVEN = (
    f"a mount of the type {FILE_SYSTEM_TYPE}, to which the given descriptor of /dev/fuse belongs,"
)
"""What a caller must have mounted, for a message."""

_log = logging.getLogger("dlfs.mount")  # __name__ is __main__ here


def main() -> None:
    """Mount the requested volume and serve it."""
    logging.basicConfig(handlers=[logging.NullHandler()])  # until there is a log, errors are only
    logging.raiseExceptions = False  # reported, nor is a failure to write the log printed
    line = sys.stdin.readline()
    if sys.argv[1:] == [REPLACE]:
        with reported_errors():
            _replace(from_json(line, ReplaceRequest))
        return
    request = from_json(line, MountRequest)
    log = "?"

    def ready(path: str, transport: str) -> None:
        status = {"mountpoint": path, "pid": os.getpid(), "log": log, "transport": transport}
        report(status)
        start_thread(threading.Thread(target=_wait_for_caller, args=(path,), daemon=True))

    with reported_errors():
        log = start_log(request.log, LOG_NAME)
        if request.options.restart and can_keep(request.options):
            if request.fuse_fd is None:
                path = prepare(request.directory)
            else:
                path, _ = find_dlfs(request.directory, "mount on", GIVEN)
            _keep(replace(request, directory=path), ready)
        elif request.fuse_fd is not None:
            raise UsageError(
                f"mount on {request.directory}: only a keeper takes a descriptor that was mounted: "
                "it needs the native server, Linux 6.9, and --no-uring where the kernel offers "
                "io_uring"
            )
        else:
            serve(request.volume_uris, request.directory, request.options, ready)


def _replace(request: ReplaceRequest) -> None:
    """Replace the keeper and server of a mount, and keep servers running."""
    path, device = find_dlfs(request.directory, "replace the server of")
    predecessor = Predecessor(path, device)
    before = predecessor.state
    options = before.request.options
    if request.cache_bytes is not None:
        options = replace(options, cache_bytes=request.cache_bytes)
    if request.busy_poll_us is not None:
        options = replace(options, busy_poll_us=request.busy_poll_us)
    new = replace(before.request, options=options, log=request.log or before.request.log)
    log = start_log(new.log, LOG_NAME)
    if not can_keep(replace(options, uring=False)):
        raise NotFoundError(
            f"replace the server of {path}: dlfs {dlfs_version()} has no native server here that "
            "takes mounts over"
        )

    def ready(path: str, transport: str) -> None:
        _log.info("%s: dlfs %s answers, dlfs %s before", path, dlfs_version(), before.version)
        report({"mountpoint": path, "pid": os.getpid(), "log": log, "transport": transport})
        leave_streams()

    _keep(new, ready, predecessor)


def _keep(
    request: MountRequest, on_first_ready: OnReady, predecessor: Predecessor | None = None
) -> None:
    """Mount the requested volume, or take its mount over, and keep servers running."""

    def run_server(inherited: InheritedMount, tell_keeper: Callable[[], None]) -> None:
        def ready(path: str, transport: str) -> None:
            tell_keeper()
            if inherited.resumed and not inherited.replaces:
                _log.info("%s: another server answers", path)
            else:
                on_first_ready(path, transport)

        with reported_errors(again=True):
            serve(request.volume_uris, inherited.path, request.options, ready, inherited)

    Keeper(request, run_server, leave_streams, predecessor).run()


def _wait_for_caller(path: str) -> None:
    """Wait for the caller's answer; unmount if the caller is gone."""
    # Not sys.stdin: an interpreter that ends while this thread has its lock would abort.
    if os.read(sys.stdin.fileno(), len(KEEP)) != KEEP.encode():
        _log.warning("unmounting %s: the program that mounted it was interrupted", path)
        with contextlib.suppress(DlfsError):
            unmount(path, lazy=True)
    leave_streams()


if __name__ == "__main__":
    become_daemon()
    main()
