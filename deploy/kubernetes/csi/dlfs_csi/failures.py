"""Failures of calls, and the gRPC code of each.

``code_of`` maps the errors of dlfs, and ``code_of_exit`` the exit codes of ``dlfs mount``, whose
process is all that the driver sees of a server.
"""

from __future__ import annotations

from enum import IntEnum

from dlfs.cli.exits import ExitCode
from dlfs.errors import (
    AuthenticationError,
    DeviceError,
    DeviceTimeoutError,
    DlfsError,
    ExistsError,
    FormatError,
    LimitError,
    LockedError,
    NotFoundError,
    ServiceLostError,
    SpaceError,
    UsageError,
)


class Code(IntEnum):
    """Codes of gRPC."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallError(Exception):
    """A call fails.

    Args:
        code: code of gRPC.
        message: action, object, expected and actual value; no secret.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


_BY_ERROR: dict[type[Exception], Code] = {
    UsageError: Code.INVALID_ARGUMENT,
    NotFoundError: Code.NOT_FOUND,
    ExistsError: Code.ALREADY_EXISTS,
    LockedError: Code.ABORTED,
    SpaceError: Code.RESOURCE_EXHAUSTED,
    LimitError: Code.OUT_OF_RANGE,
    AuthenticationError: Code.UNAUTHENTICATED,
    DeviceTimeoutError: Code.UNAVAILABLE,
    DeviceError: Code.UNAVAILABLE,
    FormatError: Code.DATA_LOSS,
    ServiceLostError: Code.UNAVAILABLE,
    DlfsError: Code.INTERNAL,
}

_BY_EXIT = {
    ExitCode.USAGE: Code.INVALID_ARGUMENT,
    ExitCode.NOT_FOUND: Code.NOT_FOUND,
    ExitCode.DAMAGE: Code.DATA_LOSS,
    ExitCode.LOCKED: Code.ABORTED,
    ExitCode.SPACE: Code.RESOURCE_EXHAUSTED,
    ExitCode.DEVICE: Code.UNAVAILABLE,
    ExitCode.KEY: Code.UNAUTHENTICATED,
}


def code_of(error: Exception) -> Code:
    """Return the code of an error: that of its nearest base in the table."""
    for base in type(error).__mro__:
        if base in _BY_ERROR:
            return _BY_ERROR[base]
    return Code.INTERNAL


def code_of_exit(status: int) -> Code:
    """Return the code of a server that ended with an exit status; negative: a signal."""
    return _BY_EXIT.get(ExitCode(status), Code.INTERNAL) if status in _EXITS else Code.INTERNAL


_EXITS = frozenset(map(int, ExitCode))
