"""``dlfs import-worker``: a worker of an import that runs elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.output import note


def import_worker(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0)] = 600.0,
) -> None:
    """Work for an import that was started with --join-file FILE, until it ends.

    Any number of workers may join at any time, on any host that reaches the source and the
    volume. A worker that is killed loses what it had not reported; others go on with it. The exit
    code is 0 if the import was completed, and the import's if it failed.

    Args:
        file: The file, in a directory that this host shares with that of the import.
        wait: Longest time to wait for the import to begin, or to be resumed, in seconds.

    Examples:
        dlfs import-worker /shared/photos.join
    """
    from dlfs.ingest.workers.joining import join_import

    join_import(file, wait_s=wait, say=note)
