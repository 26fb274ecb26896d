"""Inode numbers: plain arithmetic, nothing remembered.

::

    63        48 47      36 35                                 0
    | slot      | depth    | index                             |

The slot is a dataset's number in one mount (0 belongs to what is in no dataset: the root, and what
is being written below ``incoming``), the index is a sample's. Depth
0 is that sample's file; depth d >= 1 is the directory named by the first d-1 components of the path
of sample `index`, which is the first sample below it, so that every directory has exactly one
number; depth 1 is the dataset's own. Since a number says everything, `forget` costs nothing and the
mount's memory does not grow with the files seen. A slot is not used again: the kernel may know
files of it for as long as the mount lives, and would be given another dataset's.

Only what is not sealed yet has numbers that are given out one by one (``INCOMING`` and up): it lies
in slot 0 at a depth over 0, where no sample can be. File handles below ``incoming`` are of the same
range, so that one test tells which side a request is for.

Source: pyfuse3 documentation, "Operations.lookup" (numbers need only be unique while the kernel
knows them).
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = 1

INDEX_BITS = 36
DEPTH_BITS = 12
SLOT_BITS = 16

INDEX_MAX = (1 << INDEX_BITS) - 1
DEPTH_MAX = (1 << DEPTH_BITS) - 1
SLOT_MAX = (1 << SLOT_BITS) - 1

FILE_DEPTH = 0
DATASET_DEPTH = 1

INCOMING = 1 << INDEX_BITS
"""The directory ``incoming``; what is below it has the numbers that follow."""

_DEPTH_SHIFT = INDEX_BITS
_SLOT_SHIFT = INDEX_BITS + DEPTH_BITS


class Place(NamedTuple):
    """What an inode number says."""

    slot: int
    depth: int
    sample_index: int


def pack(slot: int, depth: int, index: int) -> int:
    """The inode number of a file (depth 0) or a directory; all three within their limits."""
    return slot << _SLOT_SHIFT | depth << _DEPTH_SHIFT | index


def unpack(inode: int) -> Place:
    """The slot, depth and index of an inode number; those of the root are (0, 0, 1)."""
    return Place(inode >> _SLOT_SHIFT, inode >> _DEPTH_SHIFT & DEPTH_MAX, inode & INDEX_MAX)


def is_incoming(number: int) -> bool:
    """Whether an inode, or a file handle, is of what is not sealed yet."""
    return INCOMING <= number < 1 << _SLOT_SHIFT
