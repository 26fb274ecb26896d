"""Suggestions for a path that no sample has: similar paths of the dataset.

Only a few names near the path's position in the sorted order are compared, so that the answer takes
no longer in a large dataset than in a small one.
"""

from __future__ import annotations

from dlfs.base.wording import close_matches, join_words, quote
from dlfs.directory.frozen import FrozenDirectory
from dlfs.format.paths import display

NEIGHBOURS = 16
"""Names compared at each place."""

HOW_TO_LIST = "'dlfs ls' lists the samples"


def near_paths(directory: FrozenDirectory, path: bytes) -> str:
    """Describe paths that may have been meant instead of one that no sample has.

    Args:
        directory: directory of the dataset.
        path: the path that was not found.

    Returns:
        The end of a message, such as ``did you mean 'a/one.txt'?``.

    Raises:
        FormatError: the names are malformed.
    """
    plain = path.strip(b"/").removeprefix(b"./")
    if plain and directory.is_directory(plain):
        return "it is a directory; 'dlfs ls' lists what is in it"
    if directory.find_one(plain) >= 0:
        return f"did you mean {quote(plain)}?"
    first, end = directory.subtree_range(plain.rpartition(b"/")[0])
    at = directory.lower_bound(plain)
    around = range(max(0, at - NEIGHBOURS // 2), min(len(directory), at + NEIGHBOURS // 2))
    siblings = range(first, min(end, first + NEIGHBOURS))
    names = {
        display(name)
        for span in (around, siblings)
        for name in directory.names(span.start, len(span))
    }
    near = close_matches(display(plain), sorted(names))
    return f"did you mean {join_words([*map(quote, near)], 'or')}?" if near else HOW_TO_LIST
