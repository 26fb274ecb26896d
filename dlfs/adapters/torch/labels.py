"""Labels of samples: the class named by a sample's folder, or a column of the dataset.

Labels belong to the dataset or view of which they were made. ``Loader`` and ``SampleDataset`` read
another one with them only if its samples are of the same versions: labels of a dataset follow its
samples into every view, and those of a view into its parts. Anything else is refused, because an
index means another sample there. A function of the caller gets ``SampleIndices``, so that labels
which it calls are checked as well.

Classes are numbered over the whole datasets, not over the samples that a view has of them. Labels
of a dataset, of its training part and of its test part therefore agree.

Indices are in path order, so the samples of a folder are a range of indices. ``FolderLabels``
stores the begin of each range, not a label for each sample. ``ColumnLabels`` reads the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self
from uuid import UUID

import numpy as np
import numpy.typing as npt
import torch

from dlfs import Dataset, DatasetView
from dlfs.base.wording import quote, show_value
from dlfs.directory import check_indices
from dlfs.errors import UsageError

Labels = Callable[[npt.NDArray[np.uint64]], npt.ArrayLike]
"""Function that maps indices, ``uint64[n]``, to labels, ``[n, ...]``; classes are ``int64``."""

_INT64_MAX = (1 << 63) - 1


def label_samples(labels: Labels, indices: npt.NDArray[np.uint64]) -> torch.Tensor | list[Any]:
    """Return the labels of samples in the form of a batch.

    Args:
        labels: maps indices to labels.
        indices: indices of the samples, ``uint64[n]``.

    Returns:
        A tensor ``[n, ...]``; integers of numpy and Python as ``int64``; strings, bytes and other
        objects as a list of n, as PyTorch's ``default_collate`` returns them.

    Raises:
        UsageError: there are more or fewer labels than samples, or one is above 2^63-1.
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
    if found.dtype.kind not in "biufc":
        return list(found.tolist())
    return torch.from_numpy(_as_int64(found) if found.dtype.kind in "iu" else found)


