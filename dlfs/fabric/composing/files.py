"""Files of this machine that hold the bytes of namespaces. Their space is reserved at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dlfs._native.handle import Descriptor
from dlfs.block.file_systems import check_free_space
from dlfs.errors import DlfsError, ExistsError, NotFoundError, write_error

_NEW_SUFFIX = ".new"


def reserve_file(path: str, size_bytes: int, what: str) -> None:
    """Create a file of zeros, or leave one of that size as it is.

    The file gets its name when all of its space is reserved. What an earlier call left when it was
    killed is used.

    Args:
        path: absolute path.
        size_bytes: size of the file.
        what: the action and the target, for messages.

    Raises:
        ExistsError: there is such a file, with another size.
        NotFoundError: there is no such folder.
        SpaceError: its file system has too little space.
        DeviceError: the file cannot be made.
    """
    file = Path(path)
    if file.exists():
        found = file.stat().st_size
        if found != size_bytes:
            raise ExistsError(
                f"{what}: {path} exists with {found} bytes, not {size_bytes}; resize changes the "
                "size"
            )
        return
    new = file.with_name(file.name + _NEW_SUFFIX)
    try:
        _reserve(new, size_bytes, os.O_CREAT)
        new.rename(file)
    except OSError as error:
        if file.exists():  # another command was faster
            return
        new.unlink(missing_ok=True)
        raise _explain(error, path, size_bytes, what) from error
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def resize_file(path: str, size_bytes: int, what: str) -> None:
    """Change the size of a file; more space is reserved, and less is freed.

    Raises:
        SpaceError: its file system has too little space.
        DeviceError: the file cannot be changed.
    """
    try:
        _reserve(Path(path), size_bytes, 0)
    except OSError as error:
        raise _explain(error, path, size_bytes, what) from error


def _reserve(path: Path, size_bytes: int, flags: int) -> None:
    with Descriptor() as file:
        file.fill(os.open, path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        if os.fstat(file.value).st_size > size_bytes:
            os.ftruncate(file.value, size_bytes)
        check_free_space(file.value, size_bytes - os.fstat(file.value).st_blocks * 512)
        os.posix_fallocate(file.value, 0, size_bytes)


def _explain(error: OSError, path: str, size_bytes: int, what: str) -> DlfsError:
    if error.errno == errno.ENOENT:
        return NotFoundError(f"{what}: {Path(path).parent}: there is no such folder")
    return write_error(
        f"{what}: reserve {size_bytes} bytes for {path}: {error.strerror}", error.errno or 0
    )
