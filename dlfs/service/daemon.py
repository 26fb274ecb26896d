"""The node service in the background: ``python -m dlfs.service.daemon``.

``background.start_service`` starts it. It becomes the leader of a new session, reads its request
from standard input, serves, and reports the result on standard output. A thread waits for the
caller's answer and closes the standard streams; if none comes, it ends the service.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from dlfs.base.json_records import from_json
from dlfs.base.threads import start_thread
from dlfs.mount.supervise.background import KEEP
from dlfs.mount.supervise.processes import leave_streams
from dlfs.mount.supervise.reporting import become_daemon, report, reported_errors, start_log
from dlfs.service.background import ServiceRequest
from dlfs.service.process import NodeService

LOG_NAME = "serve.log"
"""Name of the log in the user's state directory."""

_log = logging.getLogger("dlfs.service")  # __name__ is __main__ here


def main() -> None:
    """Serve the requested volumes."""
    logging.basicConfig(handlers=[logging.NullHandler()])  # until there is a log, errors are only
    logging.raiseExceptions = False  # reported, nor is a failure to write the log printed
    request = from_json(sys.stdin.readline(), ServiceRequest)
    start_thread(threading.Thread(target=_wait_for_caller, daemon=True))
    with reported_errors():
        log = start_log(request.log, LOG_NAME)
        node = NodeService(request.options)
        node.run(lambda path: report({"socket": path, "pid": os.getpid(), "log": log}))
    logging.shutdown()
    os._exit(0)  # no destructors: clients may still read the node's memory


def _wait_for_caller() -> None:
    """Wait for the caller's answer; end the service if the caller is gone."""
    # Not sys.stdin: an interpreter that ends while this thread has its lock would abort.
    if os.read(sys.stdin.fileno(), len(KEEP)) == KEEP.encode():
        leave_streams()
        return
    _log.warning("ending: the program that started the service was interrupted")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    become_daemon()
    main()
