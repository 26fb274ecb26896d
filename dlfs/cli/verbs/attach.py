"""``dlfs attach`` and ``dlfs detach``: change the volumes of a running node service."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import note, print_json

ServiceArgument = Annotated[
    str, typer.Argument(metavar="SERVICE", help="unix:PATH, as dlfs serve prints it.")
]


def attach(
    service: ServiceArgument,
    volume: Annotated[str, typer.Argument(metavar="VOLUME")],
    json: JsonOption = False,
) -> None:
    """Have a running service serve one more volume, until it is detached or the service ends.

    Args:
        volume: The volume: its members, joined by commas.

    Examples:
        dlfs attach unix:/run/dlfs/photos.sock b.img
    """
    from dlfs.service.client import attach as attach_volume

    done = attach_volume(service, volume)
    if json:
        print_json(
            {"uuid": done.volume.uuid, "label": done.volume.label, "mount": done.mount}, result=True
        )
    where = f" at {done.mount}" if done.mount else ""
    note(f"attached {done.volume.label or done.volume.uuid}{where}")


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
    note(f"detached {done.label or done.uuid}")
