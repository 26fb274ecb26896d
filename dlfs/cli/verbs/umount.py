"""``dlfs umount``: undoes a mount."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.output import note


def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    lazy: Annotated[bool, typer.Option("--lazy", "-z")] = False,
) -> None:
    """Unmount a directory that 'dlfs mount' mounted.

    Args:
        directory: Mount point.
        lazy: Unmount even while files are open.

    Examples:
        dlfs umount /mnt/photos
        dlfs umount --lazy /mnt/photos
    """
    from dlfs.mount.mountpoint import unmount

    path, holders = unmount(directory, lazy=lazy)
    note(f"unmounted {path}")
    if holders:
        note(
            f"its server serves on: other mount namespaces, such as those of containers, have a "
            f"copy of the mount, which they got when they were made: process {', '.join(holders)}"
        )
