"""The part of the options of array formats that opens files, and is the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dlfs.ingest.arrays.file import ArrayOptions
from dlfs.ingest.arrays.rows import ArraySource
from dlfs.ingest.registry import load_package


class FileOptions(ArrayOptions):
    """Base of the options of a format, which says how its files are opened.

    Attributes:
        file_class: class of an open file, made of its path.
        packages: modules that it needs.
        extra: extra of dlfs that installs them.
    """

    file_class: ClassVar[type[Any]]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""

    def open(self, paths: Sequence[str]) -> ArraySource:
        """Open files of this format as one source; see ``ArraySource``."""
        for name in self.packages:
            load_package(name, extra=self.extra, what=f"import {paths[0]}")
        return ArraySource(paths, self.file_class, self)
