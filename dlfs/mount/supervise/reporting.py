"""What background servers have in common: leaving the caller, their status, and their log.

``background.started_server`` starts such a server, and reads the status.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
from collections.abc import Iterator
from pathlib import Path

from dlfs.base.json_records import to_json
from dlfs.errors import DlfsError, write_error
from dlfs.mount.supervise.background import STATUS_PREFIX

SYSLOG = Path("/dev/log")

_log = logging.getLogger(__name__)


def become_daemon() -> None:
    """Leave the parent's session. The parent waits for the end of the output only."""
    if os.fork():
        os._exit(0)
    os.setsid()


@contextlib.contextmanager
def reported_errors(*, again: bool = False) -> Iterator[None]:
    """Report errors to the caller and the log; raise them again if wanted."""
    try:
        yield
    except (DlfsError, OSError) as error:
        _log.error("%s", error)
        code = getattr(error, "errno", None) or 0
        kind = type(error if isinstance(error, DlfsError) else write_error(str(error), code))
        report({"error": kind.__name__, "message": str(error), "code": code})
        if again:
            raise


def report(status: dict[str, object]) -> None:
    """Write the status for the caller. If the caller is gone, its missing answer shows it later."""
    with contextlib.suppress(BrokenPipeError):
        # One write, since keeper and server may both report an error.
        print(STATUS_PREFIX + to_json(status).decode() + "\n", end="", flush=True)


def start_log(path: str | None, name: str) -> str:
    """Send log messages to a file or to syslog. Return the path, or ``syslog``.

    Args:
        path: the file; None: syslog, or on a system without it a file in the user's state
            directory ($XDG_STATE_HOME or ~/.local/state).
        name: name of that file.

    Raises:
        DeviceError, SpaceError: the file cannot be written.
    """
    handler = None if path is not None else _syslog()
    destination = "syslog"
    if handler is None:
        destination = path or str(_default_log(name))
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


def _default_log(name: str) -> Path:
    """Return the log in the user's state directory, which is made."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:  # no HOME, and no entry in the list of users
        raise _log_failure(f"~/.local/state/dlfs/{name}", error) from error
    folder = Path(state) / "dlfs"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _log_failure(str(folder / name), error) from error
    return folder / name


def _log_failure(destination: str, error: Exception) -> DlfsError:
    """Return the error of a log that cannot be made."""
    reason = getattr(error, "strerror", None) or str(error)
    return write_error(
        f"write the log to {destination}: {reason}; --log FILE, or XDG_STATE_HOME, "
        "names another place",
        getattr(error, "errno", None) or 0,
    )
