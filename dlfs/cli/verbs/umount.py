"""``dlfs umount``: undo a mount."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.output import note


def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where it is mounted.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-z", help="Even while files on it are open.")
    ] = False,
) -> None:
    """Unmount what 'dlfs mount' mounted."""
    from dlfs.mount.mountpoint import unmount

    note(f"unmounted {unmount(directory, lazy=lazy)}")
