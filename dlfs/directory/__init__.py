"""The sample directory: maps paths to indices, and indices to locations.

``DirectoryBuilder`` collects the samples of a dataset that is being written; ``FrozenDirectory`` is
the static tree of a sealed one, and ``PartDirectory`` that of a part of each sample.
``merge_sorted`` merges samples from sources that have them in the order of their paths.
``load_directory`` brings the tree into memory, once for all processes of a node.
"""

from __future__ import annotations

from dlfs._native.paths import PathBlock
from dlfs.directory.builder import DirectoryBuilder, FrozenParts, Location
from dlfs.directory.checked_ranges import CheckedRanges, checked_ranges
from dlfs.directory.frozen import DirectoryChild, Entry, FrozenDirectory
from dlfs.directory.indices import as_array, as_indices, check_indices, check_position, find_outside
from dlfs.directory.merging import merge_sorted
from dlfs.directory.neighbours import near_paths
from dlfs.directory.parts import PartDirectory
from dlfs.directory.sharing import DirectoryIdentity, DirectorySizes, load_directory

__all__ = [
    "CheckedRanges",
    "DirectoryBuilder",
    "DirectoryChild",
    "DirectoryIdentity",
    "DirectorySizes",
    "Entry",
    "FrozenDirectory",
    "FrozenParts",
    "Location",
    "PartDirectory",
    "PathBlock",
    "as_array",
    "as_indices",
    "check_indices",
    "check_position",
    "checked_ranges",
    "find_outside",
    "load_directory",
    "merge_sorted",
    "near_paths",
]
