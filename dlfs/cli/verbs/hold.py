"""``dlfs hold``: keeps mounts whose servers run in other containers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def hold(
    folder: Annotated[str, typer.Argument(metavar="FOLDER")],
) -> None:
    """Keep mounts while their servers, in other containers, come and go; serves nothing itself.

    Args:
        folder: Folder of the sockets through which mounts are deposited and served; made if it is
            not there. docs/mount.md says which container gets which part of it.

    Examples:
        dlfs hold /run/dlfs/holder
    """
    # A new interpreter without the modules of the command line: it runs for long, and is small.
    package = str(Path(__file__).parents[3])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "dlfs.mount.supervise.holder_process", folder],
        {**os.environ, "PYTHONPATH": search},
    )
