"""``dlfs attach`` and ``detach``, ``publish`` and ``unpublish``: change a running node service."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import note as note_line
from dlfs.cli.output import print_json

ServiceArgument = Annotated[
    str, typer.Argument(metavar="SERVICE", help="unix:PATH, as dlfs serve prints it.")
]


def attach(
    service: ServiceArgument,
    volume: Annotated[str, typer.Argument(metavar="VOLUME")],
    allow: Annotated[str | None, typer.Option(metavar="READERS")] = None,
    cache: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    json: JsonOption = False,
) -> None:
    """Have a running service serve one more volume, until it is detached or the service ends.

    Args:
        volume: The volume: its members, joined by commas.
        allow: Who may read it, instead of all that may connect: user:NAME and group:NAME, with
            commas. user:root leaves it to the sockets that 'dlfs publish' makes.
        cache: Memory for its samples, with --allow [a share of what the service has left].

    Examples:
        dlfs attach unix:/run/dlfs/photos.sock b.img
        dlfs attach unix:dlfs.sock b.img --allow group:lab
    """
    from dlfs.base.units import parse_bytes
    from dlfs.service.client import attach as attach_volume

    size = None if cache is None else parse_bytes(cache)
    done = attach_volume(service, volume, allow=allow, cache_bytes=size)
    if json:
        print_json(
            {"uuid": done.volume.uuid, "label": done.volume.label, "mount": done.mount}, result=True
        )
    where = f" at {done.mount}" if done.mount else ""
    note_line(f"attached {done.volume.label or done.volume.uuid}{where}")


def detach(
    service: ServiceArgument,
    volume: Annotated[str, typer.Argument(metavar="NAME")],
    force: Annotated[bool, typer.Option("--force")] = False,
    json: JsonOption = False,
) -> None:
    """Have a running service stop serving a volume, and close its devices.

    Args:
        volume: Label or UUID of the volume.
        force: Take it from the processes that read it.

    Examples:
        dlfs detach unix:/run/dlfs/photos.sock photos
        dlfs detach unix:dlfs.sock photos --force
    """
    from dlfs.service.client import detach as detach_volume

    done = detach_volume(service, volume, force=force)
    if json:
        print_json({"uuid": done.uuid, "label": done.label}, result=True)
    note_line(f"detached {done.label or done.uuid}")


def publish(
    service: ServiceArgument,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    volumes: Annotated[list[str], typer.Argument(metavar="VOLUME...")],
    note: Annotated[str, typer.Option(metavar="TEXT")] = "",
    json: JsonOption = False,
) -> None:
    """Have a service with --sockets listen at one more socket, at which volumes can be read.

    Its path is printed. Whoever reaches it may read these volumes: bind its directory into the
    container that may.

    Args:
        name: Name of the socket.
        volumes: Label or UUID of each volume; it was served or attached with --allow.
        note: Text by which the service's log knows the socket.

    Examples:
        dlfs publish unix:dlfs.sock pod-7c2e photos
    """
    from dlfs.service.client import publish as publish_socket

    path = publish_socket(service, name, volumes, note=note)
    if json:
        print_json({"name": name, "path": path, "uri": f"unix:{path}"}, result=True)
    note_line(f"published unix:{path}")


def unpublish(
    service: ServiceArgument,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    json: JsonOption = False,
) -> None:
    """Close a published socket, and end the clients that came through it.

    Args:
        name: Name of the socket.

    Examples:
        dlfs unpublish unix:dlfs.sock pod-7c2e
    """
    from dlfs.service.client import unpublish as unpublish_socket

    unpublish_socket(service, name)
    if json:
        print_json({"name": name}, result=True)
    note_line(f"unpublished {name}")