def _as_int64(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return integers as ``int64``, the type of classes.

    Raises:
        UsageError: one is too large.
    """
    if values.dtype.kind == "u" and values.size and values.max() > _INT64_MAX:
        raise UsageError(
            f"label samples: expected labels of at most {_INT64_MAX}, got {values.max()}"
        )
    return values.astype(np.int64)


class SampleIndices(np.ndarray[Any, np.dtype[np.uint64]]):
    """Indices of samples that know the dataset or view which numbers its samples so.

    Chosen elements and slices know it too; what is calculated of indices does not.

    Attributes:
        dataset: the dataset or view; None if it is unknown.
    """

    dataset: Dataset | DatasetView | None

    @classmethod
    def of(cls, indices: npt.NDArray[np.uint64], dataset: Dataset | DatasetView) -> Self:
        """Return indices of a dataset or view, without a copy."""
        made = indices.view(cls)
        made.dataset = dataset
        return made

    def __array_finalize__(self, source: object) -> None:
        self.dataset = getattr(source, "dataset", None)

    def __array_wrap__(self, array: Any, *_context: Any) -> Any:
        return np.asarray(array)[()]


@dataclass(frozen=True)
class _CallerLabels:
    """A function of the caller, which gets indices that know their dataset or view.

    Attributes:
        function: maps indices to labels.
        dataset: dataset or view whose samples are labelled.
    """

    function: Labels
    dataset: Dataset | DatasetView

    def __call__(self, indices: npt.NDArray[np.uint64]) -> npt.ArrayLike:
        return self.function(SampleIndices.of(indices, self.dataset))


def bind_labels(labels: Labels | None, dataset: Dataset | DatasetView) -> Labels | None:
    """Return labels for the samples of a dataset or view, by its indices.

    Raises:
        UsageError: they are labels of other samples.
    """
    if labels is None:
        return None
    if isinstance(labels, DatasetLabels):
        return labels.bind(dataset)
    return _CallerLabels(labels, dataset)


class DatasetLabels:
    """Labels of the samples of a dataset or view, and of all samples of its datasets.

    Args:
        dataset: dataset of the samples, or a view.

    Attributes:
        classes: names of the classes; a label is a position in it. None for numbers.
        class_to_idx: label of each name. None for numbers.
    """

    def __init__(self, dataset: Dataset | DatasetView) -> None:
        self.classes: tuple[str, ...] | None = None
        self.class_to_idx: dict[str, int] | None = None
        self._dataset = dataset
        self._known = {one.uuid: _title(one) for one in _datasets(dataset)}

    def bind(self, dataset: Dataset | DatasetView) -> Self:
        """Return these labels for the samples of a view or dataset, by its indices.

        Args:
            dataset: one whose samples are all of the versions of datasets of which these labels
                were made, or an equal copy.

        Raises:
            UsageError: it has other samples.
        """
        if dataset.digests.content == self._dataset.digests.content:
            return self
        for one in _datasets(dataset, with_empty=False):
            if one.uuid not in self._known:
                raise UsageError(
                    f"label samples of {quote(dataset.name)}: expected samples of "
                    f"{', '.join(self._known.values())}, of which the labels were made, got "
                    f"samples of {_title(one)}; make the labels of the dataset or view that is "
                    "read, with classes= for equal numbers"
                )
        bound = copy(self)
        bound._dataset = dataset
        return bound

    def __call__(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Label samples.

        Args:
            indices: indices of the samples, ``uint64[n]``, each 0..N-1, in the dataset or view of
                which the labels were made.

        Returns:
            ``int64[n]``; as ``ColumnLabels`` says for a column of floats or vectors.

        Raises:
            UsageError: an index is out of range, or the indices are of other samples.
            DlfsError: the dataset cannot be read.
        """
        if isinstance(indices, SampleIndices) and indices.dataset is not None:
            bound = self.bind(indices.dataset)
            if bound is not self:
                return bound(np.asarray(indices))
        dataset = self._dataset
        action = f"label samples of {dataset.name}"
        checked = check_indices(indices, len(dataset), option="indices", action=action)
        if isinstance(dataset, Dataset):
            return self._label(dataset, checked)
        return dataset.sources.gather(checked, self._label, self._dtype)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """Type of the labels, with the shape of a vector."""
        return np.dtype(np.int64)

    def _label(self, dataset: Dataset, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        """Label samples of one of the datasets by its own indices."""
        raise NotImplementedError

    def _number(self, names: Sequence[str]) -> None:
        self.classes = tuple(names)
        self.class_to_idx = {name: number for number, name in enumerate(names)}


class FolderLabels(DatasetLabels):
    """The class of each sample, which is the name of its folder.

    Args:
        dataset: dataset of the samples, or a view.
        level: folder of the path that names the class: 0 for the first (``cat/1.jpg``), 1 for the
            second (``train/cat/1.jpg``), and so on.
        classes: names of the classes, such as those of the labels of another dataset; by default
            all that the datasets have.

    Attributes:
        classes: names of the classes, sorted if they were not given; a label is a position in it.
        class_to_idx: label of each name, as ``ImageFolder`` of torchvision has it.

    Raises:
        UsageError: a path has fewer folders, a name is not UTF-8, or not among the given ones.
        DlfsError: the dataset cannot be read.

    Threads: any at once; immutable.
    """

    classes: tuple[str, ...]
    class_to_idx: dict[str, int]

    def __init__(
        self,
        dataset: Dataset | DatasetView,
        *,
        level: int = 0,
        classes: Sequence[str] | None = None,
    ) -> None:
        if level < 0:
            raise UsageError(f"label samples by folder: expected level >= 0, got {level}")
        super().__init__(dataset)
        folders = {one.uuid: list(_folders(one, depth=level + 1)) for one in _datasets(dataset)}
        names = sorted({name for listed in folders.values() for name, _ in listed})
        found = [_text(name) for name in names]
        self._number(_check_classes(classes, found, "folders", dataset.name))
        numbers = {name: self.class_to_idx[text] for name, text in zip(names, found, strict=True)}
        self._folders: dict[UUID, tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]] = {
            uuid: (
                np.array([first for _, first in listed], np.uint64),
                np.array([numbers[name] for name, _ in listed], np.int64),
            )
            for uuid, listed in folders.items()
        }

    def _label(self, dataset: Dataset, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        firsts, labels = self._folders[dataset.uuid]
        found: npt.NDArray[np.int64] = labels[np.searchsorted(firsts, indices, "right") - 1]
        return found


class ColumnLabels(DatasetLabels):
    """Labels from a column of attributes of the dataset.

    Labels are ``int64[n]``; ``float[n]`` of the column's width for a column of floats, and
    ``[n, k]`` for a column of vectors.

    Args:
        dataset: dataset of the samples, or a view.
        name: name of the column. Strings are names of classes; numbers are the labels themselves,
            integers as ``int64``.
        classes: names of the classes of a column of strings, such as those of the labels of another
            dataset; by default all that the datasets have.

    Attributes:
        classes: names of the classes, sorted if they were not given; a label is a position in it.
            None for numbers.
        class_to_idx: label of each string. None for numbers.

    Raises:
        NotFoundError: there is no such column.
        UsageError: a string is not among the given classes, or the column has numbers and classes
            were given.
        DlfsError: the dataset cannot be read.

    Threads: any at once; immutable.
    """

    def __init__(
        self,
        dataset: Dataset | DatasetView,
        name: str,
        *,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dataset)
        self._name = name
        column = dataset.column(name, np.empty(0, np.uint64))  # raises if there is none
        self._stored = np.dtype((column.dtype, column.shape[1:]))
        if column.dtype == object:
            columns = (one.column(name).tolist() for one in _datasets(dataset))
            found = sorted({text for listed in columns for text in listed})
            self._number(_check_classes(classes, found, f"column {name!r}", dataset.name))
        elif classes is not None:
            raise UsageError(
                f"label samples of {dataset.name} by column {name!r}: expected no classes for a "
                f"column of {column.dtype}, whose numbers are the labels, got {show_value(classes)}"
            )

    @property
    def _dtype(self) -> np.dtype[Any]:
        is_float = self._stored.base.kind == "f"
        return np.dtype((self._stored.base if is_float else np.int64, self._stored.shape))

    def _label(self, dataset: Dataset, indices: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
        values = dataset.column(self._name, indices)
        if self.class_to_idx is not None:
            return np.array([self.class_to_idx[text] for text in values.tolist()], np.int64)
        if self._dtype.base.kind == "f":
            return values.astype(self._dtype.base)
        return _as_int64(values)


def _check_classes(
    classes: Sequence[str] | None, found: Sequence[str], source: str, name: str
) -> Sequence[str]:
    """Return the names of classes in the order of their numbers: the given ones, or those found.

    Raises:
        UsageError: the given ones have a name twice, or lack one that was found.
    """
    if classes is None:
        return found
    what = f"label samples of {name} by {source}"
    if isinstance(classes, str) or len(set(classes)) < len(classes):
        raise UsageError(
            f"{what}: expected classes as a list of names, each once, got {show_value(classes)}"
        )
    missing = [text for text in found if text not in set(classes)]
    if missing:
        raise UsageError(
            f"{what}: expected samples of the given classes {', '.join(map(quote, classes))}, got "
            f"{', '.join(map(quote, missing[:8]))}{', ...' if len(missing) > 8 else ''}"
        )
    return classes


def _datasets(dataset: Dataset | DatasetView, *, with_empty: bool = True) -> Iterable[Dataset]:
    """Return the datasets of a view, each once; those without samples in it only if asked for."""
    if isinstance(dataset, Dataset):
        return [dataset]
    sources = [one for one in dataset.sources.sources if with_empty or len(one)]
    return {one.dataset.uuid: one.dataset for one in sources}.values()


def _title(dataset: Dataset) -> str:
    return f"dataset {quote(dataset.name)} version {dataset.version}"


def _folders(
    dataset: Dataset, prefix: bytes = b"", *, depth: int, above: int = 0
) -> Iterator[tuple[bytes, int]]:
    """Yield name and first index of the folders at a depth; ``above`` is the prefix's depth."""
    for entry in dataset.children(prefix):
        path = prefix + b"/" + entry.name if prefix else entry.name
        first, last = dataset.directory.subtree_range(path)
        if first == last and dataset.directory.empty_at(path) >= 0:
            continue
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
