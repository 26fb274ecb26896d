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
import logging.handlers
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dlfs.base.json_records import from_json, to_json
from dlfs.base.threads import start_thread
from dlfs.errors import DlfsError, NotFoundError, UsageError, write_error
from dlfs.mount.mountpoint import FILE_SYSTEM_TYPE, find_dlfs, prepare, unmount
from dlfs.mount.options import OnReady
from dlfs.mount.server import serve
from dlfs.mount.supervise.background import (
    KEEP,
    REPLACE,
    STATUS_PREFIX,
    MountRequest,
    ReplaceRequest,
)
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.supervise.keeper import Keeper, can_keep
from dlfs.mount.supervise.processes import leave_streams
from dlfs.mount.supervise.replacement import Predecessor, dlfs_version

SYSLOG = Path("/dev/log")
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
        with _reported_errors():
            _replace(from_json(line, ReplaceRequest))
        return
    request = from_json(line, MountRequest)
    log = "?"

    def ready(path: str, transport: str) -> None:
        status = {"mountpoint": path, "pid": os.getpid(), "log": log, "transport": transport}
        _report(status)
        start_thread(threading.Thread(target=_wait_for_caller, args=(path,), daemon=True))

    with _reported_errors():
        log = _start_log(request.log)
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
    log = _start_log(new.log)
    if not can_keep(replace(options, uring=False)):
        raise NotFoundError(
            f"replace the server of {path}: dlfs {dlfs_version()} has no native server here that "
            "takes mounts over"
        )

    def ready(path: str, transport: str) -> None:
        _log.info("%s: dlfs %s answers, dlfs %s before", path, dlfs_version(), before.version)
        _report({"mountpoint": path, "pid": os.getpid(), "log": log, "transport": transport})
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

        with _reported_errors(again=True):
            serve(request.volume_uris, inherited.path, request.options, ready, inherited)

    Keeper(request, run_server, leave_streams, predecessor).run()


@contextlib.contextmanager
def _reported_errors(*, again: bool = False) -> Iterator[None]:
    """Report errors to the caller and the log; raise them again if wanted."""
    try:
        yield
    except (DlfsError, OSError) as error:
        _log.error("%s", error)
        code = getattr(error, "errno", None) or 0
        kind = type(error if isinstance(error, DlfsError) else write_error(str(error), code))
        _report({"error": kind.__name__, "message": str(error), "code": code})
        if again:
            raise


def _report(status: dict[str, object]) -> None:
    """Write the status for the caller. If the caller is gone, its missing answer shows it later."""
    with contextlib.suppress(BrokenPipeError):
        # One write, since keeper and server may both report an error.
        print(STATUS_PREFIX + to_json(status).decode() + "\n", end="", flush=True)


def _wait_for_caller(path: str) -> None:
    """Wait for the caller's answer; unmount if the caller is gone."""
    # Not sys.stdin: an interpreter that ends while this thread has its lock would abort.
    if os.read(sys.stdin.fileno(), len(KEEP)) != KEEP.encode():
        _log.warning("unmounting %s: the program that mounted it was interrupted", path)
        with contextlib.suppress(DlfsError):
            unmount(path, lazy=True)
    leave_streams()


def _start_log(path: str | None) -> str:
    """Send log messages to a file or to syslog. Return the path, or ``syslog``.

    Raises:
        DeviceError, SpaceError: the file cannot be written.
    """
    handler = None if path is not None else _syslog()
    destination = "syslog"
    if handler is None:
        destination = path or str(_default_log())
        try:
            handler = logging.FileHandler(destination)
        except OSError as error:
            raise _log_failure(destination, error) from error
        handler.setFormatter(
            logging.Formatter("%(asctime)s dlfs[%(process)d] %(levelname)s: %(message)s")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return destination


def _syslog() -> logging.Handler | None:
    """Return a handler that writes to syslog; None on a system without it."""
    if not SYSLOG.exists():
        return None
    handler = logging.handlers.SysLogHandler(str(SYSLOG), logging.handlers.SysLogHandler.LOG_DAEMON)
    handler.setFormatter(logging.Formatter("dlfs[%(process)d]: %(message)s"))
    return handler


def _default_log() -> Path:
    """Return the log in the user's state directory, which is made."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:  # no HOME, and no entry in the list of users
        raise _log_failure("~/.local/state/dlfs/mount.log", error) from error
    folder = Path(state) / "dlfs"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _log_failure(str(folder / "mount.log"), error) from error
    return folder / "mount.log"


def _log_failure(destination: str, error: Exception) -> DlfsError:
    """Return the error of a log that cannot be made."""
    reason = getattr(error, "strerror", None) or str(error)
    return write_error(
        f"write the log of the mount to {destination}: {reason}; --log FILE, or XDG_STATE_HOME, "
        "names another place",
        getattr(error, "errno", None) or 0,
    )


def _become_daemon() -> None:
    """Leave the parent's session. The parent waits for the end of the output only."""
    if os.fork():
        os._exit(0)
    os.setsid()


if __name__ == "__main__":
    _become_daemon()
    main()
