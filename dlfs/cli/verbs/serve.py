"""``dlfs serve``: runs the node service for all training processes of a machine."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.cli.options import JsonOption, require_trio
from dlfs.cli.output import log_events, note, print_json
from dlfs.cli.verbs.mount import FuseOption, NestedOption
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.service.sockets import AllowList


def serve(
    volumes: Annotated[list[str] | None, typer.Argument(metavar="[VOLUME...]")] = None,
    mount: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    nested: NestedOption = False,
    incoming: Annotated[str | None, typer.Option(metavar="STAGING")] = None,
    fuse: FuseOption = "auto",
    socket: Annotated[str | None, typer.Option(metavar="PATH")] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    cache: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    allow_user: Annotated[list[str] | None, typer.Option(metavar="USER")] = None,
    allow_group: Annotated[list[str] | None, typer.Option(metavar="GROUP")] = None,
    allow: Annotated[list[str] | None, typer.Option(metavar="VOLUME=READERS")] = None,
    sockets: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    depth: int = 128,
    background: Annotated[bool, typer.Option("--background")] = False,
    log: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    json: JsonOption = False,
) -> None:
    """Serve volumes to the training processes of this node, until Ctrl-C: see dlfs.connect.

    Args:
        volumes: Volumes: each its members' device URIs, joined by commas.
        mount: Also mount there; several volumes, each at DIR/LABEL.
        incoming: Make DIR/incoming of the mount a link to STAGING; see 'dlfs mount'.
        socket: Socket to listen on, with mode 660; by default /run/dlfs/LABEL.sock, or below
            $XDG_RUNTIME_DIR if you are not root.
        metrics: Serve metrics to Prometheus there, at /metrics. Port 0: a free one.
        cache: Sample memory of all datasets together [4GiB, at most a quarter of what the process
            may use]. The datasets that are read share it, by need.
        allow_user: User that may connect, in addition to root and you; repeatable. The socket then
            has mode 666, and this list decides.
        allow_group: Group that may connect, and that owns the socket; repeatable.
        allow: Who may read a volume, by its label or UUID, instead of all that may connect:
            user:NAME and group:NAME, with commas; repeatable. They may connect, and read no other.
        sockets: Directory of the sockets that 'dlfs publish' makes, each for some volumes.
        depth: Operations in flight per member and thread.
        background: Return when clients can connect; 'dlfs stop' ends the service.
        log: Log file of the service in the background.

    Examples:
        dlfs serve photos.img --socket dlfs.sock
        dlfs serve photos.img --cache 16GiB --mount mnt
        dlfs serve a.img b.img --metrics localhost:9100
        dlfs serve photos.img --socket dlfs.sock --background
        dlfs serve a.img b.img --allow a=user:alice,group:lab
    """
    require_trio("serve", "service")
    from dlfs.base.memory_limit import default_service_bytes
    from dlfs.base.units import parse_bytes
    from dlfs.mount.options import MountOptions
    from dlfs.mount.server import choose_server
    from dlfs.service.process import NodeOptions, NodeService
    from dlfs.service.sockets import AllowList, group_number, user_number

    log_events()
    staging = None if incoming is None else os.path.abspath(incoming)
    if mount is not None:
        choose_server(MountOptions(incoming=staging, fuse=fuse))  # fails before anything is started
    options = NodeOptions(
        volumes=volumes or [],
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
        rules=_parse_rules(allow or []),
        sockets=sockets,
        depth=depth,
    )
    if background:
        from dlfs.service.background import start_service

        started = start_service(options, log)
        _report(started.socket, started.pid, started.log, json=json)
        return
    if log is not None:
        raise UsageError("serve: --log is for --background; this one logs to stderr")
    node = NodeService(options)

    def ready(path: str) -> None:
        _report(path, os.getpid(), None, json=json)

    node.run(ready)
    # Skip the destructors: clients may still read the node's memory, see dlfs.service.process.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _parse_rules(texts: list[str]) -> dict[str, AllowList]:
    """Read ``VOLUME=READERS`` of each option.

    Raises:
        UsageError: one has another form, or a volume has two.
    """
    from dlfs.service.sockets import parse_allow_list

    rules: dict[str, AllowList] = {}
    for text in texts:
        volume, _, readers = text.rpartition("=")
        if not volume or volume in rules:
            raise UsageError(f"serve: expected one --allow VOLUME=READERS a volume, got {text!r}")
        rules[volume] = parse_allow_list(readers)
    return rules


def _report(path: str, pid: int, log: str | None, *, json: bool) -> None:
    """Print where a service listens, which process it is, and the log of one in the background."""
    from dlfs.service.sockets import SCHEME

    if json:
        values = {"socket": path, "uri": SCHEME + path, "pid": pid}
        print_json(values if log is None else {**values, "log": log})
        sys.stdout.flush()
    note(f"serving on {SCHEME}{path}" + (f" (service {pid}, log: {log})" if log else ""))
