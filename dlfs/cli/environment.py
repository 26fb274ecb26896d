"""Environment variables of the command line, and the default volume that one of them names.

If ``DLFS_VOLUME`` is set, VOLUME may be left out. ``complete_arguments`` adds it before the command
line is parsed. It decides by the number of arguments if that is enough, and else by whether the
first one is written as a volume. An argument that could be either is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dlfs.base.memory_limit import MEMORY_VARIABLE
from dlfs.errors import DlfsError, NotFoundError, UsageError

VOLUME_VARIABLE = "DLFS_VOLUME"

VARIABLES = (
    (
        VOLUME_VARIABLE,
        "Default of VOLUME for all verbs but 'format'. An argument with a slash, a comma or a "
        "scheme, or the name of a file, is a VOLUME; other words are datasets.",
    ),
    (
        MEMORY_VARIABLE,
        "Default sample memory of each open volume, such as 1GiB. A service has --cache instead.",
    ),
    ("DLFS_DEBUG", "1: show tracebacks of errors, as --debug does."),
    ("DLFS_LIBRARY", "Path of libdlfs, instead of the one in the package."),
    ("DLFS_KEYS", "Directory of this host's keys, which the options of NVMe/TCP URIs name."),
    ("DLFS_FUSE_LIBRARY", "Path of libdlfs_fuse, which serves native mounts."),
    ("DLFS_SPDK_LIBRARY", "Path of libdlfs_spdk, which reads 'spdk:' devices."),
)
"""Name and meaning of each variable, for ``dlfs --help``."""

DEFAULTED = "dlfs.defaulted"
"""Key in a context's ``meta``: the volume, if it came from the environment."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def complete_arguments(
    command: Any, ctx: Any, args: list[str], given: Mapping[str, Any]
) -> list[str]:
    """Add the default volume to a command line that has none.

    Args:
        command: the verb.
        ctx: context of the verb; its ``meta`` gets a volume that was added.
        args: words of the command line after the verb.
        given: values on the command line, by the names of parameters.

    Raises:
        UsageError: an argument may be a volume as well as a dataset.
    """
    default = os.environ.get(VOLUME_VARIABLE)
    parameters = [each for each in command.params if each.param_type_name == "argument"]
    if not default or not parameters:
        return args
    values = [word for each in parameters for word in _words(given.get(each.name))]
    first = parameters[0].name
    # Arguments that follow "volumes" take the last words: with as many words, no volume is given.
    only_later = first == "volumes" and len(values) == len(parameters) - 1
    if only_later or (first == "volume" and not _has_first(parameters, values, default)):
        args = [default, *args]
    elif first == "arguments" and values and not _has_last(values):
        args = [*args, default]
    else:
        return args
    ctx.meta[DEFAULTED] = default
    return args


def _words(value: object) -> list[str]:
    """Return the words of one argument; none if it is missing."""
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, Sequence) else []


def _has_first(parameters: list[Any], values: list[str], default: str) -> bool:
    """Return True if the first of the arguments is a volume."""
    many = any(each.nargs < 0 for each in parameters)
    if not values or (not many and len(values) == len(parameters)):
        return bool(values)
    if not many and len({each.required for each in parameters}) == 1:
        return False  # none can be left out alone: one is missing, and it is the volume
    word = values[0]
    if "/" in word or "," in word or _SCHEME.match(word):
        return True
    if not os.path.exists(word) or os.path.isdir(word):
        return False
    if _has_dataset(default, word):
        raise UsageError(
            f"read the command line: {word} is a file here and a dataset of {default} "
            f"({VOLUME_VARIABLE}); write ./{word} for the file, or name the volume of the dataset"
        )
    return True


def _has_dataset(volume_uri: str, text: str) -> bool:
    from dlfs.cli.options import open_dataset

    try:
        with open_dataset(volume_uri, text):
            return True
    except NotFoundError:
        return False


def _has_last(values: list[str]) -> bool:
    """Return True if the last of the arguments of import is a volume."""
    from dlfs.cli.options import open_volume

    if len(values) < 2:
        return False
    if _SCHEME.match(values[-1]):
        return True
    try:
        open_volume(values[-1]).close()
    except (DlfsError, OSError):
        # A missing file was meant as the volume; a pattern is a source.
        return not (os.path.exists(values[-1]) or "{" in values[-1])
    return True
