"""Finds, loads and checks libdlfs, and converts its codes to this package's errors.

The library is loaded on first use, not on import. ``ctypes.CDLL`` releases the GIL around every
call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlfs._native import abi
from dlfs.errors import (
    AuthenticationError,
    ChecksumError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    DeviceTimeoutError,
    DlfsError,
    FormatError,
    LeaseLostError,
    LimitError,
    NativeError,
    NotFoundError,
    ServiceLostError,
    TruncatedError,
    UsageError,
    write_error,
)

_FILE_NAME = "libdlfs.so"

LEASE_OVER = -errno.EKEYEXPIRED
"""Code of a write that was not sent because its writer's lease or grant had ended."""

_CODES: dict[int, type[DlfsError]] = {
    abi.E_CHECKSUM: ChecksumError,
    abi.E_FORMAT: FormatError,
    abi.E_TRUNCATED: TruncatedError,
    abi.E_LOST: DeviceLostError,
    abi.E_TIMEOUT: DeviceTimeoutError,
    abi.E_CLOSED: ClosedError,
    abi.E_LIMIT: LimitError,
    abi.E_NOT_FOUND: NotFoundError,
    abi.E_PROTOCOL: DeviceError,
    abi.E_DIGEST: DeviceError,
    abi.E_SERVICE: ServiceLostError,
    abi.E_AUTH: AuthenticationError,
    -errno.EINVAL: UsageError,
}

RESERVATION_CONFLICT = -errno.EBADE
"""Code of NVMe's status Reservation Conflict, the same as in Linux."""

_LEASE_OVER = "the lease or grant of this writer was over before it was sent"
_FENCED = "another host has reserved the namespace and fenced this one off"

_ERRNOS = {
    abi.E_LOST: errno.ENODEV,
    abi.E_TIMEOUT: errno.ETIMEDOUT,
    abi.E_PROTOCOL: errno.EPROTO,
    abi.E_DIGEST: errno.EBADMSG,
    abi.E_AUTH: errno.EACCES,
}
"""The errno of a DeviceError for one of the library's own codes."""


def bind(
    loaded: ctypes.CDLL, prototypes: Mapping[str, tuple[Any, Sequence[Any]]], path: Path
) -> None:
    """Set the prototypes of all functions of a library that was loaded from a path.

    Raises:
        NativeError: it lacks one.
    """
    for name, (restype, argtypes) in prototypes.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise NativeError(f"load {path}: expected the function {name}, got none") from error
        function.restype, function.argtypes = restype, argtypes


def _how_to_get_it() -> str:
    checkout = Path(__file__).parents[2]
    if not (checkout / "native" / "CMakeLists.txt").exists():
        return "reinstall dlfs"
    return (
        f"{checkout} is a checkout, which Python run there takes before an installed dlfs: "
        "`make build` builds it, or run Python elsewhere"
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Load libdlfs, once.

    Raises:
        NativeError: the library is missing, cannot be loaded, or is of another version.
    """
    path = Path(os.environ.get("DLFS_LIBRARY") or Path(__file__).with_name(_FILE_NAME))
    try:
        loaded = ctypes.CDLL(str(path), use_errno=False)
    except OSError as error:
        raise NativeError(f"load {path}: {error}; {_how_to_get_it()}") from error
    bind(loaded, abi.PROTOTYPES, path)
    got = loaded.dlfs_version()
    version = (got >> 16, got >> 8 & 0xFF, got & 0xFF)
    if version[:2] != abi.VERSION[:2]:
        raise NativeError(f"load {path}: expected version {abi.VERSION}, got {version}")
    return loaded


def describe(code: int) -> str:
    """Return a short phrase for a code that libdlfs returned."""
    text: bytes = library().dlfs_strerror(code)
    return text.decode()


def error_for(code: int, message: str, *, reason: str = "") -> DlfsError:
    """Make the error of a code, with a message and a reason: by default the library's phrase."""
    text = f"{message}: {reason or describe(code)}"
    if code == RESERVATION_CONFLICT:
        return LeaseLostError(f"{message}: {_FENCED}", -code)
    if code == LEASE_OVER:
        return LeaseLostError(f"{message}: {_LEASE_OVER}", -code)
    kind = _CODES.get(code)
    if kind is None and code > -10000:
        return write_error(text, -code)
    if kind is None:
        return NativeError(f"{text} (code {code})")
    if issubclass(kind, DeviceError):
        return kind(text, _ERRNOS[code])
    return kind(text)


def check(code: int, message: str) -> int:
    """Return a code that is not negative; raise the error of any other.

    Args:
        code: result of a libdlfs function.
        message: the action and its object, for the error.

    Raises:
        DlfsError: the code is negative.
    """
    if code < 0:
        raise error_for(code, message)
    return code
