"""Exit codes: one table, for ``dlfs --help``, docs/command-line.md and ``main``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dlfs.errors import (
    AuthenticationError,
    DeviceError,
    DlfsError,
    FormatError,
    LockedError,
    NotFoundError,
    SpaceError,
    UsageError,
    write_error,
)


class ExitCode(IntEnum):
    """Exit codes of ``dlfs``."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGE = 4
    LOCKED = 5
    SPACE = 6
    DEVICE = 7
    KEY = 8
    INTERRUPTED = 130
    PIPE = 141


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    code: ExitCode
    meaning: str
    errors: tuple[type[DlfsError], ...] = ()
    """Errors with this exit code, and their subclasses unless those have a row of their own."""


EXITS = (
    Row(ExitCode.OK, "done"),
    Row(
        ExitCode.FAILURE,
        "any failure that has no code of its own; diff: the datasets differ; doctor: there are "
        "warnings or errors",
        (DlfsError,),
    ),
    Row(ExitCode.USAGE, "the command line is wrong", (UsageError,)),
    Row(ExitCode.NOT_FOUND, "no such volume member, dataset or sample", (NotFoundError,)),
    Row(
        ExitCode.DAMAGE,
        "damage: a checksum or the format is wrong, verify found any, or bad samples were left out",
        (FormatError,),
    ),
    Row(ExitCode.LOCKED, "another writer holds the volume", (LockedError,)),
    Row(ExitCode.SPACE, "too little free space on the volume or a file system", (SpaceError,)),
    Row(ExitCode.DEVICE, "a device failed, or a file could not be read or written", (DeviceError,)),
    Row(
        ExitCode.KEY,
        "a key is missing or not usable, or a target refused it, or this host refused the target",
        (AuthenticationError,),
    ),
    Row(
        ExitCode.INTERRUPTED,
        "interrupted (Ctrl-C); the volume is as it was unless the message says otherwise",
    ),
    Row(ExitCode.PIPE, "the reader of the output closed it"),
)  # fmt: skip

_BY_ERROR = {error: row.code for row in EXITS for error in row.errors}


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error: that of its nearest base in the table.

    A plain OSError, such as one of a redirected output, counts as a write error.
    """
    if isinstance(error, OSError) and not isinstance(error, DlfsError):
        error = write_error(str(error), error.errno or 0)
    for base in type(error).__mro__:
        if base in _BY_ERROR:
            return _BY_ERROR[base]
    return ExitCode.FAILURE
