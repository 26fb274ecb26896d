"""Versions of DLFS's native libraries, and whether they can be loaded."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dlfs._native.fuse import VERSION as FUSE_VERSION
from dlfs._native.fuse import fuse_library
from dlfs._native.library import library
from dlfs.errors import NativeError

LIBRARIES = {
    "libdlfs": "",
    "libdlfs_fuse": "'dlfs mount' needs --fuse=pyfuse3",
    "libdlfs_security": "targets cannot be reached with authentication or TLS",
}
"""The libraries, and what is missing without each; empty: everything."""


def read_version(name: str) -> tuple[str, str]:
    """Load a library; return its version as text, and its path.

    Args:
        name: one of ``LIBRARIES``.

    Raises:
        NativeError: it is missing, cannot be loaded, or has another version.
    """
    if name == "libdlfs":
        number = library().dlfs_version()
        text = f"libdlfs {number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"
        return text, os.environ.get("DLFS_LIBRARY") or _path(name)
    if name == "libdlfs_fuse":
        fuse_library()
        return f"libdlfs_fuse {FUSE_VERSION}", os.environ.get("DLFS_FUSE_LIBRARY") or _path(name)
    return f"libdlfs_security, {_describe_security()}", _path(name)


def _path(name: str) -> str:
    return str(Path(__file__).with_name(f"{name}.so"))


def load_security() -> ctypes.CDLL:
    """Load libdlfs_security.

    Raises:
        NativeError: this DLFS was built without it, or it cannot be loaded.
    """
    path = _path("libdlfs_security")
    if not os.path.exists(path):
        raise NativeError(f"load {path}: this dlfs was built without it")
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise NativeError(f"load {path}: {error}") from error
    get = loaded.dlfs_security_functions
    get.restype = ctypes.c_void_p
    if not get():
        raise NativeError(f"load {path}: OpenSSL does not start")
    return loaded


def _describe_security() -> str:
    """Load libdlfs_security, and return the version of its OpenSSL."""
    loaded = load_security()
    try:
        describe = loaded.OpenSSL_version  # of a library that it is linked to
    except AttributeError:
        return "with OpenSSL in it"
    describe.restype = ctypes.c_char_p
    text: bytes = describe(0)
    return text.decode()
