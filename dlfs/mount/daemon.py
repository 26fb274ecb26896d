"""The background server of one mount: ``python -m dlfs.mount.daemon``.

``mount_volume`` starts it. It becomes a session of its own, reads its order from standard input,
mounts, says on standard output how that went, and serves. A thread waits for the caller's answer,
closes the standard streams, and unmounts if there was none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import threading
from pathlib import Path

from dlfs.errors import DlfsError, write_error
from dlfs.mount.background import KEEP, STATUS_PREFIX, ServerOrder
from dlfs.mount.mountpoint import unmount
from dlfs.mount.server import serve

SYSLOG = Path("/dev/log")

_log = logging.getLogger("dlfs.service")


def main() -> None:
    """Mount and serve."""
    order = ServerOrder.from_json(sys.stdin.readline())
    log = "?"

    def ready(path: str) -> None:
        _tell({"mountpoint": path, "pid": os.getpid(), "log": log})
        threading.Thread(target=_await_caller, args=(path,), daemon=True).start()

    try:
        log = _start_log(order.log)
        serve(order.volume_uri, order.directory, order.options, ready)
    except DlfsError as error:
        _log.error("%s", error)
        _tell({"error": type(error).__name__, "message": str(error)})
    except OSError as error:
        _log.error("%s", error)
        kind = type(write_error(str(error), error.errno or 0))
        _tell({"error": kind.__name__, "message": str(error)})


def _tell(status: dict[str, object]) -> None:
    """Tell the caller how it went; one that was killed is noticed by its missing answer."""
    with contextlib.suppress(BrokenPipeError):
        print(STATUS_PREFIX + json.dumps(status), flush=True)


def _await_caller(path: str) -> None:
    """Wait until the caller keeps the mount, or is gone; then the mount goes, too."""
    # Not sys.stdin, on whose lock an interpreter that ends meanwhile would fail.
    if os.read(sys.stdin.fileno(), len(KEEP)) != KEEP.encode():
        _log.warning("unmounting %s: the program that asked for it was interrupted", path)
        with contextlib.suppress(DlfsError):
            unmount(path, lazy=True)
    _leave_streams()


def _leave_streams() -> None:
    """Replace the standard streams, which are the caller's."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    os.chdir("/")


def _start_log(path: str | None) -> str:
    """Send messages to a file, or to syslog; returns where."""
    handler: logging.Handler
    if path is None and SYSLOG.exists():
        handler = logging.handlers.SysLogHandler(
            str(SYSLOG), logging.handlers.SysLogHandler.LOG_DAEMON
        )
        handler.setFormatter(logging.Formatter("dlfs[%(process)d]: %(message)s"))
        where = "syslog"
    else:
        where = path or str(_default_log())
        handler = logging.FileHandler(where)
        handler.setFormatter(
            logging.Formatter("%(asctime)s dlfs[%(process)d] %(levelname)s: %(message)s")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return where


def _default_log() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "dlfs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "mount.log"


def _become_daemon() -> None:
    """Leave the parent's session; the parent waits for our output to end, not for us."""
    if os.fork():
        os._exit(0)
    os.setsid()


if __name__ == "__main__":
    _become_daemon()
    main()
