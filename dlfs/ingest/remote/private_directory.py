"""Directories that one user has alone: made with mode 0700, or refused.

What a program writes in a directory of another user, or through links that others may make there,
goes where they say. ``open_private_directory`` therefore accepts a directory of the user's own that
no one else can write to, in a directory that only the user, root, or nobody else can rename it in.
"""

from __future__ import annotations

import os
import stat

from dlfs._native.handle import Descriptor
from dlfs.base.closing import closed_on_error
from dlfs.errors import UsageError
from dlfs.ingest.source import device_errors

OWNER_ONLY = 0o700
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private_directory(path: str, action: str) -> Descriptor:
    """Make a directory with mode 0700, or check the one that is there; return it opened.

    Missing directories above it are made with the same mode. One of the user's own that others may
    read gets the mode 0700.

    Args:
        path: absolute path of the directory.
        action: action and object, which begin the message of an error.

    Raises:
        UsageError: it is a link, belongs to another user, or others may write to it; or others may
            put another directory in its place.
        DeviceError: it cannot be made.
    """
    what = f"{action}: make the directory {path}"
    with device_errors(what):
        _make(path)
        _check_parent(os.stat(os.path.dirname(path)), os.path.dirname(path), action)
        if os.path.islink(path) or not os.path.isdir(path):
            raise UsageError(f"{action}: expected a directory, got a link or a file: {path}")
        opened = Descriptor()
        opened.fill(os.open, path, _FLAGS)
    with closed_on_error(opened), device_errors(f"{what} private"):
        status = os.fstat(opened.value)
        _check_own(status, path, action)
        if stat.S_IMODE(status.st_mode) != OWNER_ONLY:
            os.fchmod(opened.value, OWNER_ONLY)
    return opened


def _make(path: str) -> None:
    """Make a directory, and those above it that are missing."""
    if os.path.lexists(path):
        return
    _make(os.path.dirname(path))
    try:
        os.mkdir(path, OWNER_ONLY)
    except FileExistsError:
        return  # made meanwhile; it is checked like any other


def _check_own(status: os.stat_result, path: str, action: str) -> None:
    user = os.geteuid()
    if status.st_uid != user:
        raise UsageError(
            f"{action}: expected a directory of user {user}, got one of user {status.st_uid}: "
            f"{path}; name another one"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:  # there may be links of others in it
        raise UsageError(
            f"{action}: expected a directory of mode 0700, got {stat.S_IMODE(status.st_mode):04o}: "
            f"{path}, to which others may write; remove it, or name another one"
        )


def _check_parent(status: os.stat_result, path: str, action: str) -> None:
    """Check that no other user can put another directory in the place of one in this directory."""
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{action}: expected a directory of user {os.geteuid()} or root, got one of user "
            f"{status.st_uid}: {path}; name another one"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UsageError(
            f"{action}: expected a directory to which not everyone may write, got {path}; name "
            "another one"
        )
