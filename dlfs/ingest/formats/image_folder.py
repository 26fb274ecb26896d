"""A folder of class folders as a source: every file a sample, its first folder its class.

As torchvision's ``ImageFolder`` has it: the names of the folders at the top, sorted as text, are
the classes, and the number of a class among them is the ``label`` of its samples. The attribute
``class`` is the name. Paths are those in the folder, so that they begin with the class. Every file
is taken, whatever its name; one outside of all class folders is an error. Everything else is as in
``folder``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from dlfs.errors import UsageError
from dlfs.ingest.files import join_shown
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.source import (
    LinkPolicy,
    single_path,
)


@dataclass(frozen=True, slots=True)
class ImageFolderOptions:
    """What can be said of a folder of classes."""

    links: Annotated[LinkPolicy, "symbolic links: take what they lead to, skip, refuse"] = "follow"

    def open(self, paths: Sequence[str]) -> ImageFolderSource:
        """Open one folder; see ``ImageFolderSource``."""
        return ImageFolderSource(single_path(paths, "folder"), links=self.links)


class ImageFolderSource(FolderSource):
    """The files under the class folders of a folder; see ``FolderSource``.

    Raises:
        UsageError: a file is in no class folder.
        DlfsError: as ``FolderSource``.
    """

    def _attributes(self) -> Mapping[str, npt.NDArray[Any]]:
        """``label``, ``int64[n_files]``, and ``class``, ``object[n_files]``."""
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
        texts = {name: _text(name) for name in numbers}
        classes = np.empty(len(names), object)
        classes[:] = [texts[name] for name in names]
        labels = np.array([numbers[name] for name in names], np.int64)
        return {"label": labels, "class": classes}


def _text(name: str) -> str:
    """A folder's name as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
