"""Finds the parts of an HDF5 dataset that no file has, and the other files that it names.

The HDF5 library gives the fill value for a chunk that was never written, for a virtual source that
does not exist, and zeros for the end of a short external file; it says nothing of these. So the
chunks are counted, and the files of virtual and external storage are looked at, before any of them
is read. A file may be only in the folder of the file that names it, or below it: what a stranger's
file names is not opened elsewhere.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlfs.ingest.arrays.file import Missing

if TYPE_CHECKING:
    import h5py

_DEPTH_MAX = 8
"""Most virtual datasets that refer to each other in a row."""

FILTERS = {
    307: "bzip2",
    32001: "Blosc",
    32004: "LZ4",
    32008: "bitshuffle",
    32013: "ZFP",
    32015: "Zstandard",
    32017: "SZ",
    32018: "FCIDECOMP",
    32024: "SZ3",
    32026: "Blosc2",
    32028: "SPERR",
}
"""Filters that the package hdf5plugin has, by the number that the HDF Group gave them."""

_NUMBER_MAX = 100_000
"""Largest number in the names of virtual sources."""

_NUMBERED = re.compile(r"%b")


def find_missing(dataset: h5py.Dataset, path: str, depth: int = 0) -> Missing | None:
    """Return the parts of a dataset that no file has, or None.

    Args:
        dataset: the dataset; its shape has not been asked for, which opens virtual sources.
        path: path of its file.
        depth: number of virtual datasets that led here.

    Raises:
        ValueError: the dataset names a file outside its folder, a chunk is too short, or virtual
            datasets refer to each other too often.
    """
    import h5py

    layout = dataset.id.get_create_plist()
    kind = layout.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        return _missing_sources(dataset, path, depth)
    if not dataset.shape or not dataset.size:
        return None
    if layout.get_external_count():
        return _missing_bytes(dataset, path)
    if kind == h5py.h5d.CHUNKED:
        return _missing_chunks(dataset)
    if kind == h5py.h5d.CONTIGUOUS and dataset.id.get_offset() is None:
        return Missing(1, 1, "part", "the whole array")
    return None


# ---- chunks --------------------------------------------------------------------------------------


def _missing_chunks(dataset: h5py.Dataset) -> Missing | None:
    """Count the chunks that were never written."""
    chunk, shape = dataset.chunks, dataset.shape
    total = math.prod(-(-length // step) for length, step in zip(shape, chunk, strict=True))
    full_bytes = math.prod(chunk) * dataset.id.get_type().get_size()
    every = (1 << dataset.id.get_create_plist().get_nfilters()) - 1
    lacking = _lacking_filters(dataset)
    found: set[tuple[int, ...]] = set()

    def note(info: Any) -> None:
        is_inside = all(at < length for at, length in zip(info.chunk_offset, shape, strict=True))
        if is_inside:
            found.add(info.chunk_offset)
        is_plain = info.filter_mask & every == every and not dataset.dtype.hasobject
        for number, filter_name in lacking.items():
            if not info.filter_mask >> number & 1:
                raise ValueError(f"expected the HDF5 filter {filter_name}, which is not installed")
        if is_plain and info.size != full_bytes:
            raise ValueError(
                f"chunk at {info.chunk_offset}: expected {full_bytes} bytes, got {info.size}"
            )

    dataset.id.chunk_iter(note)
    if len(found) >= total:
        return None
    grid = product(*(range(0, length, step) for length, step in zip(shape, chunk, strict=True)))
    first = next(at for at in grid if at not in found)
    return Missing(total - len(found), total, "chunk", f"the chunk at {first}")


def _lacking_filters(dataset: h5py.Dataset) -> dict[int, str]:
    """Return the filters of a dataset that are not available: name and package, by number."""
    import h5py

    layout = dataset.id.get_create_plist()
    found = {number: layout.get_filter(number) for number in range(layout.get_nfilters())}
    if any(not h5py.h5z.filter_avail(code) for code, *_ in found.values()):
        with suppress(ImportError):
            importlib.import_module("hdf5plugin")  # registers its filters
    lacking = {}
    for number, (code, _, _, name) in found.items():
        if not h5py.h5z.filter_avail(code):
            known = FILTERS.get(code, os.fsdecode(name) or "of an unknown name")
            package = "pip install hdf5plugin" if code in FILTERS else "set HDF5_PLUGIN_PATH"
            lacking[number] = f"{code} ({known}; {package})"
    return lacking


# ---- other files ---------------------------------------------------------------------------------


def find_file(name: str, path: str) -> str | None:
    """Return the path of a file that another file names, or None if it does not exist.

    It may be in the folder of that file, and if this is a symbolic link, of the file that it leads
    to. The library looks in these folders in the same order.

    Raises:
        ValueError: it is not in the other file's folder, or is no regular file.
    """
    for other in _names_of(path):
        found = _resolve(name, other)
        try:
            is_regular = stat.S_ISREG(os.stat(found).st_mode)
        except FileNotFoundError:
            continue
        if not is_regular:
            raise ValueError(f"expected a regular file, got {name!r}")
        return found
    return None


def _names_of(path: str) -> list[str]:
    """Return the path of a file, and if it is a symbolic link, also where this leads to."""
    return list(dict.fromkeys((os.path.abspath(path), os.path.realpath(path))))


def _resolve(name: str, path: str) -> str:
    """Return the path of a file or folder that must be in the folder of a file."""
    found = os.path.join(os.path.dirname(os.path.abspath(path)), name)
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    if os.path.commonpath([folder, os.path.realpath(found)]) != folder:
        raise ValueError(
            f"expected files in the folder {folder}, got {name!r}, which is not opened; a dataset "
            "may name only files in the folder of its own file"
        )
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a dataset's bytes in an external file.

    Attributes:
        start: number of its first byte in the dataset.
        size_bytes: size of the part.
        name: name of the file, as the dataset has it.
        file: path of the file; None if it does not exist.
        offset: offset of the part in the file, in bytes.
        there_bytes: size of what the file has of the part.
    """

    start: int
    size_bytes: int
    name: str
    file: str | None
    offset: int
    there_bytes: int


