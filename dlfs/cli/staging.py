"""The staging area that a command line names by its mount or its service."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Mount point of 'dlfs mount --incoming', or unix:SOCKET of a service that has one.",
    ),
]


def is_service(target: str) -> bool:
    """Return True if a target is a service rather than a mount point."""
    from dlfs.service.sockets import SCHEME

    return target.startswith(SCHEME)


def connect_incoming(target: str, what: str) -> socket.socket:
    """Connect to the server of a staging area.

    Args:
        target: mount point, or ``unix:SOCKET`` of a service.
        what: the action, for messages.

    Raises:
        UsageError: there is no staging area.
        DeviceError: its server does not run, or refuses this user.
    """
    if is_service(target):
        from dlfs.service.client import connect_incoming as of_service

        return of_service(target)
    from dlfs.mount.incoming_client import connect_incoming as of_mount

    return of_mount(target, what)
