"""Imports HDF5 files by the package h5py (extra ``hdf5``).

An array is a dataset; its name is its path from the root. Vectors and strings of any length are
rows of any length. Datasets behind soft and external links are left out. A dataset with several
hard links is imported under the first of their names. The members of a dataset of a compound type
can be fields and attributes: ``DATASET/MEMBER``, nested ``DATASET/MEMBER.INNER``. The dimensions of
elements that are arrays follow those of the dataset. Parts without storage are an error, or the
dataset's fill value.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlfs.base.closing import closed_on_error
from dlfs.ingest.arrays.file import ArrayFile, ArrayInfo, Kind, Missing, packing_of
from dlfs.ingest.arrays.rows import FileOptions
from dlfs.ingest.formats.hdf5.chunks import (
    check_chunks,
    is_checked,
    is_decoded,
    read_chunks,
)
from dlfs.ingest.formats.hdf5.parts import Segment, find_missing, segments_of

if TYPE_CHECKING:
    import h5py

_LINKS_SHOWN_MAX = 20
"""Most links that a report names."""


class Hdf5File(ArrayFile):
    """One open HDF5 file; see ``ArrayFile``."""

    def __init__(self, path: str) -> None:
        import h5py

        self._path = path
        self._file = h5py.File(path, "r")
        self.arrays: dict[str, ArrayInfo] = {}
        self.members: dict[str, ArrayInfo] = {}
        self._steps: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.skipped: Counter[str] = Counter()
        with closed_on_error(self):
            self._file.visititems(self._add)
            self._file.visititems_links(self._note_link)

    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows; see ``ArrayFile``."""
        if array.name in self._steps:
            out[...] = np.reshape(self._read_member(array, first, len(out)), out.shape)
        else:
            read_rows(self._file[array.name], array, first, out, self._path)

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read values; see ``ArrayFile``."""
        if array.name in self._steps:
            return list(np.reshape(self._read_member(array, first, count), count))
        dataset = self._file[array.name]
        if not array.shape:
            return [dataset[()]]
        if is_checked(dataset):
            check_chunks(dataset, first, count, lacks_some=array.missing is not None)
        return list(dataset[first : first + count])

    def _read_member(self, array: ArrayInfo, first: int, count: int) -> npt.NDArray[Any]:
        """Return a member of some rows of a compound type."""
        owner, steps = self._steps[array.name]
        dataset = self._file[owner]
        if dataset.dtype.hasobject:
            found = dataset.fields(steps[0])[np.s_[first : first + count] if dataset.shape else ()]
            steps = steps[1:]
        else:
            rows = count if dataset.shape else 1
            found = np.zeros((rows, *dataset.shape[1:]), dataset.dtype)
            read_rows(dataset, replace(array, shape=dataset.shape), first, found, self._path)
        for member in steps:
            found = found[member]
        is_one = not dataset.shape and array.shape  # an element that has several rows
        return np.asarray(found[0][first : first + count] if is_one else found)

    def close(self) -> None:
        """Close the file; see ``ArrayFile``."""
        self._file.close()

    def _add(self, name: str, item: h5py.HLObject) -> None:
        import h5py

        if isinstance(item, h5py.Dataset):
            try:
                missing = find_missing(item, self._path)
                packing = packing_of(item.attrs)
            except (ValueError, OSError, KeyError, RuntimeError) as error:
                problem = " ".join(str(error).split())
                nothing = ArrayInfo(name, np.dtype(np.uint8), (), kind="other", problem=problem)
                self.arrays[name] = nothing
                return
            described = _describe(name, item, item.dtype, item.shape, missing)
            self.arrays[name] = replace(described, packing=packing)
            for steps, kind in _members(item.dtype) if item.shape is not None else ():
                array = f"{name}/{'.'.join(steps)}"
                shape = (*item.shape, *kind.shape)
                self.members[array] = _describe(array, item, kind.base, shape, missing)
                self._steps[array] = name, steps

    def _note_link(self, name: str, link: object) -> None:
        import h5py

        if not isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            return
        reason = f"soft link {name} to {link.path}"
        if isinstance(link, h5py.ExternalLink):
            reason = f"external link {name} to {link.path} of {link.filename}"
        if len(self.skipped) >= _LINKS_SHOWN_MAX:
            reason = "other soft or external link"
        self.skipped[reason] += 1


class Hdf5Options(FileOptions):
    """Options of HDF5 files."""

    file_class = Hdf5File
    packages = ("h5py",)
    extra = "hdf5"


def _members(dtype: np.dtype[Any]) -> Iterator[tuple[tuple[str, ...], np.dtype[Any]]]:
    """Yield the names and the type of each member of a compound type, nested ones by steps."""
    for member in dtype.names or ():
        if dtype[member].names:
            yield from (((member, *steps), kind) for steps, kind in _members(dtype[member]))
        else:
            yield (member,), dtype[member]


def read_rows(
    dataset: h5py.Dataset, array: ArrayInfo, first: int, out: npt.NDArray[Any], path: str
) -> None:
    """Read rows of a dataset; parts that are missing are the fill value.

    Args:
        dataset: the dataset.
        array: description of the array, whose missing parts ``find_missing`` found.
        first: number of the first row.
        out: the rows, zeroed.
        path: path of the file.
    """
    import h5py

    layout = dataset.id.get_create_plist()
    if array.missing is not None:
        if layout.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED:
            raise ValueError("missing parts of a dataset that has no fill value")
        out[...] = dataset.fillvalue
    if layout.get_external_count():
        if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):
            raise ValueError(f"external data of the type {dataset.dtype}, which h5py converts")
        row_bytes = out.nbytes // len(out)
        _read_external(segments_of(dataset, path), first * row_bytes, out)
    elif not dataset.shape:
        if array.missing is None:
            value = dataset[()]
            out[...] = value[first : first + len(out)] if array.shape else value
    elif is_decoded(dataset):
        read_chunks(dataset, first, out, lacks_some=array.missing is not None)
    else:
        if is_checked(dataset):
            check_chunks(dataset, first, len(out), lacks_some=array.missing is not None)
        _read(dataset, first, out)


def _read_external(segments: Sequence[Segment], first_byte: int, out: npt.NDArray[Any]) -> None:
    """Read rows of raw data in external files; elements that no file has wholly keep their values.

    The library looks for such a file in the working directory, and takes zeros for what a short one
    lacks. Here the files are those that ``parts`` found in the folder of the HDF5 file.

    Args:
        segments: parts of the dataset in files.
        first_byte: number of the first byte of the rows in the dataset.
        out: the rows.
    """
    flat = out.reshape(-1)
    filled = flat.copy()
    target = flat.view(np.uint8)
    there = np.zeros(target.size, np.bool_)
    for segment in segments:
        low = max(segment.start, first_byte)
        high = min(segment.start + segment.there_bytes, first_byte + target.size)
        if low >= high or segment.file is None:
            continue
        part = slice(low - first_byte, high - first_byte)
        with open(segment.file, "rb") as file:
            data = os.pread(file.fileno(), high - low, segment.offset + low - segment.start)
        if len(data) != high - low:
            raise EOFError(f"expected {high - low} bytes of {segment.name!r}, got {len(data)}")
        target[part] = np.frombuffer(data, np.uint8)
        there[part] = True
    lacks = ~there.reshape(-1, out.dtype.itemsize).all(axis=1)
    flat[lacks] = filled[lacks]


def _read(dataset: h5py.Dataset, first: int, out: npt.NDArray[Any]) -> None:
    """Read rows by the library, which converts the elements if it must."""
    part = np.s_[first : first + len(out)]
    if dataset.dtype.shape:  # h5py reads elements that are arrays into none of the caller's
        out[...] = dataset[part]
    else:
        dataset.read_direct(out, part)


def _describe(
    name: str,
    dataset: h5py.Dataset,
    dtype: np.dtype[Any],
    shape: tuple[int, ...] | None,
    missing: Missing | None,
) -> ArrayInfo:
    """Describe a dataset, or a member of its compound type that has a dtype and shape."""
    import h5py

    if shape is None:
        return ArrayInfo(name, dtype, (), kind="other")
    dtype, shape = dtype.base, (*shape, *dtype.shape)
    vector = h5py.check_vlen_dtype(dtype)
    if h5py.check_string_dtype(dtype) and dtype.hasobject:
        kind: Kind = "text" if len(shape) <= 1 else "other"
        return ArrayInfo(name, np.dtype(np.uint8), shape, kind=kind, missing=missing)
    if isinstance(vector, np.dtype) and not vector.hasobject and len(shape) == 1:
        return ArrayInfo(name, vector, shape, kind="ragged", missing=missing)
    if dtype.hasobject:
        return ArrayInfo(name, dtype, shape, kind="other")
    chunk_rows = dataset.chunks[0] if dataset.chunks else 1
    return ArrayInfo(name, dtype, shape, chunk_rows, missing=missing)
