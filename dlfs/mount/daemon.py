"""The background server of one mount: ``python -m dlfs.mount.daemon``.

``background.mount_volume`` starts it. It becomes the leader of a new session, reads the mount
request from standard input, mounts, reports the result on standard output, and serves. A thread
waits for the caller's answer, unmounts if none comes, and closes the standard streams.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dlfs.errors import DlfsError, write_error
from dlfs.json_records import from_json, to_json
from dlfs.mount.background import KEEP, STATUS_PREFIX, MountRequest
from dlfs.mount.keeper import Keeper, can_keep
from dlfs.mount.kept import KeptMount
from dlfs.mount.mountpoint import prepare, unmount
from dlfs.mount.options import OnReady
from dlfs.mount.server import serve, serve_kept

SYSLOG = Path("/dev/log")

_log = logging.getLogger("dlfs.mount")  # __name__ is __main__ here


def main() -> None:
    """Mount the requested volume and serve it."""
    request = from_json(sys.stdin.readline(), MountRequest)
    log = "?"

    def ready(path: str, transport: str) -> None:
        status = {"mountpoint": path, "pid": os.getpid(), "log": log, "transport": transport}
        _report(status)
        threading.Thread(target=_wait_for_caller, args=(path,), daemon=True).start()

    with _reported_errors():
        log = _start_log(request.log)
        if request.options.restart and can_keep(request.options):
            _keep(request, ready)
        else:
            serve(request.volume_uri, request.directory, request.options, ready)


def _keep(request: MountRequest, on_first_ready: OnReady) -> None:
    """Mount the requested volume, and keep servers running."""
    path = prepare(request.directory)

    def run_server(connect: Callable[[], KeptMount], tell_keeper: Callable[[], None]) -> None:
        resumed = False

        def connected() -> KeptMount:
            nonlocal resumed
            kept = connect()
            resumed = kept.connection.resumed
            return kept

        def ready(path: str, transport: str) -> None:
            tell_keeper()
            if resumed:
                _log.info("%s: another server answers", path)
            else:
                on_first_ready(path, transport)

        with _reported_errors(again=True):
            serve_kept(request.volume_uri, path, request.options, connected, ready)

    Keeper(path, request.options, run_server, on_mounted=_leave_streams).run()


@contextlib.contextmanager
def _reported_errors(*, again: bool = False) -> Iterator[None]:
    """Report errors to the caller and the log; raise them again if wanted."""
    try:
        yield
    except DlfsError as error:
        _log.error("%s", error)
        _report({"error": type(error).__name__, "message": str(error)})
        if again:
            raise
    except OSError as error:
        _log.error("%s", error)
        kind = type(write_error(str(error), error.errno or 0))
        _report({"error": kind.__name__, "message": str(error)})
        if again:
            raise


def _report(status: dict[str, object]) -> None:
    """Write the status for the caller. If the caller is gone, its missing answer shows it later."""
    with contextlib.suppress(BrokenPipeError):
        print(STATUS_PREFIX + to_json(status).decode(), flush=True)


def _wait_for_caller(path: str) -> None:
    """Wait for the caller's answer; unmount if the caller is gone."""
    # Not sys.stdin: an interpreter that ends while this thread has its lock would abort.
    if os.read(sys.stdin.fileno(), len(KEEP)) != KEEP.encode():
        _log.warning("unmounting %s: the program that mounted it was interrupted", path)
        with contextlib.suppress(DlfsError):
            unmount(path, lazy=True)
    _leave_streams()


def _leave_streams() -> None:
    """Redirect the standard streams, which belong to the caller, to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    os.chdir("/")


def _start_log(path: str | None) -> str:
    """Send log messages to a file or to syslog. Return the path, or ``syslog``."""
    handler: logging.Handler
    if path is None and SYSLOG.exists():
        handler = logging.handlers.SysLogHandler(
            str(SYSLOG), logging.handlers.SysLogHandler.LOG_DAEMON
        )
        handler.setFormatter(logging.Formatter("dlfs[%(process)d]: %(message)s"))
        destination = "syslog"
    else:
        destination = path or str(_default_log())
        handler = logging.FileHandler(destination)
        handler.setFormatter(
            logging.Formatter("%(asctime)s dlfs[%(process)d] %(levelname)s: %(message)s")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return destination


def _default_log() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "dlfs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "mount.log"


def _become_daemon() -> None:
    """Leave the parent's session. The parent waits for the end of the output only."""
    if os.fork():
        os._exit(0)
    os.setsid()


if __name__ == "__main__":
    _become_daemon()
    main()
