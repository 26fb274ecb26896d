"""Reads the files of one folder as samples, for the formats whose samples are files.

``FileTable`` lists the files: their names in one byte string, and 48 bytes of numbers for each.
Before anything is written, several threads stat all files, while the source still lists others.
That gives the sizes for the space check, and finds files that cannot be read. Every file is opened
relative to the folder's descriptor, so a path may have the full length of a sample's path.

``FilesSource`` then reads a buffer of files at a time, by several threads in libdlfs. These compare
each file before and after with the first stat, so that a file which changes is an error. Within a
buffer they read in the table's order, because files made together lie together on the disk.

``DescribedFiles`` reads one part of such a source, in a process that has not listed the folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
from abc import abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from dlfs._native.files import FILE_DTYPE, read_files, stat_files
from dlfs._native.handle import Descriptor
from dlfs._native.library import describe
from dlfs.base.arguments import Layout
from dlfs.base.closing import closed_on_error
from dlfs.base.threads import ThreadPool
from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import current
from dlfs.ingest.descriptions import (
    FilesPart,
    decode_array,
    decode_columns,
    decode_sizes,
    encode_columns,
    join_paths,
    malformed,
    split_paths,
)
from dlfs.ingest.isolation.messages import Array as ArrayMessage
from dlfs.ingest.isolation.messages import to_bytes, to_text
from dlfs.ingest.order import (
    PartSize,
    indexed_blocks,
    packing_order,
    part_ends,
    position_after,
)
from dlfs.ingest.source import (
    THREADS,
    Array,
    Bytes,
    Division,
    Int64Array,
    SampleBlock,
    Source,
    Uint64Array,
    choose_samples,
    file_errors,
    show,
    stream_ahead,
)

DIRECTORIES_MAX = 128
"""Most directories below one that are open at a time."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Directories:
    """The directories below another one, opened name by name; those last used stay open.

    Args:
        root: descriptor of the directory, which stays the caller's.
        makes_missing: True to make directories that are missing.
    """

    def __init__(self, root: int, *, makes_missing: bool = False) -> None:
        self._root = root
        self._makes_missing = makes_missing
        self._opened: OrderedDict[bytes, Descriptor] = OrderedDict()  # least recently used first

    def open(self, path: bytes) -> int:
        """Return a descriptor of a directory, which is valid until the next call.

        Raises:
            OSError: there is no directory of this path; a name in it may be a symbolic link.
        """
        known = path
        while known and known not in self._opened:
            known = known.rpartition(b"/")[0]
        directory = self._root
        if known:
            directory = self._opened[known].value
            self._opened.move_to_end(known)
        for name in filter(None, path[len(known) :].split(b"/")):
            if self._makes_missing:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=directory)
            below = Descriptor()
            below.fill(os.open, name, _DIRECTORY, dir_fd=directory)
            known = known + b"/" + name if known else name
            self._opened[known], directory = below, below.value
            if len(self._opened) > DIRECTORIES_MAX:
                self._opened.popitem(last=False)[1].close()
        return directory

    def close(self) -> None:
        """Close all. Idempotent."""
        while self._opened:
            self._opened.popitem()[1].close()


STAT_FILES = 1 << 14
"""Files that one call stats while the source lists others."""
STAT_CALLS_MAX = 4
"""Most of these calls that wait for their turn."""


