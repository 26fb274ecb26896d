"""Labels of samples: the class named by a sample's folder, or a column of the dataset.

Indices are in path order, so the samples of a folder are a range of indices. ``FolderLabels``
stores the begin of each range, not a label for each sample. ``ColumnLabels`` reads the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Dataset, DatasetView
from dlfs.errors import UsageError
from dlfs.wording import quote

Labels = Callable[[npt.NDArray[np.uint64]], npt.ArrayLike]
"""Function that maps indices, ``uint64[n]``, to labels, ``[n, ...]``; classes are ``int64``."""


def label_samples(labels: Labels, indices: npt.NDArray[np.uint64]) -> torch.Tensor | list[Any]:
    """Return the labels of samples in the form of a batch.

    Args:
        labels: maps indices to labels.
        indices: indices of the samples, ``uint64[n]``.

    Returns:
        A tensor ``[n, ...]``; strings, bytes and other objects as a list of n, as PyTorch's
        ``default_collate`` returns them.

    Raises:
        UsageError: there are more or fewer labels than samples.
    """
    given = labels(indices)
    found = given if isinstance(given, torch.Tensor) else np.array(given)
    if found.shape[:1] != (len(indices),):
        raise UsageError(
            f"label samples: expected one label for each of {len(indices)} indices, got an array "
            f"of shape {found.shape}"
        )
    if isinstance(found, torch.Tensor):
        return found
    return torch.from_numpy(found) if found.dtype.kind in "biufc" else list(found.tolist())


class FolderLabels:
    """The class of each sample, which is the name of its folder.

    Args:
        dataset: dataset of the samples, or a view.
        level: folder of the path that names the class: 0 for the first (``cat/1.jpg``), 1 for the
            second (``train/cat/1.jpg``), and so on.

    Attributes:
        classes: names of the classes, sorted; a label is a position in it.
        class_to_idx: label of each name, as ``ImageFolder`` of torchvision has it.

    Raises:
        UsageError: a path has fewer folders, or a name is not UTF-8.
        DlfsError: the dataset cannot be read.

    Threads: any at once; immutable.
    """

    def __init__(self, dataset: Dataset | DatasetView, *, level: int = 0) -> None:
        if level < 0:
            raise UsageError(f"label samples by folder: expected level >= 0, got {level}")
        folders = list(_all_folders(dataset, depth=level + 1))
        names = sorted({name for name, _ in folders})
        numbers = {name: number for number, name in enumerate(names)}
        self.classes = tuple(_text(name) for name in names)
        self.class_to_idx = _number(self.classes)
        self._firsts = np.array([first for _, first in folders], np.uint64)
        self._labels = np.array([numbers[name] for name, _ in folders], np.int64)

    def __call__(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Label samples.

        Args:
            indices: indices of the samples, ``uint64[n]``, each 0..N-1.

        Returns:
            ``int64[n]``, positions in ``classes``.
        """
        folders = np.searchsorted(self._firsts, indices, "right") - 1
        labels: npt.NDArray[np.int64] = self._labels[folders]
        return labels


class ColumnLabels:
    """Labels from a column of attributes of the dataset.

    Args:
        dataset: dataset of the samples, or a view.
        name: name of the column. Strings are names of classes; numbers are the labels themselves,
            integers as ``int64``.

    Attributes:
        classes: strings that occur, sorted; a label is a position in it. None for numbers.
        class_to_idx: label of each string. None for numbers.

    Raises:
        NotFoundError: there is no such column.
        DlfsError: the dataset cannot be read.

    Threads: any at once; immutable.
    """

    def __init__(self, dataset: Dataset | DatasetView, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self.classes: tuple[str, ...] | None = None
        self.class_to_idx: dict[str, int] | None = None
        values = dataset.column(name)
        if values.dtype == object:
            self.classes = tuple(sorted(set(values.tolist())))
            self.class_to_idx = _number(self.classes)

    def __call__(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Label samples.

        Args:
            indices: indices of the samples, ``uint64[n]``, each 0..N-1.

        Returns:
            ``int64[n]``; ``float[n]`` of the column's width for a column of floats; ``[n, k]`` for
            a column of vectors.

        Raises:
            DlfsError: the dataset cannot be read.
        """
        values = self._dataset.column(self._name, indices)
        if self.class_to_idx is not None:
            return np.array([self.class_to_idx[text] for text in values.tolist()], np.int64)
        return values.astype(values.dtype if values.dtype.kind == "f" else np.int64)


def _number(classes: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(classes)}


def _all_folders(dataset: Dataset | DatasetView, *, depth: int) -> Iterator[tuple[bytes, int]]:
    """Yield name and first index of the folders at a depth, of a dataset or of each in a view."""
    if isinstance(dataset, Dataset):
        yield from _folders(dataset, b"", depth=depth)
        return
    sources = dataset.sources
    for source, start in zip(sources.sources, sources.starts.tolist(), strict=False):
        for name, first in _folders(source.dataset, b"", depth=depth):
            before = first if source.chosen is None else np.searchsorted(source.chosen, first)
            yield name, start + int(before)


def _folders(
    dataset: Dataset, prefix: bytes, *, depth: int, above: int = 0
) -> Iterator[tuple[bytes, int]]:
    """Yield name and first index of the folders at a depth; ``above`` is the prefix's depth."""
    for entry in dataset.children(prefix):
        path = prefix + b"/" + entry.name if prefix else entry.name
        if not entry.is_directory:
            raise UsageError(
                f"label samples of dataset {quote(dataset.name)} by folder: expected paths of "
                f"{depth} folders or more, got {quote(path)}"
            )
        if above + 1 == depth:
            yield entry.name, entry.first_index
        else:
            yield from _folders(dataset, path, depth=depth, above=above + 1)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"label samples by folder: expected UTF-8, got {quote(name)}") from error
