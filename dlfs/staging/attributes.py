"""Converts attributes between the kernel's form (pyfuse3) and that of system calls."""

from __future__ import annotations

import os

from pyfuse3 import EntryAttributes, SetattrFields

from dlfs.staging.entries import Change

KERNEL_CACHE_SECONDS = 1.0
"""Time for which the kernel may cache names and attributes below ``incoming``, in seconds."""


def requested_change(attr: EntryAttributes, fields: SetattrFields) -> Change:
    """Convert the attributes that the kernel wants to set."""
    return Change(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size_bytes=attr.st_size if fields.update_size else None,
        access_ns=attr.st_atime_ns if fields.update_atime else None,
        modify_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )


def entry_of(number: int, status: os.stat_result) -> EntryAttributes:
    """Convert the attributes of a file in the staging area for the kernel."""
    entry = EntryAttributes()
    entry.st_ino = number
    entry.generation = 0
    entry.entry_timeout = entry.attr_timeout = KERNEL_CACHE_SECONDS
    entry.st_mode = status.st_mode
    entry.st_nlink = status.st_nlink
    entry.st_uid = status.st_uid
    entry.st_gid = status.st_gid
    entry.st_rdev = 0
    entry.st_size = status.st_size
    entry.st_blksize = status.st_blksize
    entry.st_blocks = status.st_blocks
    entry.st_atime_ns = status.st_atime_ns
    entry.st_mtime_ns = status.st_mtime_ns
    entry.st_ctime_ns = status.st_ctime_ns
    return entry