class FileTable:
    """The files of a source, in its order.

    Args:
        stat: sets lengths, times and codes of the files of a part of the table, as ``stat_files``
            does, given their paths and the files. It runs in a thread while others are added. None:
            the caller sets them after ``prepare``.

    Attributes:
        names: the NUL-terminated paths of all files, ``uint8[n_bytes]``; empty until ``prepare``.
        files: ``FILE_DTYPE[n_files]``; empty until ``prepare``.
    """

    def __init__(self, stat: Callable[[Bytes, npt.NDArray[np.void]], int] | None = None) -> None:
        self._text = bytearray()
        self._positions = array("Q", [0])  # of each path, and the end of the last one
        self._stat = stat
        self._executor = ThreadPool(1, thread_name_prefix="dlfs-stat")
        self._pending: list[Future[int]] = []
        self._parts: deque[npt.NDArray[np.void]] = deque()
        self._next = 0  # the first file that is in no part
        self.names = np.empty(0, np.uint8)
        self.files = np.empty(0, FILE_DTYPE)

    def __len__(self) -> int:
        return len(self._positions) - 1

    def add(self, path: bytes) -> None:
        """Add a file by its path in the folder, which has no NUL."""
        self._text += path
        self._text.append(0)
        self._positions.append(len(self._text))
        self._stat_some()

    def add_all(self, names: Sequence[bytes], prefix: bytes = b"") -> None:
        """Add files by their paths without a prefix that all have."""
        for first in range(0, len(names), STAT_FILES):
            some = names[first : first + STAT_FILES]
            sizes = np.fromiter(map(len, some), np.uint64, len(some)) + np.uint64(len(prefix) + 1)
            ends = np.cumsum(sizes) + np.uint64(len(self._text))
            self._text += prefix + (b"\0" + prefix).join(some) + b"\0"
            self._positions.frombytes(ends.tobytes())
            self._stat_some()

    def path(self, index: int) -> bytes:
        """Return the path of a file."""
        return bytes(self._text[self._positions[index] : self._positions[index + 1] - 1])

    def paths(self, indices: Array) -> list[bytes]:
        """Return the paths of some files."""
        positions = np.frombuffer(self._positions, np.uint64)
        starts, ends = positions[indices].tolist(), positions[indices + 1].tolist()
        with memoryview(self._text) as text:
            return [text[a : b - 1].tobytes() for a, b in zip(starts, ends, strict=True)]

    def prepare(self) -> None:
        """Make the arrays of all files; no more files can be added."""
        self.names = np.frombuffer(self._text, np.uint8)
        self.files = np.zeros(len(self), FILE_DTYPE)
        self.files["position"] = np.frombuffer(self._positions, np.uint64)[:-1]

    def stat(self) -> list[int]:
        """Prepare the table when all files were stat'ed; return those that cannot be read."""
        if self._stat is not None:
            self._stat_part(self._stat)
        failed = sum(call.result() for call in self._pending)
        self.close()
        self.prepare()
        first = 0
        while self._parts:
            part = self._parts.popleft()
            for field in ("length_bytes", "modified_ns", "code"):
                self.files[field][first : first + len(part)] = part[field]
            first += len(part)
        return np.flatnonzero(self.files["code"]).tolist() if failed else []

    def _stat_some(self) -> None:
        """Have a thread stat the files that were added, once they are enough for a call."""
        if len(self) - self._next >= STAT_FILES and self._stat is not None:
            self._stat_part(self._stat)

    def _stat_part(self, stat: Callable[[Bytes, npt.NDArray[np.void]], int]) -> None:
        """Have a thread stat the files that were added since the last part."""
        first, start = self._next, self._positions[self._next]
        self._next = len(self)
        part = np.zeros(self._next - first, FILE_DTYPE)
        part["position"] = np.array(self._positions[first:-1], np.uint64) - start
        names = np.frombuffer(self._text[start:], np.uint8)
        self._parts.append(part)
        if len(self._pending) >= STAT_CALLS_MAX:
            self._pending[-STAT_CALLS_MAX].result()
        self._pending.append(self._executor.submit(stat, names, part))

    def close(self) -> None:
        """Wait for the thread; it begins nothing more. Idempotent."""
        self._executor.shutdown(cancel_futures=True)


