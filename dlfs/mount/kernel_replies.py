"""Replies to requests for what lies above the datasets, as the kernel's protocol has them.

Source: Linux, include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from dlfs.format.constants import COMPONENT_BYTES_MAX
from dlfs.mount.list_directories import Attributes
from dlfs.mount.mount_view import Space
from dlfs.mount.options import MountOptions
from dlfs.mount.view import ROOT_SECONDS

LOOKUP, GETATTR, READLINK, STATFS, READDIR, READDIRPLUS = 1, 3, 5, 17, 28, 44
"""Operations."""

BLOCK_BYTES = 4096

_ENTRY = struct.Struct("=QQQQII")  # inode, generation, validity in seconds and nanoseconds
_ATTRIBUTES = struct.Struct("=6Q10I")
_VALIDITY = struct.Struct("=QII")
_NAME = struct.Struct("=QQII")  # inode, position, length of the name, type
_SPACE = struct.Struct("=5Q4I24x")
_NAME_ALIGNMENT = 8
_TYPE_SHIFT = 12  # of the type of a file in its mode


def _split(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1_000_000_000)


def _attributes(found: Attributes, options: MountOptions) -> bytes:
    seconds, nanoseconds = divmod(found.modified_ns, 1_000_000_000)
    return _ATTRIBUTES.pack(
        *(found.inode, found.size_bytes, 0),
        *(seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds),
        *(found.mode, 1, options.uid, options.gid, 0, BLOCK_BYTES, 0),
    )


def of_attributes(found: Attributes, options: MountOptions) -> bytes:
    """Return the reply to GETATTR."""
    return _VALIDITY.pack(*_split(found.attribute_seconds), 0) + _attributes(found, options)


def of_entry(found: Attributes, options: MountOptions) -> bytes:
    """Return the reply to LOOKUP."""
    (entry_s, entry_ns), (attribute_s, attribute_ns) = map(
        _split, (found.entry_seconds, found.attribute_seconds)
    )
    head = _ENTRY.pack(found.inode, found.generation, entry_s, attribute_s, entry_ns, attribute_ns)
    return head + _attributes(found, options)


def of_no_entry() -> bytes:
    """Return the reply to LOOKUP of a name that does not exist, which the kernel caches as long."""
    seconds, nanoseconds = _split(ROOT_SECONDS)
    return _ENTRY.pack(0, 0, seconds, 0, nanoseconds, 0) + bytes(_ATTRIBUTES.size)


def of_listing(
    entries: Iterable[tuple[bytes, Attributes, int]],
    options: MountOptions,
    *,
    size: int,
    plus: bool,
) -> bytes:
    """Return the reply to READDIR, of at most ``size`` bytes; ``plus``: to READDIRPLUS."""
    reply = bytearray()
    for name, found, position in entries:
        entry = of_entry(found, options) if plus else b""
        kind = (found.mode >> _TYPE_SHIFT) & 0o17
        entry += _NAME.pack(found.inode, position, len(name), kind) + name
        entry += bytes(-len(entry) % _NAME_ALIGNMENT)
        if len(reply) + len(entry) > size:
            break
        reply += entry
    return bytes(reply)


def of_space(space: Space) -> bytes:
    """Return the reply to STATFS."""
    free = space.free_bytes // BLOCK_BYTES
    return _SPACE.pack(
        *(space.capacity_bytes // BLOCK_BYTES, free, free, space.sample_count, 0),
        *(BLOCK_BYTES, COMPONENT_BYTES_MAX, BLOCK_BYTES, 0),
    )
