"""``dlfs stop``: ends a node service."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.options import JsonOption
from dlfs.cli.output import note, print_json
from dlfs.cli.verbs.attach import ServiceArgument
from dlfs.errors import UsageError

LONGEST_S = 86_400
"""Longest time that a service may be given to end, in seconds."""


def stop(
    service: ServiceArgument,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS")] = 10.0,
    json: JsonOption = False,
) -> None:
    """End a node service and remove what it, or one that was killed, left: mount, socket, memory.

    Args:
        timeout: Time that the service has to end by itself; then it is killed.

    Examples:
        dlfs stop unix:/run/dlfs/photos.sock
    """
    from dlfs.service.stopping import Ending, stop_service

    if not 0 <= timeout <= LONGEST_S:
        raise UsageError(f"stop: expected --timeout of 0 to {LONGEST_S} seconds, got {timeout:g}")
    done = stop_service(service, timeout)
    if json:
        print_json({"socket": done.socket, "ending": done.ending.value}, result=True)
    note(
        {
            Ending.ABSENT: f"no service at {done.socket}",
            Ending.DEAD: f"removed what a killed service left at {done.socket}",
            Ending.ENDED: f"stopped the service at {done.socket}",
            Ending.KILLED: f"killed the service at {done.socket}: it did not end in {timeout:g} s",
        }[done.ending]
    )
