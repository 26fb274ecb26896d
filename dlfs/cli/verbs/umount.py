"""``dlfs umount``: undoes a mount."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.output import note


def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Mount point.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-z", help="Unmount even while files are open.")
    ] = False,
) -> None:
    """Unmount a directory that 'dlfs mount' mounted."""
    from dlfs.mount.mountpoint import unmount

    note(f"unmounted {unmount(directory, lazy=lazy)}")
