"""``dlfs serve``: one service for all training processes of a node."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption, parse_size
from dlfs.cli.output import log_events, note, print_json
from dlfs.cli.verbs.mount import FuseOption
from dlfs.errors import NotFoundError
from dlfs.extras import install_command

READY_PREFIX = "serving on "


def _check_installed() -> None:
    try:
        import trio  # noqa: F401
    except ImportError as error:
        raise NotFoundError(
            f"serve: trio cannot be loaded ({error}); {install_command('service')}"
        ) from error


VolumesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="VOLUME", help="Volumes: each its members' device URIs, joined by commas."
    ),
]
MountOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Mount the volume there, too (only with one VOLUME)."),
]
IncomingOption = Annotated[
    str | None,
    typer.Option(
        metavar="SPOOL", help="Of the mount: let programs write to DIR/incoming; see 'dlfs mount'."
    ),
]
SocketOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Where to listen, with mode 660; by default /run/dlfs/LABEL.sock, and below "
        "$XDG_RUNTIME_DIR for others than root.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Answer Prometheus there: GET /metrics. Port 0 takes a free one."
    ),
]
CacheOption = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for samples, of all datasets together. Each that is opened takes what its "
        "data needs of what is left, and at least 64 MiB; those that nobody uses give way.",
    ),
]
UserOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="USER",
        help="Who may use it, besides root and you. The socket's mode is 666 then, and this list "
        "decides.",
    ),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GROUP", help="Likewise, and the socket is its; by default the socket's group."
    ),
]
DepthOption = Annotated[int, typer.Option(help="Operations in flight per member and thread.")]


def serve(
    volumes: VolumesArgument,
    mount: MountOption = None,
    incoming: IncomingOption = None,
    fuse: FuseOption = "auto",
    socket: SocketOption = None,
    metrics: MetricsOption = None,
    cache: CacheOption = "4GiB",
    allow_user: UserOption = None,
    allow_group: GroupOption = None,
    depth: DepthOption = 128,
    json: JsonOption = False,
) -> None:
    """Serve volumes to the training processes of this node, until Ctrl-C: see dlfs.connect."""
    _check_installed()
    from dlfs.connection import OpenOptions
    from dlfs.mount.server import MountOptions, choose_server
    from dlfs.service.process import NodeOptions, NodeService
    from dlfs.service.sockets import SCHEME, AllowList, group_number, user_number

    log_events()
    spool = None if incoming is None else os.path.abspath(incoming)
    if mount is not None:
        choose_server(MountOptions(incoming=spool, fuse=fuse))  # says what is missing
    options = NodeOptions(
        volumes=volumes,
        socket=socket,
        mount=mount,
        metrics=metrics,
        incoming=spool,
        fuse=fuse,
        cache_bytes=parse_size(cache) or 0,
        allow=AllowList(
            frozenset(map(user_number, allow_user or [])),
            frozenset(map(group_number, allow_group or [])),
        ),
        open_options=OpenOptions(depth=depth),
    )
    node = NodeService(options)

    def ready(path: str) -> None:
        if json:
            print_json({"socket": path, "uri": SCHEME + path, "pid": os.getpid()})
            sys.stdout.flush()
        note(f"{READY_PREFIX}{SCHEME}{path}")

    node.run(ready)
    # Clients may still look at the memory that node holds: see dlfs.service.process.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
