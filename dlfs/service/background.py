"""A node service in the background: starts it, and waits until clients can connect.

The service is a new interpreter (``python -m dlfs.service.daemon``), started and answered as the
background server of a mount is (``dlfs.mount.supervise.background``): an interrupted or killed
caller leaves no service behind. ``dlfs.service.stopping`` ends it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from dlfs.mount.supervise.background import absolute_uri, keep, outcome, started_server
from dlfs.service.process import NodeOptions

_DAEMON = "dlfs.service.daemon"


@dataclass(frozen=True)
class StartedService:
    """A service that answers.

    Attributes:
        socket: path of its socket.
        pid: process ID.
        log: the service's log: a file, or ``syslog``.
    """

    socket: str
    pid: int
    log: str


@dataclass(frozen=True)
class ServiceRequest:
    """What a background service gets from its caller.

    Attributes:
        options: options of the service, with absolute paths.
        log: path of the log; None for syslog.
    """

    options: NodeOptions
    log: str | None


def start_service(options: NodeOptions, log: str | None = None) -> StartedService:
    """Start a node service that stays in the background, and wait until it answers.

    Args:
        options: the volumes and how to serve them.
        log: file to which the service appends its messages. The default is syslog; on a system
            without it, ``dlfs/serve.log`` in the user's state directory ($XDG_STATE_HOME or
            ~/.local/state).

    Raises:
        DlfsError: as ``NodeService`` and its ``run``; the log cannot be written.
        KeyboardInterrupt: the call was interrupted; the service ends.

    Threads: any.
    """
    absolute = replace(
        options,
        volumes=[absolute_uri(uri) for uri in options.volumes],
        socket=_absolute(options.socket),
        mount=_absolute(options.mount),
        incoming=_absolute(options.incoming),
        sockets=_absolute(options.sockets),
    )
    request = ServiceRequest(absolute, _absolute(log))
    with started_server(_DAEMON, request) as (requests, output):
        action = f"serve {', '.join(options.volumes)}".rstrip()
        started = outcome(output, action, StartedService)
        keep(requests)
    return started


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)
