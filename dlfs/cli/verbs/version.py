"""``dlfs version``: shows the installed versions."""

from __future__ import annotations

import platform

import dlfs
from dlfs.cli.options import JsonOption
from dlfs.cli.output import print_json


def version(json: JsonOption = False) -> None:
    """Show the versions of DLFS, its library, Python and the kernel.

    Examples:
        dlfs version
        dlfs version --json
    """
    from dlfs._native.library import library  # numpy and libdlfs are slow to load

    number = library().dlfs_version()
    found = {
        "dlfs": dlfs.__version__,
        "libdlfs": f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}",
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    if json:
        print_json(found)
    else:
        print("\n".join(f"{name} {value}" for name, value in found.items()))