class FilesSource(Source):
    """The files that a table lists, read relative to the descriptor of a folder.

    Args:
        name: path of the source, for messages.
        folder: path of the folder.
        follow_links: True if a path may end in a symbolic link.
        directory: an open descriptor of the folder, which is then not opened by its path.

    Raises:
        NotFoundError: the folder does not exist.
        UsageError: the folder is none.
        DeviceError: a file does not exist, is no regular file, or cannot be read.
    """

    gives_shuffled = True

    def __init__(
        self, name: str, folder: str, *, follow_links: bool, directory: int | None = None
    ) -> None:
        self.name = name
        self.bad = current()
        self._left_out: set[int] = set()
        self._folder = folder
        self._follow_links = follow_links
        self._opened = Descriptor()
        self._has_path = directory is None
        if directory is None:
            self._open_folder()
        else:
            self._opened.fill(os.dup, directory)
            self.undivided = "its folder is known by an open file alone"
        self._table = self._make_table()
        with closed_on_error(self):
            self._attributes = self._find_files()
            self._stat()
        self._sizes = np.ascontiguousarray(self._table.files["length_bytes"])
        self._first = self._base = 0
        wanted = np.ones(len(self._sizes), np.bool_)
        wanted[list(self._left_out)] = False
        self._choose(np.flatnonzero(wanted).astype(np.uint64))

    def _open_folder(self) -> None:
        """Open the folder, so that files can be opened relative to it."""
        where, flags = f"import {self._folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            with file_errors(where, "folder"):
                self._opened.fill(os.open, self._folder, flags)
        except DeviceError as error:
            if error.errno == errno.ENOTDIR:
                raise UsageError(f"{where}: expected a folder") from error
            raise

    def _make_table(self) -> FileTable:
        directory, follow_links = self._opened.value, self._follow_links
        stat = partial(stat_files, directory, follow_links=follow_links, threads=THREADS)
        return FileTable(stat)

    def _choose(self, indices: Uint64Array) -> None:
        """Read only some files of the table."""
        self._chosen = indices
        self.sample_count = len(indices)
        self.sample_bytes = int(self._sizes[indices].sum())

    def file_paths(self) -> Iterator[bytes]:
        """Yield the path of every file, relative to the folder."""
        return map(self._table.path, range(len(self._table)))

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Do not read the files of samples that the dataset has; see ``Source.leave_out``."""
        before = self._chosen
        known = np.fromiter(map(is_known, self._sample_paths(before)), np.bool_, len(before))
        self._choose(before[~known])
        return int(known.sum())

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Do not read the first files in the order of packing; see ``Source.seek``."""
        self._first = count if cursor is None else position_after(count, cursor)
        return count

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Differs for files of other names, sizes, times of change or attributes, and by format."""
        found = hashlib.blake2b(self._table.names.data, digest_size=16)
        found.update(type(self).__name__.encode())
        for field in ("length_bytes", "modified_ns"):
            found.update(self._table.files[field].tobytes())
        for name, values in self._attributes.items():
            found.update(repr((name, values.dtype.str, values.tolist())).encode())
        return found.hexdigest()

    @abstractmethod
    def _find_files(self) -> Mapping[str, Array]:
        """Fill the table; return the attributes: arrays with a value for each file."""

    def close(self) -> None:
        """Close the folder."""
        self._table.close()
        self._opened.close()

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every file once; see ``Source.blocks``.

        Raises:
            DeviceError: a file cannot be read, or has changed since the first stat.
        """
        order = packing_order(len(self._chosen), layout=layout, seed=seed)
        size = self.part_bytes
        ends = [] if size is None else self._part_ends(order, layout, size)
        return stream_ahead(self._in_order(order, ends), bad=self.bad)

    # ---- parts -----------------------------------------------------------------------------------

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the files into ranges of the order of packing; see ``Source.divide``."""
        if not self._has_path:
            return None
        order = packing_order(len(self._chosen), layout=layout, seed=seed)
        bounds = [0, *self._part_ends(order, layout, part_bytes), len(order)]
        totals = np.concatenate([[0], np.cumsum(self._sizes[self._chosen[order]], dtype=np.int64)])
        sizes = np.diff(totals[bounds]).tolist()
        return Division(sizes, partial(self._describe, order, bounds))

    def _part_ends(self, order: Uint64Array, layout: Layout, part_bytes: int) -> list[int]:
        """Return where the parts of an order of packing end; see ``part_ends``."""
        files = self._chosen[order]
        limits = PartSize(part_bytes, self.buffer_bytes, whole_blocks=layout != "path")
        return part_ends(self._sizes[files], self._described_bytes()[files], limits)

    def _described_bytes(self) -> Int64Array:
        """Return the bytes of each file in a description."""
        starts = self._table.files["position"].astype(np.int64)
        found: Int64Array = 2 * (np.append(starts[1:], len(self._table.names)) - starts)
        for values in self._attributes.values():
            found += described_bytes(values)
        return found

    def _describe(self, order: Uint64Array, bounds: Sequence[int], part: int) -> bytes:
        first, last = bounds[part], bounds[part + 1]
        files = self._chosen[order[first:last]]
        paths, sample_paths = self._table.paths(files), self._sample_paths(files)
        columns = {name: values[files] for name, values in self._attributes.items()}
        return msgspec.msgpack.encode(
            FilesPart(
                name=to_bytes(self.name),
                folder=os.fsencode(os.path.abspath(self._folder)),
                follows_links=self._follow_links,
                buffer_bytes=self.buffer_bytes,
                first=first,
                paths=join_paths(paths),
                sample_paths=b"" if paths == sample_paths else join_paths(sample_paths),
                sizes=ArrayMessage.of(self._sizes[files]),
                modified_ns=ArrayMessage.of(self._table.files["modified_ns"][files]),
                attributes=encode_columns(columns),
            )
        )

    def _in_order(
        self, order: Uint64Array, ends: Sequence[int]
    ) -> Generator[SampleBlock, None, None]:
        sizes, first = self._sizes[self._chosen], self._first
        for block in indexed_blocks(
            order, sizes, self._read, self.buffer_bytes, first=first, ends=ends
        ):
            assert block.cursor is not None
            position = self._base + block.cursor["position"]
            yield replace(block, cursor={"position": position})
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Check, after the last block, what was not checked when a file was read."""

    def _read(self, numbers: Uint64Array, offsets: Int64Array, buffer: Bytes) -> SampleBlock:
        indices = self._chosen[numbers]
        table, in_order = self._table, np.argsort(indices)
        lengths = self._sizes[indices].astype(np.int64)
        chosen = indices[in_order]
        files = table.files[chosen]
        files["buffer_offset"] = offsets[in_order]
        are_read = [True] * len(indices)
        if self._fill(files, chosen, buffer):
            for bad in np.flatnonzero(files["code"]).tolist():
                index = int(chosen[bad])
                self._note(index, self._failure(index, int(files["code"][bad])))
                are_read[in_order[bad]] = False
        attributes = {name: values[indices] for name, values in self._attributes.items()}
        block = SampleBlock(self._sample_paths(indices), buffer, offsets, lengths, attributes)
        return choose_samples(block, are_read)

    def _note(self, index: int, error: DlfsError) -> None:
        """Note that a file of the table is a bad record; see ``BadRecords.note``."""
        self.bad.note(self._folder, os.fsdecode(self._table.path(index)), error)

    def _leave_out(self, index: int, error: DlfsError) -> None:
        """Note a file, and do not read it; called while the source is opened."""
        self._note(index, error)
        self._left_out.add(index)

    def _fill(self, files: npt.NDArray[np.void], _chosen: Uint64Array, buffer: Bytes) -> int:
        """Read files, whose indices are given, into a buffer; return how many failed."""
        return read_files(
            self._opened.value,
            self._table.names,
            files,
            buffer,
            follow_links=self._follow_links,
            threads=THREADS,
        )

    def _sample_paths(self, indices: Array) -> list[bytes]:
        """Return the paths of samples by the numbers of their files."""
        return self._table.paths(indices)

    def _stat(self) -> None:
        for bad in self._table.stat():
            if bad in self._left_out:
                continue
            path, code = self._table.path(bad), int(self._table.files["code"][bad])
            why = "the file may not be read" if code == -errno.EACCES else describe(code)
            error = DeviceError(f"import {join_shown(self._folder, path)}: {why}", -code)
            self._leave_out(bad, error)

    def _failure(self, index: int, code: int) -> DlfsError:
        path, size = join_shown(self._folder, self._table.path(index)), int(self._sizes[index])
        if code in (-errno.ESTALE, -errno.ENOENT, -errno.ELOOP):
            return DeviceError(
                f"import {path}: the file changed during the import (it had {size} bytes)",
                errno.ESTALE,
            )
        return DeviceError(f"import {path}: read {size} bytes: {describe(code)}", -code)


