"""Inode numbers of a mount: a dataset's number, a depth and a sample index in one integer.

::

    63        48 47      36 35                                 0
    | dataset   | depth    | index                             |

- dataset: number of the dataset in this mount, from 1. Number 0 has the root and ``incoming``,
  which belong to no dataset. A number is never used for a second dataset, because the kernel may
  remember files of the first one as long as the mount exists.
- index: a sample of the dataset.
- depth: 0 for the file of that sample. Depth d >= 1 is a directory: the first d-1 components of the
  sample's path. The sample is the first one below the directory, so each directory has one number;
  depth 1 is the dataset's top directory.

A number says everything about its file, so the server need not remember the files that the kernel
has seen, and ``forget`` costs nothing.

Source: pyfuse3 documentation, "Operations.lookup": numbers must be unique while the kernel knows
them.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = 1

INDEX_BITS = 36
DEPTH_BITS = 12
DATASET_BITS = 16

INDEX_MAX = (1 << INDEX_BITS) - 1
DEPTH_MAX = (1 << DEPTH_BITS) - 1
DATASET_MAX = (1 << DATASET_BITS) - 1

FILE_DEPTH = 0
DATASET_DEPTH = 1

INCOMING = 1 << INDEX_BITS
"""Inode number of the symbolic link ``incoming``."""

_DEPTH_SHIFT = INDEX_BITS
_DATASET_SHIFT = INDEX_BITS + DEPTH_BITS


class InodeParts(NamedTuple):
    """The three parts of an inode number."""

    dataset: int
    depth: int
    sample_index: int


def pack(dataset: int, depth: int, index: int) -> int:
    """Return the inode number of a file (depth 0) or directory; each part within its limit."""
    return dataset << _DATASET_SHIFT | depth << _DEPTH_SHIFT | index


def unpack(inode: int) -> InodeParts:
    """Return the parts of an inode number; the root's are (0, 0, 1)."""
    return InodeParts(inode >> _DATASET_SHIFT, inode >> _DEPTH_SHIFT & DEPTH_MAX, inode & INDEX_MAX)