def segments_of(dataset: h5py.Dataset, path: str) -> list[Segment]:
    """Return the parts of a dataset's bytes in external files.

    Raises:
        ValueError: a file is not in the folder of the dataset's file.
    """
    layout = dataset.id.get_create_plist()
    total = dataset.size * dataset.id.get_type().get_size()
    found: list[Segment] = []
    start = 0
    for number in range(layout.get_external_count()):
        name, offset, size = layout.get_external(number)
        text = os.fsdecode(name)
        file = find_file(text, path)
        wanted = min(size, total - start)
        there = 0 if file is None else min(wanted, max(0, os.stat(file).st_size - offset))
        found.append(Segment(start, wanted, text, file, offset, there))
        start += wanted
    return found


def _missing_bytes(dataset: h5py.Dataset, path: str) -> Missing | None:
    segments = segments_of(dataset, path)
    total = dataset.size * dataset.id.get_type().get_size()
    missing = total - sum(segment.there_bytes for segment in segments)
    if not missing:
        return None
    short = [part for part in segments if part.there_bytes < part.size_bytes]
    where = f"the last byte of the file {short[0].name!r}" if short else "the last byte"
    return Missing(missing, total, "byte", where)


# ---- virtual datasets ----------------------------------------------------------------------------


def _missing_sources(dataset: h5py.Dataset, path: str, depth: int) -> Missing | None:
    """Count the sources of a virtual dataset that do not exist, or that lack parts."""
    if depth >= _DEPTH_MAX:
        raise ValueError(f"expected at most {_DEPTH_MAX} virtual datasets in a row, got more")
    missing: list[str] = []
    sources = dataset.virtual_sources()
    for source in sources:
        names = _source_files(source.file_name, path)
        if not names:
            missing.append(f"the file {source.file_name!r}")
        for name in names:
            problem = _source_problem(name, source, path, depth)
            if problem:
                missing.append(problem)
    total = max(len(sources), len(missing))
    if missing:
        return Missing(len(missing), total, "virtual source", missing[0])
    return _uncovered(dataset, sources)


def _source_files(name: str, path: str) -> list[str]:
    """Return the names of the files that a source's name stands for; ``%b`` is a number."""
    if "%" in _NUMBERED.sub("", name):
        raise ValueError(f"expected a name without % but %b, got {name!r}")
    if not _NUMBERED.search(name):
        return [name]
    folder, pattern = os.path.split(name)
    parts = [re.escape(part) for part in _NUMBERED.split(pattern)]
    expression = re.compile("([0-9]+)".join(parts))
    folders = [Path(_resolve(folder or ".", other)) for other in _names_of(path)]
    numbers = sorted(
        int(match[1])
        for where in folders
        for entry in (os.listdir(where) if where.is_dir() else [])
        if (match := expression.fullmatch(entry))
    )
    last = numbers[-1] if numbers else -1
    if last > _NUMBER_MAX:
        raise ValueError(f"expected numbers up to {_NUMBER_MAX} in {name!r}, got {last}")
    return [_NUMBERED.sub(str(number), name) for number in range(last + 1)]


def _source_problem(name: str, source: Any, path: str, depth: int) -> str | None:
    """Return what a source lacks, or None."""
    import h5py

    file = path if name == "." else find_file(name, path)
    if file is None:
        if os.path.lexists(name):  # the library would take it
            raise ValueError(f"expected {name!r} in the folder of the file, got one elsewhere")
        return f"the file {name!r}"
    with h5py.File(file, "r") as opened:
        found = _own_dataset(opened, source.dset_name)
        if found is None:
            return f"the dataset {source.dset_name!r} of {name!r}"
        inner = find_missing(found, file, depth + 1)
        if inner is not None:
            return f"{source.dset_name!r} of {name!r}, which lacks {inner.first}"
        wanted = source.src_space.get_simple_extent_dims()
        if any(have < want for have, want in zip(found.shape, wanted, strict=False)):
            return f"rows of {source.dset_name!r} of {name!r}, which is {found.shape}"
    return None


def _own_dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return a dataset that is in a file itself, or None; a link may lead to another file.

    Raises:
        ValueError: the name has a link or a pattern.
    """
    import h5py

    if "%" in name:
        raise ValueError(f"expected the name of one dataset, got {name!r}")
    found: Any = file
    for part in filter(None, name.split("/")):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"expected a dataset in the file itself, got a link in {name!r}")
        found = found[part]
    return found if isinstance(found, h5py.Dataset) else None


def _uncovered(dataset: h5py.Dataset, sources: Sequence[Any]) -> Missing | None:
    """Count the elements that no source is named for, if the sizes of all sources are fixed."""
    if any(source.vspace.is_regular_hyperslab() and _is_endless(source) for source in sources):
        return None
    covered = sum(source.vspace.get_select_npoints() for source in sources)
    missing = dataset.size - covered
    if missing <= 0:
        return None
    return Missing(missing, dataset.size, "element", "an element without a source")


def _is_endless(source: Any) -> bool:
    """Return True if a source grows with its dataset."""
    _, _, counts, blocks = source.vspace.get_regular_hyperslab()
    endless = (1 << 64) - 1
    return endless in counts or endless in blocks
