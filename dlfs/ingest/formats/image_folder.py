"""Imports a folder of class folders: every file is a sample, its first folder its class.

This is the layout of torchvision's ``ImageFolder``. The names of the top folders, sorted as text,
are the classes. The attribute ``label`` is the number of a sample's class among them, ``class`` its
name. Paths begin with the class. Hidden files and folders, whose names begin with a dot, are left
out and counted with their names; all others are imported, and a file outside all class folders is
an error. Anything else is as in ``folder``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import UsageError
from dlfs.ingest.files import join_shown
from dlfs.ingest.formats.folder import FolderOptions, FolderSource
from dlfs.ingest.source import show, single_path

_NAMES_SHOWN = 10
"""Most names of hidden files that a report has."""


@dataclass(frozen=True, slots=True)
class ImageFolderOptions(FolderOptions):
    """Options of a folder of classes."""

    def open(self, paths: Sequence[str]) -> ImageFolderSource:
        """Open one folder; see ``ImageFolderSource``."""
        return ImageFolderSource(single_path(paths, "folder"), links=self.links)


class ImageFolderSource(FolderSource):
    """The files under the class folders of a folder; see ``FolderSource``.

    Raises:
        UsageError: a file is in no class folder.
        DlfsError: as for ``FolderSource``.
    """

    def _find_files(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return ``label``, ``int64[n_files]``, and ``class``, ``object[n_files]``."""
        self._hidden: Counter[str] = Counter()
        super()._find_files()
        if self._hidden:
            shown = ", ".join(show(os.fsencode(name)) for name in list(self._hidden)[:_NAMES_SHOWN])
            more = ", ..." if len(self._hidden) > _NAMES_SHOWN else ""
            self.skipped[f"hidden file or folder: {shown}{more}"] = self._hidden.total()
        names: list[str] = []
        for index in range(len(self._table)):
            path = self._table.path(index)
            folder, slash, _ = path.partition(b"/")
            if not slash:
                raise UsageError(
                    f"import {join_shown(self.name, path)}: expected files in class folders only"
                )
            names.append(os.fsdecode(folder))
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        texts = {name: os.fsencode(name).decode("utf-8", "backslashreplace") for name in numbers}
        classes = np.empty(len(names), object)
        classes[:] = [texts[name] for name in names]
        labels = np.array([numbers[name] for name in names], np.int64)
        return {"label": labels, "class": classes}

    def _is_wanted(self, name: str) -> bool:
        if name.startswith("."):
            self._hidden[name] += 1
            return False
        return True