class DescribedFiles(FilesSource):
    """A part of the files of another source, in the order in which they are packed.

    Args:
        part: the description of the part.

    Raises:
        FormatError: the description is none.
        DlfsError: as for ``FilesSource``, but the files are first looked at when they are read.
    """

    def __init__(self, part: FilesPart) -> None:
        self._paths = split_paths(part.paths)
        self._samples = split_paths(part.sample_paths)
        self._sizes_given = decode_sizes(part.sizes)
        self._modified_ns = decode_array(part.modified_ns, "times", np.int64)
        counts = {len(self._paths), len(self._sizes_given), len(self._modified_ns)}
        if len(counts) > 1 or (part.sample_paths and len(self._samples) != len(self._paths)):
            raise malformed("expected as many paths as sizes and times")
        if b"\0" in part.folder or not part.folder.startswith(b"/"):
            raise malformed("expected the absolute path of a folder")
        self._columns = decode_columns(part.attributes, len(self._paths))
        super().__init__(
            to_text(part.name), os.fsdecode(part.folder), follow_links=part.follows_links
        )
        self._base = part.first
        self.buffer_bytes = part.buffer_bytes

    def _make_table(self) -> FileTable:
        return FileTable()

    def _find_files(self) -> Mapping[str, Array]:
        self._table.add_all(self._paths)
        return self._columns

    def _stat(self) -> None:
        self._table.prepare()
        self._table.files["length_bytes"] = self._sizes_given
        self._table.files["modified_ns"] = self._modified_ns

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Do not read the first files of the part; see ``Source.seek``."""
        self._first = count if cursor is None else position_after(count, cursor) - self._base
        return count

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every file of the part once; layout and seed have given the part its order."""
        del layout, seed
        order = np.arange(len(self._chosen), dtype=np.uint64)
        return stream_ahead(self._in_order(order, []), bad=self.bad)

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Return None: a part has no parts."""
        return Source.divide(self, layout=layout, seed=seed, part_bytes=part_bytes)

    def _sample_paths(self, indices: Array) -> list[bytes]:
        if not self._samples:
            return super()._sample_paths(indices)
        return [self._samples[index] for index in indices.tolist()]


def described_bytes(values: Array) -> Int64Array:
    """Return the bytes that the values of an attribute take in the description of a part."""
    if not values.dtype.hasobject:
        each = values.nbytes // max(1, len(values))
        return np.full(len(values), each, np.int64)
    lengths = (len(text) if text.isascii() else len(to_bytes(text)) for text in values.tolist())
    return np.fromiter(lengths, np.int64, len(values))


def join_shown(folder: str, path: bytes) -> str:
    """Return the path of a file in a folder, for a message."""
    return show(os.fsencode(folder).rstrip(b"/") + b"/" + path)
