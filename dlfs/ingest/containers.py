"""Recognises folders whose files are containers of samples, which a folder imports as samples.

A folder of Parquet files, archives or the like is imported file by file, unless the caller names
their format. That is seldom meant, so that it is warned of. So is a folder with the files of a
format that could not be recognised, such as MDS shards without their index.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate

from dlfs.ingest.registry import FORMATS
from dlfs.ingest.source import show

_log = logging.getLogger(__name__)

_OTHERS = {
    "mds": ("*.mds", "*.mds.*"),
    "lance": ("*.lance",),
    "orc": ("*.orc",),
    "avro": ("*.avro",),
    "zarr": ("zarr.json", ".zgroup", ".zarray"),
    "lmdb": ("data.mdb",),
    "adios2": ("md.idx",),
}
"""Further patterns of file names, in lower case, by the name of a format."""
_MARKS = frozenset(["zarr", "lmdb", "adios2", "lance"])
"""Formats of which one file of such a name shows that a folder in the folder is one."""
_NO_CONTAINERS = frozenset(["list"])

_ADVICE = {
    "mds": "MDS shards are imported with the folder of their index.json, which is missing here",
    "lance": "Lance is imported as Parquet files, which its library writes",
    "orc": "ORC is imported as Parquet files",
    "avro": "Avro is imported as Parquet files",
}


def warn_of_containers(name: str, paths: Iterable[bytes]) -> None:
    """Log a warning if most files of a folder look like containers of samples.

    Args:
        name: path of the folder.
        paths: paths of its files.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, bytes] = {}
    total = 0
    for path in paths:
        total += 1
        found = _container_format(path)
        if found is not None:
            counts[found] += 1
            examples.setdefault(found, path)
    for found, count in counts.most_common(1):
        if 2 * count < total and found not in _MARKS:
            return
        advice = _ADVICE.get(
            found, f"--format {found} imports what is in them, with their own folder as the source"
        )
        _log.warning(
            "import %s: %d of %d files look like format %s, such as %s; each file becomes one "
            "sample; %s; --format folder imports files without this warning",
            name, count, total, found, show(examples[found]), advice,
        )  # fmt: skip


def _container_format(path: bytes) -> str | None:
    """Return the format that the name of a file, or of a folder above it, suggests."""
    lower = path.lower()
    if b".lance/" not in lower and not _ANY.match(lower[lower.rfind(b"/") + 1 :]):
        return None  # as of most files
    parts = path.decode("utf-8", "surrogateescape").lower().split("/")
    if any(part.endswith(".lance") for part in parts):
        return "lance"
    return next(
        (name for name, pattern in _PATTERNS if fnmatchcase(parts[-1], pattern)),
        None,
    )


_PATTERNS = [
    *((name, pattern) for name, patterns in _OTHERS.items() for pattern in patterns),
    *(
        (row.name, pattern)
        for row in FORMATS
        if row.name not in _NO_CONTAINERS
        for pattern in row.names
    ),
]
"""Pairs of a format's name and a pattern of file names."""

_ANY = re.compile("|".join(translate(pattern) for _, pattern in _PATTERNS).encode())
"""Matches the file names that one of the patterns matches."""
