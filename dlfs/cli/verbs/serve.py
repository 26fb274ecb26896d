"""``dlfs serve``: runs the node service for all training processes of a machine."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption, require_trio
from dlfs.cli.output import log_events, note, print_json
from dlfs.cli.verbs.mount import FuseOption, NestedOption

READY_PREFIX = "serving on "


VolumesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="VOLUME", help="Volumes: each its members' device URIs, joined by commas."
    ),
]
MountOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Also mount there; several volumes, each at DIR/LABEL."),
]
IncomingOption = Annotated[
    str | None,
    typer.Option(
        metavar="STAGING",
        help="Make DIR/incoming of the mount a link to STAGING; see 'dlfs mount'.",
    ),
]
SocketOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Socket to listen on, with mode 660; by default /run/dlfs/LABEL.sock, or below "
        "$XDG_RUNTIME_DIR if you are not root.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve metrics to Prometheus there, at /metrics. Port 0: a free one.",
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Sample memory of all datasets together [4GiB, at most a quarter of what the process "
        "may use]. The datasets that are read share it, by need.",
    ),
]
UserOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="USER",
        help="User that may connect, in addition to root and you; repeatable. The socket then has "
        "mode 666, and this list decides.",
    ),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GROUP",
        help="Group that may connect, and that owns the socket; repeatable.",
    ),
]
DepthOption = Annotated[int, typer.Option(help="Operations in flight per member and thread.")]


def serve(
    volumes: VolumesArgument,
    mount: MountOption = None,
    nested: NestedOption = False,
    incoming: IncomingOption = None,
    fuse: FuseOption = "auto",
    socket: SocketOption = None,
    metrics: MetricsOption = None,
    cache: CacheOption = None,
    allow_user: UserOption = None,
    allow_group: GroupOption = None,
    depth: DepthOption = 128,
    json: JsonOption = False,
) -> None:
    """Serve volumes to the training processes of this node, until Ctrl-C: see dlfs.connect."""
    require_trio("serve", "service")
    from dlfs.base.memory_limit import default_service_bytes
    from dlfs.base.units import parse_bytes
    from dlfs.connection.connection import OpenOptions
    from dlfs.mount.options import MountOptions
    from dlfs.mount.server import choose_server
    from dlfs.service.process import NodeOptions, NodeService
    from dlfs.service.sockets import SCHEME, AllowList, group_number, user_number

    log_events()
    staging = None if incoming is None else os.path.abspath(incoming)
    if mount is not None:
        choose_server(MountOptions(incoming=staging, fuse=fuse))  # fails before anything is started
    options = NodeOptions(
        volumes=volumes,
        socket=socket,
        mount=mount,
        nested=nested,
        metrics=metrics,
        incoming=staging,
        fuse=fuse,
        cache_bytes=default_service_bytes() if cache is None else parse_bytes(cache),
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
    # Skip the destructors: clients may still read the node's memory, see dlfs.service.process.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
